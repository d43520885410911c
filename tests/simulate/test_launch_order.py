"""NCCL's launch order in the simulator: a rank's transfers start in plan order, whatever lane they are of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp_bench.lower import TransportOptions
from sp_bench.methods import build
from sp_bench.plan import Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Transfer
from sp_bench.simulate import Run, simulate
from tests.support.clusters import cluster, problem, split_problem
from tests.support.problems import all_methods, of_each_name


def starts(run: Run, rank: int) -> list[float]:
    """When each transfer of a rank starts, in plan order."""
    spans, items = run.spans(rank), run.graph.items
    moving = [isinstance(i.what, int) and isinstance(run.plan.ops[i.what], Transfer) for i in items]
    return [span.start_s for span, moves in zip(spans, moving, strict=True) if moves]


def double_ring(n: int) -> tuple[Problem, dict]:
    p, method = problem(n, tokens=2048, causal=True, layout="zigzag"), build("double_ring", {"inner": 4})
    return p, {phase: method.plan(p, phase, COMPUTE_BOUND) for phase in PHASES}


def test_a_transfer_that_is_ready_waits_for_an_earlier_one() -> None:
    p, plans = double_ring(16)
    free, ordered = cluster(gpus_per_node=4), replace(cluster(gpus_per_node=4), launch_order=True)
    before, after = (simulate(plans["backward"], p, where) for where in (free, ordered))
    assert any(starts(before, rank) != sorted(starts(before, rank)) for rank in range(16))
    assert all(starts(after, rank) == sorted(starts(after, rank)) for rank in range(16))
    assert after.makespan_s > before.makespan_s


def test_it_is_a_cluster_s_own_setting() -> None:
    """And of NCCL: copy engines and gloo have no such order; nor is there one within a lane."""
    p, plans = double_ring(8)
    where = cluster(gpus_per_node=4)
    assert not where.launch_order
    ordered = replace(where, launch_order=True)
    symmetric = replace(ordered, transport_options=TransportOptions(name="symmetric_memory"))
    assert ordered.starts_in_order(plans["backward"]) and not symmetric.starts_in_order(plans["backward"])
    one_lane = build("ring", {}).plan(p, "forward", COMPUTE_BOUND)
    assert not ordered.starts_in_order(one_lane)
    assert simulate(one_lane, p, ordered).makespan_s == simulate(one_lane, p, where).makespan_s


@pytest.mark.parametrize("symmetry", [True, False])
def test_no_plan_deadlocks_and_none_gets_much_faster(symmetry: bool) -> None:
    """Every method ends; one of each kind of rank stands for all."""
    p = split_problem(8)
    where = cluster(gpus_per_node=4)
    for method in of_each_name(all_methods(p), turn=int(symmetry)):
        for phase in PHASES:
            plan, assigned = method.plan(p, phase, COMPUTE_BOUND), method.assigned(p)
            before, after = (
                simulate(plan, assigned, replace(where, launch_order=order), use_symmetry=symmetry).makespan_s
                for order in (False, True)
            )
            assert after >= 0.95 * before
            assert after == pytest.approx(simulate(plan, assigned, replace(where, launch_order=True)).makespan_s)
