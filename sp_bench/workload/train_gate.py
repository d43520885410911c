"""The correctness gate of workload=train and dit: loss and gradients against one process in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.kernels.reference import exact
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import Mask
from sp_bench.plan.problem import Problem
from sp_bench.run.engine import Saved
from sp_bench.workload.attention_step import make_engines
from sp_bench.workload.base import PlannedAttention, RankContext, Spec
from sp_bench.workload.exactness import relative_error, squared_norms
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.trainer import Trainer, group_on

if TYPE_CHECKING:
    from sp_bench.workload.train import Train

GATE_TOKENS, LEAST_TOKENS = 256, 16
"""The number of tokens on a rank in the gate's problem: several tiles of every kernel; what it has at least."""
WORK, SCORES = {"cpu": 5e8, "cuda": 1e12}, {"cpu": 2**24, "cuda": 2**28}
"""Most multiplications of one matrix product, of all heads and layers on a rank, and most scores of a head, in the
exact attention: with many ranks they have fewer tokens each."""
COMPOUNDED = 4
"""Errors of a gradient grow over layers and losses: the tolerance as a multiple of that of one attention."""


class ExactAttention:
    """Attention of a whole sequence in fp64, without plans. Ranks of the default group can share its key heads."""

    latents = None
    """None: keys are made of latents before it."""

    def __init__(self, mask: Mask, rank: int = 0, ranks: int = 1, alive: Callable[[], None] = lambda: None) -> None:
        self._mask, self._rank, self._ranks, self._alive = mask, rank, ranks, alive

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Saved]:
        """The output, (B, S, H, D), and what the backward needs."""
        inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
        dout = q.new_zeros(*q.shape[:3], v.shape[3])
        return self._exact(dout, inputs, range(1))[0], {"inputs": inputs}

    def backward(self, dout: Tensor, saved: Saved) -> tuple[Tensor, ...]:
        """(dq, dk, dv), and the gradient of sinks if there are some."""
        inputs = saved["inputs"]
        return self._exact(dout, inputs, range(1, 1 + len(inputs)))

    def _exact(self, dout: Tensor, inputs: tuple[Tensor, ...], wanted: range) -> tuple[Tensor, ...]:
        """Those of (out, dq, dk, dv, dsinks) that are wanted, with all heads."""
        q, k, v, *sinks = inputs
        results_of = [torch.zeros_like(x, dtype=torch.float64) for x in (dout, *inputs)]
        sharing = q.shape[2] // k.shape[2]
        for head in range(self._rank, k.shape[2], self._ranks):
            self._alive()
            of_keys, of_queries = slice(head, head + 1), slice(head * sharing, (head + 1) * sharing)
            queries, gradients = (x[:, :, of_queries] for x in (q, dout))
            of_heads = sinks[0][of_queries] if sinks else None
            results = exact(queries, k[:, :, of_keys], v[:, :, of_keys], gradients, self._mask, of_heads)
            for i, x in enumerate(results[:4]):
                results_of[i][:, :, of_queries if i < 2 else of_keys] = x
            if sinks:
                results_of[4][of_queries] = results[4]
        return tuple(self._of_all(results_of[i]) for i in wanted)

    def _of_all(self, mine: Tensor) -> Tensor:
        """The sum over ranks, each of which has some heads."""
        if self._ranks == 1:
            return mine
        summed = mine.cpu()
        dist.all_reduce(summed)
        return summed.to(mine.device)


def gate(workload: Train, spec: Spec, context: RankContext) -> GateErrors:
    """Errors of the point's plans in a narrow model on a shorter sequence. All ranks must call it."""
    problem, model = spec.problem, workload.model.small()
    small = problem.scaled(gate_tokens(problem, model.layers, context.device.type))
    group = group_on(context.device) if problem.n > 1 else None
    given = model, small, workload.training, spec.seed, context.rank, context.device, group
    trainer = Trainer(*given, sharded=workload.sharded)
    engines = make_engines(spec, _small(workload, spec, small), context)
    batch = trainer.batch(0)
    trainer.loss(trainer.hidden(batch, *engines), batch).backward()
    for engine in engines:
        engine.close()
    context.alive()
    trainer.states.synchronize()
    context.alive()
    errors = replace(compared(trainer, whole(workload, spec.seed, small, context)), seqlen=small.seqlen)
    if group is not None and group is not dist.group.WORLD:
        dist.destroy_process_group(group)
    return errors


def _small(workload: Train, spec: Spec, problem: Problem) -> list[PlannedAttention]:
    """The point's attentions on the gate's problem, all of the same tokens on each rank."""
    short = zip(spec.attentions, workload.attentions(problem), strict=True)
    return [
        PlannedAttention(replace(one.problem, seqlen=problem.seqlen, mask=each.mask, layout=problem.layout), one.plans)
        for one, each in short
    ]


def gate_tokens(problem: Problem, layers: int, device: str) -> int:
    """The tokens of the gate's problem: as many as its exact attention has time and memory for."""
    tokens, more = divmod(problem.seqlen, problem.n)
    shared = -(-problem.kv_heads // problem.n) * (problem.heads // problem.kv_heads)
    pairs = min(SCORES[device], WORK[device] / (problem.batch * shared * layers * problem.head_dim))
    each = max(LEAST_TOKENS, min(GATE_TOKENS, math.isqrt(int(pairs)) // problem.n))
    return min(each, tokens) * problem.n + more


def whole(workload: Train, seed: int, problem: Problem, context: RankContext) -> Trainer:
    """The same model on one process, in fp64 and with exact attention, after its backward."""
    alone = on_one_process(problem)
    trainer = Trainer(workload.model.small(), alone, workload.training, seed, 0, context.device, None)
    attentions = [
        ExactAttention(each.mask, context.rank, problem.n, context.alive) for each in workload.attentions(alone)
    ]
    batch = trainer.batch(0)
    trainer.loss(trainer.hidden(batch, *attentions), batch).backward()
    return trainer


def on_one_process(problem: Problem) -> Problem:
    """The problem on one process in fp64. Keys are made of latents by the layers, so that gradients are autograd's."""
    alone = replace(
        problem.in_one_slice, n=1, dtype="float64", wire_dtype="", layout=LAYOUTS["contiguous"], padded=None
    )
    return replace(alone, latent_dim=None, rope_dim=None, kv_heads=alone.heads) if alone.latent_dim else alone


def compared(found: Trainer, wanted: Trainer) -> GateErrors:
    """Relative L2 errors of the loss, of all gradients together, and of the gradient of each parameter."""
    loss = abs(found.global_loss / wanted.global_loss - 1)
    names = [name for name, _ in found.network.named_parameters()]
    each, squares, elements = {}, [], 0
    for name, mine, exact_one in zip(names, found.states.gradients(), wanted.states.gradients(), strict=True):
        squares.append(squared_norms(mine, exact_one))
        elements += mine.numel()
        each[f"gradient of {name}"] = float(relative_error(squares[-1], mine.numel()))
    overall = {"loss": loss, "gradient": float(relative_error(torch.stack(squares).sum(0), elements))}
    return GateErrors(overall=overall, worst_head=each, factor=COMPOUNDED)
