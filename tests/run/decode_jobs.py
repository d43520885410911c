"""Jobs of ranks that execute decode steps. Imported inside the ranks: no pytest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sp_bench.check import check_all
from sp_bench.methods import build
from sp_bench.plan.caches import Caches
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.problem import Problem
from sp_bench.run.caches import in_pages, reads_in_place
from sp_bench.run.engine import Engine
from sp_bench.run.nccl import transport_for
from sp_bench.run.sharding import owned
from tests.support.ranks import group_of
from tests.support.typed import there


class Case(NamedTuple):
    """One decode step on the first `n` ranks."""

    n: int
    method: str
    lengths: tuple[int, ...]
    new: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    latent: bool = False
    dtype: str = "float32"
    options: tuple[tuple[str, object], ...] = ()
    page: int | None = None
    left: int | None = None
    """The window's keys before a token; the lengths are then those of what is left of caches."""
    chunk: int | None = None
    """The tokens of a chunk of the mask; the lengths, all alike, are those of whole caches."""
    sinks: bool = False
    in_place: bool = False
    """Whether its kernel reads the pages as they lie."""

    @property
    def problem(self) -> Problem:
        """Its attention: query heads of a key head are rows."""
        mask = Caches(self.lengths, self.new, self.heads // self.kv_heads, self.page, self.left)
        mask = mask.chunked(self.chunk) if self.chunk else mask
        shape = {"seqlen": mask.seqlen, "kv_seqlen": mask.kv_seqlen, "heads": self.kv_heads, "kv_heads": self.kv_heads}
        widths = {"head_dim": self.head_dim, "v_head_dim": self.v_head_dim, "absorbed": self.latent}
        return Problem(n=self.n, **shape, **widths, mask=mask, dtype=self.dtype, layout=mask.layout("auto"))


class Error(NamedTuple):
    """How far a rank's outputs are from fp64, and what it sent beside its part of the count."""

    relative: float
    sent: int
    counted: float


def find_errors(cases: Sequence[Case]) -> dict[Case, Error]:
    """For each case that this rank has a part in, the error of its rows."""
    found = {}
    for case in cases:
        if (group := group_of(case.n, case)) is not None:
            found[case] = _error(case, group)
    return found


def _error(case: Case, group) -> Error:
    rank = torch.distributed.get_rank(group) if case.n > 1 else 0
    method = build(case.method, dict(case.options))
    problem = method.assigned(case.problem)
    plans = {"forward": method.plan(problem, "forward", COMPUTE_BOUND)}
    check_all(plans, problem)
    q, k, v = _whole(case)
    dtype = getattr(torch, case.dtype)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    rows, keys = owned(problem.queries, rank), owned(problem.keys, rank)
    transport = transport_for(group, torch.device("cpu"), plans, None) if case.n > 1 else None
    engine = Engine(plans, problem, "auto", torch.device("cpu"), rank=rank, transport=transport)
    assert case.in_place == reads_in_place(engine.kernel, problem)
    given = q if problem.queries_everywhere else q[:, rows]
    out, sinks = None, _sinks(case) if case.sinks else None
    for _ in range(2):  # the second one uses the same buffers
        out, _ = engine.forward(
            given.clone(), *in_pages(problem, rank, k[:, keys].clone(), v[:, keys].clone()), sinks=sinks
        )
    sent = sum(engine.transport.sent_bytes.values())
    engine.close()
    values = k[..., : problem.value_dim] if case.latent else v
    wanted = _dense(case, q.double(), k.double(), values.double())[:, rows]
    relative = float((there(out).double() - wanted).norm() / wanted.norm())
    return Error(relative, sent, 2 * method.bytes_sent(case.problem, "forward"))


def _sinks(case: Case) -> Tensor:
    """Scores of sinks by key head and query head in it."""
    return torch.linspace(-3, 4, case.heads, dtype=torch.float64).view(case.kv_heads, -1)


def _whole(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of all sequences."""
    generator = torch.Generator().manual_seed(hash(case.lengths) % 1000)
    problem = case.problem
    widths = (problem.head_dim, problem.head_dim, 0 if case.latent else problem.value_dim)
    tokens = (problem.seqlen, problem.keys.seqlen, problem.keys.seqlen)
    q, k, v = (
        torch.randn(1, count, case.kv_heads, width, generator=generator)
        for count, width in zip(tokens, widths, strict=True)
    )
    return q, k, v


def _dense(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v of each new token and query head over the cache of its sequence, one by one."""
    share = case.heads // case.kv_heads
    out, row, first = q.new_zeros(*q.shape[:3], v.shape[3]), 0, 0
    for length in case.lengths:
        lost = (length - case.new) // case.chunk * case.chunk if case.chunk else 0
        for token in range(case.new):
            stop = first + length - lost - case.new + token + 1
            start = first if case.left is None else max(first, stop - 1 - case.left)
            start = first - lost + (length - case.new + token) // case.chunk * case.chunk if case.chunk else start
            for member in range(share):
                scores = torch.einsum("hd,khd->hk", q[0, row], k[0, start:stop]) / math.sqrt(case.head_dim)
                sinks = _sinks(case)[:, member, None] if case.sinks else scores.new_full((case.kv_heads, 1), -math.inf)
                shares = torch.cat([scores, sinks.to(scores)], 1).softmax(1)[:, :-1]
                out[0, row] = torch.einsum("hk,khd->hd", shares, v[0, start:stop])
                row += 1
        first += length - lost
    return out
