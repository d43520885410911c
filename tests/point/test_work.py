"""Work of simulating a point, in counts: tasks, ranks, and how often anything is built. Times would hide it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sp_bench import simulate
from sp_bench.plan import block_classes, dataflow, schedule
from sp_bench.plan.method import Method
from sp_bench.plan.ops import Plan
from sp_bench.point import variant_bounds
from sp_bench.point.choose import choose
from sp_bench.point.simulated import simulate_point
from sp_bench.point.simulated_record import BY_KIND
from sp_bench.point.variants import variants
from sp_bench.simulate import flows, graph
from sp_bench.simulate.symmetry import links_are_of_pairs
from tests.support.points import point

BUILT = ((dataflow, "_values"), (schedule, "_waits"), (block_classes, "_find"))
"""Things that are made of a plan once, whoever asks for them."""


def counted(patch: pytest.MonkeyPatch, where: object, name: str, seen: Counter[Any], of: Callable[..., Any]) -> None:
    """Count the calls of a function by something of its arguments."""
    made = getattr(where, name)

    def counting(*arguments: Any, **named: Any) -> Any:
        seen[of(*arguments, **named)] += 1
        return made(*arguments, **named)

    patch.setattr(where, name, counting)


def of_plan(plan: Plan, *_: Any, **__: Any) -> Plan:
    return plan


@pytest.mark.parametrize("method", ["mesh", "ring", "usp"])
def test_everything_is_built_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a plan for each variant and phase; of each plan one bound by what it sends, and at most one by what it
    computes, one dataflow, one schedule and one table of blocks. All ranks are simulated for no variant but the chosen
    one.
    """
    planned, bounded, computed = Counter[Any](), Counter[Any](), Counter[Any]()
    graphs: Counter[bool] = Counter()
    made = [Counter[Plan]() for _ in BUILT]
    counted(monkeypatch, Method, "plan", planned, lambda self, problem, phase, costs: (self, problem, phase))
    counted(monkeypatch, variant_bounds, "lower_bounds", bounded, lambda plan, problem, *_: (plan, problem))
    counted(monkeypatch, variant_bounds, "work_s", computed, lambda plan, problem, cluster, ranks: (plan, problem))
    counted(monkeypatch, simulate, "build_graph", graphs, lambda *_, nearly_alike=False, **__: nearly_alike)
    for (where, name), seen in zip(BUILT, made, strict=True):
        counted(monkeypatch, where, name, seen, of_plan)
    found = choose(point(f"method={method}", "gpus=64", "seqlen=1M"))
    number = len(found.candidates or [found])
    assert set(planned.values()) == set(bounded.values()) == set(computed.values()) == {1}
    assert len(computed) <= len(bounded)
    assert len(found.plans) <= len(planned) == len(bounded) <= number * len(found.plans)
    for seen in made:
        assert set(seen.values()) == {1}
        assert len(seen) <= len(planned)
    assert graphs[True] <= len(planned) and graphs[False] <= len(found.plans), "those of the chosen variant"


def test_a_ring_that_transfers_bind_has_the_tasks_of_one_node() -> None:
    """Whichever layout: blocks that differ by a few percent change neither when a step ends nor when any rank does."""
    for layout in ("striped", "zigzag"):
        found = choose(point("method=ring", "gpus=512", "seqlen=2M", f"method.layout={layout}"))
        for run in found.runs.values():
            assert run.exact and run.graph.quotient.ranks.size == 8
            transfers = sum(isinstance(item.what, int) for item in run.graph.items)
            assert run.start_s.size <= 8 * (transfers + len(run.graph.items))


def test_ranks_that_may_fall_out_of_step_are_all_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """TokenRing sends both ways: a link has messages of two ranks. Ranks that hardly differ end later than in step,
    whether few flows of theirs begin at once or many.
    """
    monkeypatch.setattr(simulate, "MANY_TASKS", 0)
    for many in (10**9, 0):
        monkeypatch.setattr(flows, "MANY_FLOWS", many)
        request = point("method=tokenring", "method.layout=striped", "gpus=128", "seqlen=256k", "kv_heads=8")
        (choice,) = variants(request, [request.ours])
        plan, problem = choice.plans["forward"], choice.problem
        in_step = simulate.simulate(plan, problem, request.cluster, nearly_alike=True)
        assert simulate._ends_as_its_fastest(in_step, request.cluster)
        run = simulate.exactly(in_step, problem, request.cluster)
        whole = simulate.simulate(plan, problem, request.cluster, use_symmetry=False)
        assert run.makespan_s == pytest.approx(whole.makespan_s, rel=simulate.SAME_STEP)
        assert run.makespan_s > 1.01 * in_step.makespan_s and not run.by_kind


def test_ranks_that_are_too_many_stand_for_each_other_and_the_record_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    request = point("method=tokenring", "method.layout=striped", "gpus=128", "seqlen=256k", "kv_heads=8")
    assert BY_KIND not in (simulate_point(request)[0].notes or [])
    monkeypatch.setattr(graph, "MAX_TASKS", 50_000)
    record, choice = simulate_point(request)
    assert BY_KIND in (record.notes or []) and all(run.by_kind for run in choice.runs.values())


def test_links_of_a_ring_are_of_pairs_of_ranks() -> None:
    for method, of_pairs in (("ring", True), ("mesh", True), ("tokenring", False), ("ulysses", False)):
        request = point(f"method={method}", "gpus=32", "seqlen=64k")
        choice = choose(request)
        network = request.cluster.network(32)
        assert links_are_of_pairs(choice.plans["backward"], network) == of_pairs


def test_one_rank_stands_for_all_only_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking nearly alike ranks for alike is no coarser than it says, on rings that links bind and that blocks bind."""
    monkeypatch.setattr(simulate, "MANY_TASKS", 0)
    stood = 0
    for gpus, seqlen in (("32", "64k"), ("32", "256k"), ("32", "1M"), ("16", "4M")):
        choice = choose(point("method=ring", "method.layout=zigzag", f"gpus={gpus}", f"seqlen={seqlen}"))
        cluster = point("method=ring", f"gpus={gpus}").cluster
        for phase, run in choice.runs.items():
            whole = simulate.simulate(choice.plans[phase], choice.problem, cluster, use_symmetry=False)
            stood += run.graph.quotient.ranks.size < whole.graph.quotient.ranks.size
            step_s = whole.makespan_s
            assert abs(run.ended_s - whole.ended_s).max() <= simulate.SAME_STEP * step_s, (gpus, seqlen, phase)
            assert run.busy_s == pytest.approx(whole.busy_s, rel=1e-12)
            assert abs(run.exposed_s - whole.exposed_s).max() <= simulate.SAME_STEP * step_s
    assert 0 < stood < 8, "some are bound by transfers, and some by blocks"
