"""Hybrids of two methods, and rings of rings: what they are at their ends, which links they use, what waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp_bench.check import check
from sp_bench.methods import build
from sp_bench.plan import Attend, AttendBackward, Group, Method, Pass, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import PlanError
from sp_bench.plan.tensors import KV
from tests.support.plan_edits import with_changed
from tests.support.problems import small_problem, splittable_problem


def hops(method: Method, problem: Problem, phase: str) -> list[tuple]:
    """The transfers of a plan, sorted: the tensor, and for each rank the one that it receives from."""
    plan = method.plan(problem, phase, COMPUTE_BOUND)
    passes = [op for op in plan.ops if isinstance(op, Pass)]
    return sorted((op.tensor.name, *(int(op.source(rank)) for rank in range(problem.n))) for op in passes)


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
    method = build("ulysses_all_gather", {"ulysses": 2, "collectives": "messages"})
    plan = method.plan(problem, phase, COMPUTE_BOUND)
    used = [op.kv.index for op in plan.ops if isinstance(op, Attend | AttendBackward)]
    arrived = [op.recv.index for op in plan.ops if isinstance(op, Pass) and op.tensor == KV.by_heads]
    assert used[0] == 0
    assert used[1] == arrived[-1]
    assert sorted(used) == [0, *sorted(arrived)] == list(range(4))


@pytest.mark.parametrize(("n", "w", "rings"), [(8, 8, 4), (7, 7, 6), (16, 8, 4), (12, 4, 2)])
@pytest.mark.parametrize("phase", PHASES)
def test_rings_of_tasp_share_no_link_and_go_round_the_node(n: int, w: int, rings: int, phase: str) -> None:
    """Inside a node a lane has one ring, of all its ranks; a link is of one lane only. 7 ranks use all 42 links."""
    problem = replace(small_problem(n), heads=24, kv_heads=24)
    method = build("tasp", {"inner": w, "rings": rings})
    plan = method.plan(problem, phase, COMPUTE_BOUND)
    lanes: dict[str, set[tuple[int, int]]] = {}
    for op in plan.ops:
        if isinstance(op, Pass) and op.lane.startswith("inner kv"):
            lanes.setdefault(op.lane, set()).update((rank, int(op.target(rank))) for rank in range(n))
    assert len(lanes) == rings
    assert sum(map(len, lanes.values())) == len(set().union(*lanes.values())) == rings * n
    for links in lanes.values():
        following = dict(links)
        rank, seen = 0, []
        for _ in range(w):
            seen.append(rank)
            rank = following[rank]
        assert rank == 0 and sorted(seen) == list(range(w))


def test_tasp_on_one_ring_is_a_double_ring() -> None:
    problem = splittable_problem(8)
    for phase in PHASES:
        found = hops(build("tasp", {"inner": 4, "rings": 1}), problem, phase)
        assert found == hops(build("double_ring", {"inner": 4}), problem, phase)


def test_a_step_with_a_divisor_in_common_with_the_ranks_is_refused() -> None:
    """Such a ring would miss some ranks."""
    problem = splittable_problem(4, causal=False)
    plan = build("ring", {}).plan(problem, "forward", COMPUTE_BOUND)
    with pytest.raises(PlanError, match=r"way=2.* doesn't go round all its ranks"):
        check(with_changed(plan, 0, group=Group(1, 4, 2)).plan, problem)
