"""Hybrids of two methods: what they are where one of the two has a single rank, and what crosses nodes."""

from __future__ import annotations

import pytest

from sp_bench.methods import build
from sp_bench.plan import Attend, AttendBackward, Method, Pass, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from tests.support.problems import splittable_problem


def hops(method: Method, problem: Problem, phase: str) -> list[tuple]:
    """The transfers of a plan, sorted: the tensor, and for each rank the one that it receives from."""
    plan = method.plan(problem, phase, COMPUTE_BOUND)
    passes = [op for op in plan.ops if isinstance(op, Pass)]
    return sorted((op.carries, *(int(op.source(rank)) for rank in range(problem.n))) for op in passes)


@pytest.mark.parametrize("phase", PHASES)
def test_loongtrain_with_inner_rings_of_one_rank_is_usp(phase: str) -> None:
    problem = splittable_problem(8)
    for u in (1, 2, 4, 8):
        found = hops(build("loongtrain", {"ulysses": u, "inner": 1}), problem, phase)
        assert found == hops(build("usp", {"ulysses": u}), problem, phase)


@pytest.mark.parametrize("phase", PHASES)
def test_loongtrain_whose_groups_have_one_rank_is_a_double_ring(phase: str) -> None:
    problem = splittable_problem(8)
    for w in (2, 4):
        found = hops(build("loongtrain", {"ulysses": 1, "inner": w}), problem, phase)
        renamed = [(tensor.removesuffix("_h"), *ranks) for tensor, *ranks in found]
        assert renamed == hops(build("double_ring", {"inner": w}), problem, phase)


@pytest.mark.parametrize("w", [1, 2, 4])
def test_only_outer_hops_of_loongtrain_cross_nodes(w: int) -> None:
    """16 ranks, 2 heads groups, inner rings of w inside nodes of 2 w ranks: n / (u w) - 1 hops cross them."""
    n, u = 16, 2
    problem = splittable_problem(n)
    method = build("loongtrain", {"ulysses": u, "inner": w})
    node = u * w
    crossing = 0
    for tensor, *sources in hops(method, problem, "forward"):
        assert tensor == "kv_h"
        crossing += any(source // node != rank // node for rank, source in enumerate(sources))
    # An outer ring of one rank doesn't hop; with w = 1 every hop is an outer one.
    assert crossing == n // (u * w) - 1


@pytest.mark.parametrize("phase", PHASES)
def test_blocks_of_ulysses_all_gather_wait_for_the_whole_gather(phase: str) -> None:
    """But for the first, with the rank's own KV; the next one uses the KV that arrives last."""
    problem = splittable_problem(8)
    plan = build("ulysses_all_gather", {"ulysses": 2}).plan(problem, phase, COMPUTE_BOUND)
    used = [op.kv.index for op in plan.ops if isinstance(op, Attend | AttendBackward)]
    arrived = [op.recv.index for op in plan.ops if isinstance(op, Pass) and op.carries == "kv_h" and op.recv]
    assert used[0] == 0
    assert used[1] == arrived[-1]
    assert sorted(used) == [0, *sorted(arrived)] == list(range(4))
