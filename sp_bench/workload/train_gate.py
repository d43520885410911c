"""The correctness gate of workload=train and dit: loss and gradients against one process in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.kernels.reference import exact
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import Mask
from sp_bench.plan.problem import Problem
from sp_bench.run.attention import Saved
from sp_bench.workload.attention_step import make_engine
from sp_bench.workload.base import RankContext
from sp_bench.workload.exactness import relative_error, squared_norms
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.trainer import Trainer, group_on

if TYPE_CHECKING:
    from sp_bench.workload.train import Train

GATE_TOKENS = 16
"""The number of tokens on a rank in the gate's problem."""
COMPOUNDED = 4
"""Errors of a gradient grow over layers and losses: the tolerance as a multiple of that of one attention."""


class ExactAttention:
    """Attention of a whole sequence in fp64, without plans."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
        """The output, (B, S, H, D), and what the backward needs."""
        return exact(q, k, v, torch.zeros_like(q), mask=self._mask)[0], {"qkv": (q, k, v)}

    def backward(self, dout: Tensor, saved: Saved) -> tuple[Tensor, ...]:
        """(dq, dk, dv)."""
        q, k, v = saved["qkv"]
        return exact(q, k, v, dout, mask=self._mask)[1:]


def gate(workload: Train, context: RankContext) -> GateErrors:
    """Errors of the workload's plans in a narrow model on a shorter sequence. All ranks must call it."""
    problem, model = workload.problem, workload.model.small()
    tokens, more = divmod(problem.seqlen, problem.n)
    small = problem.scaled(min(GATE_TOKENS, tokens) * problem.n + more)
    group = group_on(context.device) if problem.n > 1 else None
    given = model, small, workload.training, workload.seed, context.rank, context.device, group
    trainer = Trainer(*given, sharded=workload.sharded)
    engine = make_engine(workload, small, context)
    batch = trainer.batch(0)
    trainer.loss(trainer.hidden(batch, engine), batch).backward()
    engine.close()
    context.alive()
    trainer.states.synchronize()
    context.alive()
    errors = compared(trainer, whole(workload, small, context))
    if group is not None and group is not dist.group.WORLD:
        dist.destroy_process_group(group)
    return errors


def whole(workload: Train, problem: Problem, context: RankContext) -> Trainer:
    """The same model on one process, in fp64 and with exact attention, after its backward."""
    alone = replace(problem.in_one_slice, n=1, dtype="float64", wire_dtype="", layout=LAYOUTS["contiguous"])
    trainer = Trainer(workload.model.small(), alone, workload.training, workload.seed, 0, context.device, None)
    batch = trainer.batch(0)
    trainer.loss(trainer.hidden(batch, ExactAttention(alone.mask)), batch).backward()
    return trainer


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
