"""Rows of tasks worked out without events, against the solver that has them, and how many are left to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_bench import simulate
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.simulate import flows
from sp_bench.simulate.graph import build_graph
from sp_bench.simulate.task_graph import TaskGraph, Timing
from sp_bench.simulate.uncontended import solve_rows
from tests.support.clusters import on_network, split_problem
from tests.support.flow_graphs import RELATIVE, Task, graph_of

LINKS = 4
durations = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(1e-3, 3.0))
sizes = st.one_of(st.just(0.0), st.sampled_from([1.0, 2.0, 6.0]), st.floats(1e-3, 10.0))
speeds = st.one_of(st.sampled_from([1.0, 2.0, 4.0]), st.floats(0.1, 5.0))


@st.composite
def random_rows(draw: st.DrawFn) -> tuple[TaskGraph, int]:
    """Rows of tasks on few links, which flows share more often than not."""
    width, tasks = draw(st.integers(1, 4)), list[Task]()
    for _ in range(draw(st.integers(1, 8))):
        before = len(tasks)
        waits = draw(st.integers(0, 2)) if before else 0
        for _ in range(width):
            after = tuple(draw(st.integers(0, before - 1)) for _ in range(waits))
            size, delay_s = draw(sizes), draw(durations)
            path = tuple(draw(st.lists(st.integers(0, LINKS - 1), max_size=2))) if size else ()
            cap = draw(speeds) if size and (not path or draw(st.booleans())) else float("inf")
            loads = tuple(draw(speeds) for _ in path) if draw(st.booleans()) else ()
            tasks.append(Task(delay_s, size, path, after, cap, loads, draw(speeds) if size else 1.0))
    return graph_of(tasks, [draw(speeds) for _ in range(LINKS)]), width


def by_events(graph: TaskGraph) -> Timing:
    return flows.solve(graph, "python")


@settings(max_examples=150)
@given(random_rows())
def test_any_rows(drawn: tuple[TaskGraph, int]) -> None:
    graph, width = drawn
    found, wanted = solve_rows(graph, width, by_events), by_events(graph)
    assert found.start_s == pytest.approx(wanted.start_s, rel=RELATIVE)
    assert found.finish_s == pytest.approx(wanted.finish_s, rel=RELATIVE)


def test_a_flow_meets_one_that_began_long_before_others_on_its_link() -> None:
    """The last one to leave the link isn't the first that it meets: three rows are solved together."""
    solved = list[int]()

    def noted(graph: TaskGraph) -> Timing:
        solved.append(graph.delay_s.size)
        return by_events(graph)

    two = [Task(5.0, 10.0, (0,)), Task(15.0, 10.0, (0,)), Task(14.0, 10.0, (0,))]
    graph = graph_of([*two, *(Task(100.0) for _ in range(7))], [1.0])
    assert solve_rows(graph, 1, noted).finish_s.tolist() == by_events(graph).finish_s.tolist()
    assert solved == [3]


@pytest.mark.parametrize("network", ["one node", "shared NICs", "nodes"])
def test_plans_are_worked_out_as_by_events(network: str) -> None:
    """Methods whose flows meet never, in their collectives alone, and all the time."""
    p = split_problem(8, "zigzag", causal=True)
    for name, options in (("mesh", {"tile": (2, 4)}), ("startrail", {"team": 2}), ("usp", {}), ("ring", {})):
        method = build(name, options).candidates(p)[0]
        for phase in PHASES:
            assigned = method.assigned(p)
            graph = build_graph(method.plan(p, phase, COMPUTE_BOUND), assigned, on_network(network))
            tasks, width = graph.tasks, graph.quotient.ranks.size
            found, wanted = solve_rows(tasks, width, by_events), by_events(tasks)
            np.testing.assert_allclose(found.finish_s, wanted.finish_s, rtol=1e-12)
            np.testing.assert_allclose(found.start_s, wanted.start_s, rtol=1e-12)


def events_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all graphs that will be solved by events, those of few ranks only where their flows meet."""
    sizes, solve = list[int](), simulate.solve
    monkeypatch.setattr(simulate, "NARROW", 0)

    def noted(graph: TaskGraph, *args: Any, **kwargs: Any) -> Timing:
        sizes.append(graph.delay_s.size)
        return solve(graph, *args, **kwargs)

    monkeypatch.setattr(simulate, "solve", noted)
    return sizes


def simulated(name: str, phase: str, **options: Any) -> simulate.Run:
    """A method on 64 ranks that are all unlike, by their blocks."""
    p = split_problem(64, "zigzag", causal=True)
    method = build(name, options).candidates(p)[0]
    plan = method.plan(p, phase, COMPUTE_BOUND)
    return simulate.simulate(plan, method.assigned(p), on_network("nodes"), use_symmetry=False)


def test_a_tile_has_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of(monkeypatch)
    for phase in PHASES:
        assert simulated("mesh", phase, tile=(8, 8)).graph.quotient.ranks.size == 64
    assert not events


def test_of_startrail_only_its_collectives_have_events(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of(monkeypatch)
    run = simulated("startrail", "forward", team=4)
    assert 0 < sum(events) < run.start_s.size / 2


def test_few_ranks_are_solved_by_events_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result as row by row, as they are solved where no machine code can be had."""
    at_once = list[TaskGraph]()

    def noted(graph: TaskGraph, *args: Any, **keys: Any) -> Timing:
        at_once.append(graph)
        return flows.solve(graph, *args, **keys)

    monkeypatch.setattr(simulate, "solve", noted)
    run = simulated("mesh", "backward", tile=(8, 8))
    assert [graph.delay_s.size for graph in at_once] == [run.start_s.size]
    monkeypatch.setattr(simulate.machine_code, "can_be_had", lambda: False)
    del at_once[:]
    by_rows = simulated("mesh", "backward", tile=(8, 8))
    assert not at_once
    np.testing.assert_allclose(run.finish_s, by_rows.finish_s, rtol=1e-12)
