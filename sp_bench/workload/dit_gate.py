"""The correctness gate of a denoising step: patches and attention of each layer against one process in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL, Joint
from sp_bench.plan.problem import Problem
from sp_bench.run.engine import Engine
from sp_bench.workload.attention_step import make_engine
from sp_bench.workload.base import RankContext, Spec
from sp_bench.workload.denoiser import Denoiser
from sp_bench.workload.exactness import relative_error, squared_norms
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.train_gate import COMPOUNDED, ExactAttention, gate_tokens

if TYPE_CHECKING:
    from sp_bench.workload.dit import Denoise


class Seen:
    """The outputs of a denoiser's attentions, layer by layer, and how they are computed."""

    def __init__(self, attention: Engine | ExactAttention) -> None:
        self._attention = attention
        self.outs: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, held: tuple[Tensor, ...]) -> Tensor:
        if isinstance(self._attention, Engine):
            out, _ = self._attention.forward(q, k, v, held=held)
        else:
            k, v = (torch.cat(pair, 1) for pair in zip(held, (k, v), strict=True)) if held else (k, v)
            out, _ = self._attention.forward(q, k, v)
        self.outs.append(out)
        return out


def gate(workload: Denoise, spec: Spec, context: RankContext) -> GateErrors:
    """Errors of the point's plans in a narrow model on fewer patches. All ranks must call it.

    They are those of the layer whose attention is off most, and of the patches.
    """
    model = workload.model.small()
    problem = _small(spec.problem, model.joint_tokens, gate_tokens(spec.problem, model.layers, context.device.type))
    denoiser = Denoiser(model, problem, spec.seed, context.rank, context.device)
    engine = make_engine(spec, problem, context)
    assert isinstance(engine, Engine)
    seen = Seen(engine)
    patches = denoiser.predicted(denoiser.latent(0), seen)
    engine.close()
    context.alive()
    exact_patches, exact = _whole(workload, spec, problem, context)
    mine, text = denoiser.places.to(context.device), model.joint_tokens
    rows = torch.cat((torch.arange(text, device=context.device), mine + text))  # text first, which all ranks have
    pairs = [(patches, exact_patches[:, mine])]
    pairs += [(out, exact_out[:, rows]) for out, exact_out in zip(seen.outs, exact, strict=True)]
    squares = torch.stack([squared_norms(*pair) for pair in pairs]).cpu()
    if problem.n > 1:
        dist.all_reduce(squares)
    errors = [float(relative_error(square, pair[0].numel())) for square, pair in zip(squares, pairs, strict=True)]
    # The residual stream hides what an attention adds to patches as long as the weights are random.
    worst = {"out": max(errors[1:])}
    return GateErrors(overall=worst, worst_head={"patches": errors[0]}, factor=COMPOUNDED, seqlen=problem.keys.seqlen)


def _small(problem: Problem, text: int, tokens: int) -> Problem:
    """The problem with so many patches at most, assigned as the point's are, and less text."""
    if not problem.mask.held:
        return problem.scaled(tokens)
    patches = min(tokens, problem.keys.seqlen) // problem.n * problem.n
    return replace(problem, seqlen=patches + problem.n * text, kv_seqlen=patches, mask=Joint(text))


def _whole(workload: Denoise, spec: Spec, problem: Problem, context: RankContext) -> tuple[Tensor, list[Tensor]]:
    """(patches, output of each attention) of the same model on one process, in fp64 and with exact attention."""
    text = problem.mask.held
    alone = replace(
        problem.in_one_slice,
        n=1,
        seqlen=problem.keys.seqlen + text,
        kv_seqlen=problem.keys.seqlen,
        dtype="float64",
        wire_dtype="",
        padded=None,
        layout=LAYOUTS["contiguous"],
    )
    denoiser = Denoiser(workload.model.small(), alone, spec.seed, 0, context.device)
    seen = Seen(ExactAttention(FULL if text else problem.mask, context.rank, problem.n, context.alive))
    return denoiser.predicted(denoiser.latent(0), seen), seen.outs
