"""The correctness gate of workload=attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.kernels.reference import exact
from sp_bench.plan.problem import Problem
from sp_bench.run.sharding import shard, unshard
from sp_bench.workload.attention_step import make_engine
from sp_bench.workload.base import RankContext, Workload
from sp_bench.workload.exactness import NAMES, relative_error, squared_norms
from sp_bench.workload.gate import GateErrors

GATE_TOKENS = 32
"""The number of tokens on a rank in the gate's problem."""


def gate(workload: Workload, context: RankContext) -> GateErrors:
    """Errors of the workload's plans or peer on its problem with a shorter sequence. All ranks must call it.

    Everything runs twice with the same buffers, and the second results are compared. Each rank computes the exact
    results of some key heads, one query head after the other: with many ranks, one rank would take minutes for all.
    """
    problem = workload.problem
    tokens, more = divmod(problem.seqlen, problem.n)  # the small one is as uneven
    unit = workload.peer.document_unit(problem.n) if workload.peer else 1
    small = problem.scaled(min(GATE_TOKENS, tokens) * problem.n + more, unit)
    generator = torch.Generator().manual_seed(workload.seed)
    dtype = getattr(torch, small.dtype)
    inputs = [
        torch.randn((small.batch, small.seqlen, heads, small.head_dim), generator=generator).to(dtype)
        for heads in (small.heads, small.kv_heads, small.kv_heads, small.heads)
    ]
    found = _executed(workload, small, inputs, context)
    squares = _squares(found, small, inputs, context)
    if dist.is_initialized():
        dist.all_reduce(squares)
    return _errors(squares, found)


def _executed(workload: Workload, small: Problem, inputs: Sequence[Tensor], context: RankContext) -> list[Tensor]:
    """The full (out, dq, dk, dv), or (out,) without a backward, of the full (q, k, v, dout)."""
    q, k, v, dout = (shard(x, small.layout, context.rank, small.n).to(context.device) for x in inputs)
    engine = make_engine(workload, small, context)
    found: list[Tensor] = []
    for _ in range(2):
        context.alive()
        out, saved = engine.forward(q, k, v)
        found = [out]
        if "backward" in workload.executed(workload.phases):
            context.alive()
            found += engine.backward(dout, saved)
    engine.close()
    return [unshard(x.cpu(), small.layout, None, small.n) for x in found]


def _squares(found: Sequence[Tensor], small: Problem, inputs: Sequence[Tensor], context: RankContext) -> Tensor:
    """Squared norms of errors and of exact results, (2, tensors, heads); 0 for heads that other ranks compare."""
    q, k, v, dout = inputs
    squares, sharing = torch.zeros(2, len(found), small.heads, dtype=torch.float64), small.heads // small.kv_heads

    def compare(tensor: int, head: int, wanted: Tensor) -> None:
        if tensor < len(found):
            squares[:, tensor, head] = squared_norms(found[tensor][:, :, head], wanted.squeeze(2).cpu())

    for kv_head in range(context.rank, small.kv_heads, small.n):
        of_keys: list[Tensor] = []
        for head in range(kv_head * sharing, (kv_head + 1) * sharing):
            context.alive()
            of_head = ((q, head), (k, kv_head), (v, kv_head), (dout, head))
            out, dq, *dkv = exact(*(x[:, :, i : i + 1].to(context.device) for x, i in of_head), mask=small.mask)
            compare(0, head, out)
            compare(1, head, dq)
            of_keys = [x + y for x, y in zip(of_keys, dkv, strict=True)] if of_keys else dkv
        for tensor, wanted in enumerate(of_keys, start=2):
            compare(tensor, kv_head, wanted)
    return squares


def _errors(squares: Tensor, found: Sequence[Tensor]) -> GateErrors:
    """The relative errors, from the `_squares` of all ranks added up."""
    overall, worst_head = {}, {}
    for i, (name, x) in enumerate(zip(NAMES, found, strict=False)):
        of_heads = squares[:, i, : x.shape[2]]
        overall[name] = float(relative_error(of_heads.sum(1), x.numel()))
        worst_head[name] = float(relative_error(of_heads, x.numel() // x.shape[2]).max())
    return GateErrors(overall=overall, worst_head=worst_head)
