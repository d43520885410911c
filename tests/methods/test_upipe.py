"""UPipe: each key head is assigned once, what stages save, and what their proof refuses."""

from __future__ import annotations

import math

import pytest
import torch

from sp_bench import account
from sp_bench.check import check
from sp_bench.methods import build
from sp_bench.plan import AllToAll, Attend, AttendBackward, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import PlanError
from sp_bench.plan.tensors import KV, O, Q
from sp_bench.run.slices import one_slice, together
from tests.support.plan_edits import with_changed, with_op, without

SHAPES = [(32, 32, 4), (32, 8, 4), (32, 8, 8), (64, 8, 16), (16, 16, 1)]
"""Heads, key heads and ranks: with at least as many key heads as ranks, and with fewer."""


def problem(heads: int, kv_heads: int, n: int) -> Problem:
    return Problem(n=n, seqlen=8 * n, heads=heads, kv_heads=kv_heads, head_dim=64, layout=LAYOUTS["contiguous"])


@pytest.mark.parametrize(("heads", "kv_heads", "n"), SHAPES)
def test_every_key_head_is_exchanged_once(heads: int, kv_heads: int, n: int) -> None:
    """However many stages there are, the forward sends what Ulysses sends."""
    asked = problem(heads, kv_heads, n)
    ulysses = build("ulysses", {})
    wanted = account.volume(ulysses.plan(asked, "forward", COMPUTE_BOUND), ulysses.assigned(asked))
    for method in build("upipe", {"stages": "auto"}).candidates(asked):
        plan = method.plan(asked, "forward", COMPUTE_BOUND)
        assert account.volume(plan, method.assigned(asked)).sent_bytes == wanted.sent_bytes
        keys = [op.recv for op in plan.ops if isinstance(op, AllToAll) and op.tensor == KV.by_heads]
        assert len(keys) == len(set(keys)) == math.gcd(method.head_slices(asked), max(kv_heads // n, 1))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "n"), SHAPES)
def test_peak_memory_is_the_formula(heads: int, kv_heads: int, n: int, overlap: bool) -> None:
    """The header's, and the one of docs/explanation/baselines.md for a backward whose stages have their own key heads.

    A unit is a chunk of Q in bf16. Statistics, which formulas leave out, are below 0.04 of it.
    """
    asked = problem(heads, kv_heads, n)
    k, padded, unit = kv_heads / heads, max(kv_heads, n) / heads, asked.chunk_bytes(Q, wire=True)
    for method in build("upipe", {"stages": "auto", "overlap": overlap}).candidates(asked):
        assigned = method.assigned(asked)
        s, t = assigned.head_slices, assigned.key_slices
        c, c_kv = (1 + (overlap and count > 1) for count in (s, t))
        forward, backward = (
            account.peak_bytes([method.plan(asked, p, COMPUTE_BOUND)], assigned) / unit for p in PHASES
        )
        assert forward == pytest.approx(3 + 2 * k + (c + 2) / s + 2 * padded * (c_kv + 1) / t, abs=0.04)
        if s == t and kv_heads >= n:
            assert backward == pytest.approx(4 + 4 * k + (3 * c + 3) / s + 2 * k * (2 * c + 2) / t, abs=0.04)


def test_a_stage_is_exchanged_before_the_blocks_of_the_one_before_it() -> None:
    asked = problem(32, 8, 8)
    for overlap in (True, False):
        (method,) = build("upipe", {"overlap": overlap}).candidates(asked)
        ops = method.plan(asked, "forward", COMPUTE_BOUND).ops
        assigned = [i for i, op in enumerate(ops) if isinstance(op, AllToAll) and op.tensor == Q.by_heads]
        blocks = [i for i, op in enumerate(ops) if isinstance(op, Attend)]
        assert [a < b for a, b in zip(assigned[1:], blocks[:-1], strict=True)] == [overlap] * 3


def test_slices_have_as_many_query_heads_of_each_key_head_and_make_the_whole() -> None:
    """12 query heads of 2 key heads in 2 x 3 slices: heads 0 to 5 attend to key head 0."""
    (method,) = build("upipe", {"stages": 6}).candidates(problem(12, 2, 2))
    assigned = method.assigned(problem(12, 2, 2))
    assert (assigned.head_slices, assigned.key_slices) == (6, 1)
    heads = torch.arange(12).reshape(1, 1, 12, 1)
    slices = [one_slice(heads, assigned, Q, i) for i in range(6)]
    assert [x.flatten().tolist() for x in slices] == [[i, 6 + i] for i in range(6)]
    assert torch.equal(together(slices, assigned, Q), heads)
    assert torch.equal(together([x[:, 0] for x in slices], assigned, O), heads[:, 0])


def test_every_part_of_a_key_heads_gradient_is_proven() -> None:
    """A query slice left out, one computed twice, and one with another slice's keys."""
    asked = problem(32, 8, 4)
    (method,) = build("upipe", {}).candidates(asked)
    plan, assigned = method.plan(asked, "backward", COMPUTE_BOUND), method.assigned(asked)
    check(plan, assigned)
    blocks = [(i, op) for i, op in plan if isinstance(op, AttendBackward)]
    assert len(blocks) == 8 and len({op.dkv for _, op in blocks}) == 2
    first, last = blocks[0], blocks[-1]
    with pytest.raises(PlanError, match="reads dq_h#0 .*before anything"):
        check(without(plan, last[0]), assigned)
    with pytest.raises(PlanError, match="mixes slices of heads"):
        check(with_changed(plan, last[0], kv=first[1].kv, dkv=first[1].dkv).plan, assigned)
    with pytest.raises(PlanError, match="computed twice"):
        check(with_op(plan, first[0] + 1, first[1]), assigned)
