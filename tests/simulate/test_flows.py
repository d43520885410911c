"""The flow simulator against an exact reference of another structure, closed forms and conservation laws."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sp_bench.simulate import _flows_numba as kernel
from sp_bench.simulate import flows, machine_code
from sp_bench.simulate.flows import LongerError, Solver, solve, sooner
from sp_bench.simulate.task_graph import TaskGraph
from tests.support.flow_graphs import RELATIVE, SOLVERS, Task, assert_within_capacity, exact_finish_s, graph_of
from tests.support.marks import exhaustive

# Coarse values make ties, fine ones make irregular times: both have to come up.
durations = st.one_of(st.sampled_from([0.0, 0.0, 1.0, 2.0]), st.floats(1e-6, 3.0))
sizes = st.one_of(st.sampled_from([1.0, 2.0, 6.0]), st.floats(1e-3, 10.0))
speeds = st.one_of(st.sampled_from([1.0, 2.0, 4.0]), st.floats(0.1, 5.0))


@st.composite
def random_dags(draw: st.DrawFn) -> tuple[list[Task], list[float]]:
    link_rates = draw(st.lists(speeds, min_size=1, max_size=5))
    links = st.integers(0, len(link_rates) - 1)
    tasks: list[Task] = []
    for task in range(draw(st.integers(1, 14))):
        after = tuple(draw(st.lists(st.integers(0, task - 1), max_size=3))) if task else ()
        if draw(st.integers(0, 3)) == 0:
            tasks.append(Task(draw(durations), after=after))
            continue
        path = tuple(draw(st.lists(links, max_size=3)))
        cap = draw(speeds) if not path or draw(st.booleans()) else float("inf")
        loads = tuple(draw(speeds) for _ in path) if draw(st.booleans()) else ()
        weight = draw(speeds) if draw(st.booleans()) else 1.0
        tasks.append(Task(draw(durations), draw(sizes), path, after, cap, loads, weight))
    # Ids in dependency order would hide a solver that relies on it.
    order = draw(st.permutations(range(len(tasks))))
    place = {old: new for new, old in enumerate(order)}
    shuffled = [tasks[old] for old in order]
    return [replace(t, after=tuple(place[o] for o in t.after)) for t in shuffled], link_rates


def permutation_rounds(seed: int, ranks: int, rounds: int, ranks_per_link: int) -> tuple[list[Task], list[float]]:
    """Irregular sends along random permutations, each after its rank's send and receive of the round before."""
    rng = np.random.default_rng(seed)
    nodes = ranks // ranks_per_link
    tasks: list[Task] = []
    before: list[tuple[int, ...]] = [() for _ in range(ranks)]
    for _ in range(rounds):
        targets = rng.permutation(ranks)
        sent = list(range(len(tasks), len(tasks) + ranks))
        for rank, target in enumerate(targets):
            path = (rank // ranks_per_link, nodes + int(target) // ranks_per_link)
            cap = float(rng.choice([0.7, np.inf]))
            tasks.append(Task(float(rng.uniform(0, 0.1)), float(rng.uniform(0.1, 2)), path, before[rank], cap))
        before = [(sent[rank], sent[int(np.argwhere(targets == rank)[0, 0])]) for rank in range(ranks)]
    return tasks, [float(rate) for rate in rng.uniform(0.5, 2, 2 * nodes)]


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=60)
@given(case=random_dags())
def test_random_graphs_agree_with_the_exact_reference(solver: Solver, case: tuple[list[Task], list[float]]) -> None:
    timing = solve(graph_of(*case), solver)
    exact = exact_finish_s(*case)
    np.testing.assert_allclose(timing.finish_s, exact, rtol=RELATIVE, atol=0)
    starts = [max((exact[other] for other in task.after), default=0.0) for task in case[0]]
    np.testing.assert_allclose(timing.start_s, starts, rtol=RELATIVE, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("ranks_per_link", [1, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_irregular_permutations_agree_with_the_exact_reference(solver: Solver, ranks_per_link: int, seed: int) -> None:
    case = permutation_rounds(seed, ranks=8, rounds=4, ranks_per_link=ranks_per_link)
    exact = exact_finish_s(*case)
    timing = solve(graph_of(*case), solver)
    np.testing.assert_allclose(timing.finish_s, exact, rtol=RELATIVE, atol=0)
    assert timing.makespan_s == pytest.approx(max(exact), rel=RELATIVE)


def all_to_all(seed: int, ranks: int) -> tuple[list[Task], list[float]]:
    """Every rank sends to every other one over its link out and the target's link in; some flows also load the last."""
    rng = np.random.default_rng(seed)
    tasks = []
    for source in range(ranks):
        for target in range(ranks):
            if source == target:
                continue
            path, loads = (source, ranks + target), (1.0, 1.0)
            if rng.random() < 0.3:
                path, loads = (*path, 2 * ranks), (*loads, float(rng.choice([1e-2, 1e3])))
            tasks.append(Task(float(rng.uniform(0, 0.2)), float(rng.uniform(0.5, 2)), path, loads=loads))
    return tasks, [float(rate) for rate in rng.uniform(0.5, 2, 2 * ranks)] + [300.0]


def between_nodes(ranks: int) -> list[Task]:
    """A byte from each rank to all on other nodes of four, one pair after the other."""
    pairs = [(source, target) for source in range(ranks) for target in range(ranks) if target // 4 != source // 4]
    return [Task(1e-3 * max(source, target), 1.0, (source, ranks + target)) for source, target in pairs]


def test_a_level_settles_about_once_in_an_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event of an all-to-all changes nearly every rate, which takes no search from one wrong level to the next."""
    settle, levels, links_settled = kernel._settle, 0, 0

    def counted(graph: Any, links: Any, *others: Any) -> tuple[int, int]:
        nonlocal levels, links_settled
        before = links.turn[0]
        result = settle(graph, links, *others)
        levels += links.turn[0] - before
        links_settled += sum(turn > before for turn in links.settled)
        return result

    monkeypatch.setattr(kernel, "_settle", counted)
    ranks = 24
    solve(graph_of(between_nodes(ranks), [1.0] * 2 * ranks), "python")
    assert links_settled > 10 * ranks
    assert levels <= 1.5 * links_settled


def test_a_flow_whose_links_tie_stays_where_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both links of most flows of an all-to-all have one level, whenever that changes."""
    hold, calls, moves = kernel._hold, 0, 0

    def counted(graph: Any, tasks: Any, links: Any, seats: Any, events: Any, held: Any, flow: int, now: float) -> None:
        nonlocal calls, moves
        before = tasks.holder[flow]
        hold(graph, tasks, links, seats, events, held, flow, now)
        calls, moves = calls + 1, moves + (tasks.holder[flow] != before)

    monkeypatch.setattr(kernel, "_hold", counted)
    solve(graph_of(between_nodes(24), [1.0] * 48), "python")
    assert 0 < calls <= 1.1 * moves


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(3))
def test_all_to_alls_agree_with_the_exact_reference(solver: Solver, seed: int) -> None:
    """Each event changes nearly every rate; errors don't add up, on a link with loads unlike each other either."""
    case = all_to_all(seed, ranks=6)
    np.testing.assert_allclose(solve(graph_of(*case), solver).finish_s, exact_finish_s(*case), rtol=1e-13, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_many_flows_are_as_exact_as_the_instants_that_they_share(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of more than MANY_FLOWS share the rates of events within a billionth of the whole time, and noisy ones
    within a millionth.
    """
    case = all_to_all(seed, ranks=6)
    monkeypatch.setattr(flows, "MANY_FLOWS", 0)
    exact_s = exact_finish_s(*case)
    for noisy, instant in ((False, "NEARLY_AN_INSTANT"), (True, "ABOUT_AN_INSTANT")):
        found = solve(graph_of(*case), "python", noisy=noisy).finish_s
        np.testing.assert_allclose(found, exact_s, rtol=0, atol=30 * getattr(flows, instant) * max(exact_s))
        monkeypatch.setattr(flows, instant, 1e-2)
        assert not np.allclose(solve(graph_of(*case), "python", noisy=noisy).finish_s, exact_s, rtol=1e-9, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_capped_flow_slows_down_where_two_links_of_its_path_fill_at_one_rate(solver: Solver) -> None:
    # The first flow crosses both links, and each of them gets a third flow at 1 s: all then run at 1 B/s instead of
    # their caps of 1.5 B/s. The late flows end at 2 s, when the others have 3.5 bytes left.
    capped = [Task(bytes=6.0, path=path, cap=1.5) for path in ((0, 1), (0,), (1,))]
    late = [Task(1.0, 1.0, (link,)) for link in (0, 1)]
    ends = [2.0 + 3.5 / 1.5] * 3 + [2.0] * 2
    np.testing.assert_allclose(solve(graph_of(capped + late, [3.0, 3.0]), solver).finish_s, ends, rtol=1e-15)


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_both_engines_give_the_same_bits() -> None:
    for seed in range(3):
        graph = graph_of(*permutation_rounds(seed, ranks=32, rounds=12, ranks_per_link=4))
        python, numba = solve(graph, "python"), solve(graph, "numba")
        np.testing.assert_array_equal(python.finish_s, numba.finish_s)
        np.testing.assert_array_equal(python.start_s, numba.start_s)


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_a_process_loads_the_machine_code_that_an_earlier_one_has_kept_and_no_numba() -> None:
    flows.prepare()
    script = "import sys; from sp_bench.simulate.flows import prepare; prepare(); print('numba' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.stderr) == ("False", "")


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_the_compiled_solver_counts_no_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each count is an atomic instruction, and together they would take longer than all that is solved."""
    flows.prepare()
    loaded, kept = list[bytes | None](), machine_code.kept
    monkeypatch.setattr(machine_code, "kept", lambda key: (loaded.append(kept(key)), loaded[-1])[1])
    machine_code.run.__wrapped__()
    (compiled,) = loaded
    assert compiled
    assert b"_flows_numba3run" in compiled
    assert b"NRT_incref" not in compiled


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_what_is_compiled_once_serves_every_graph() -> None:
    flows.prepare()
    only = machine_code.run()
    tasks = [Task(0.5, 1.0, (0, 1), loads=(0.5, 2.0), cap=0.75, weight=2.0), Task(0.0, 1.0, (1,), after=(0,))]
    solve(graph_of(tasks, [1.0, 3.0]), "numba")
    solve(TaskGraph(**VALID), "numba")
    assert machine_code.run() is only


@pytest.mark.parametrize("array", [np.ndarray[Any, np.dtype[np.int32]], list[np.int32]], ids=["2.4", "2.5"])
def test_types_of_arrays_are_found_whatever_numpy_takes_its_annotation_for(array: Any) -> None:
    """Up to 2.4 NDArray[x] is an ndarray of a dtype of x; from 2.5 on an alias with the argument x, as list is here."""
    assert list(machine_code._scalars(array | list[int])) == [np.int32]


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_machine_code_is_given_arrays_of_its_types_alone() -> None:
    """It reads them as pointers: those of another type would be read as what they are not."""
    arguments = flows._kernel_arguments(TaskGraph(**VALID), np.zeros(2), np.inf, flows.AT_ONCE)
    graph, *others = arguments
    for wrong in (graph.delay_s.astype(np.float32), np.repeat(graph.delay_s, 2)[::2]):
        with pytest.raises(TypeError, match="must be float64 in one piece"):
            machine_code.run()(graph._replace(delay_s=wrong), *others)
    assert machine_code.run()(*arguments)


def test_machine_code_is_kept_where_it_can_be_and_what_is_not_whole_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    files = [tmp_path / "file" / "a.o", tmp_path / "users" / "a.o"]
    monkeypatch.setattr(machine_code, "files", lambda key: files)
    assert machine_code.kept("key") is None
    machine_code.keep("key", b"machine code")
    assert machine_code.kept("key") == b"machine code"
    files[1].write_bytes(files[1].read_bytes()[:-1])
    assert machine_code.kept("key") is None
    del files[1]
    with pytest.warns(UserWarning, match="file can't be written, .* a writable XDG_CACHE_HOME would work"):
        machine_code.keep("key", b"machine code")


def test_a_process_solves_few_tasks_in_python_before_it_loads_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "run", cache(lambda: None))
    monkeypatch.setattr(flows._InPython, "tasks", 0)
    few, many = (graph_of([Task(1.0, 0.0, ())] * tasks, [1.0]) for tasks in (flows.FEW_TASKS // 4, flows.FEW_TASKS + 1))
    assert sooner(many) == "auto"
    assert [sooner(few) for _ in range(6)] == 4 * ["python"] + 2 * ["auto"]
    monkeypatch.setattr(flows._InPython, "tasks", 0)
    machine_code.run()
    assert sooner(few) == "auto"


@pytest.mark.parametrize("solver", SOLVERS)
def test_more_flows_at_once_than_are_expected_have_seats_too(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    flows_on_two_links = [Task(0.01 * i, 1.0 + i % 7, (i % 2, 2)) for i in range(2 * flows.AT_ONCE)]
    graph = graph_of(flows_on_two_links, [1.0, 2.0, 3.0])
    at_once, arguments = list[int](), flows._kernel_arguments

    def counted(graph: TaskGraph, same_instant: NDArray[Any], most_s: float, seats: int) -> tuple[Any, ...]:
        at_once.append(seats)
        return arguments(graph, same_instant, most_s, seats)

    monkeypatch.setattr(flows, "_kernel_arguments", counted)
    again = solve(graph, solver)
    monkeypatch.setattr(flows, "AT_ONCE", len(flows_on_two_links))
    at_first = solve(graph, solver)
    assert at_once == [64, len(flows_on_two_links), len(flows_on_two_links)]
    np.testing.assert_array_equal(again.finish_s, at_first.finish_s)


def test_memory_is_for_the_flows_that_are_on_a_link_at_once() -> None:
    """Rings of thousands of steps cross a link as often, and once at a time."""
    one_by_one = [Task(0.0, 1.0, (0, 1), (i - 1,) if i else ()) for i in range(1000)]
    graph = graph_of(one_by_one, [1.0, 2.0])
    seats, held = flows._kernel_arguments(graph, np.zeros(2), np.inf, flows.AT_ONCE)[3::2]
    assert seats.hop.size == held.key.size == 2 * flows.AT_ONCE
    assert solve(graph, "python").makespan_s == pytest.approx(1000.0)


@settings(max_examples=60)
@given(case=st.one_of(random_dags(), st.builds(permutation_rounds, st.integers(0, 99), *map(st.just, (8, 6, 2)))))
def test_nothing_is_faster_than_its_links_allow(case: tuple[list[Task], list[float]]) -> None:
    tasks, link_rates = case
    timing = solve(graph_of(*case), "python")
    for task, start, finish in zip(tasks, timing.start_s, timing.finish_s, strict=True):
        narrowest = min([task.cap, *(link_rates[link] / float(task.load(link)) for link in task.path)])
        assert finish >= (start + task.delay_s + task.bytes / narrowest) * (1 - RELATIVE)
    assert_within_capacity(tasks, link_rates, timing)


@pytest.mark.parametrize("solver", SOLVERS)
def test_flows_of_unlike_latency_share_fairly(solver: Solver) -> None:
    # Alone for 1..4 s, the first moves 6 of its 10 bytes at 2 B/s; then both run at 1 B/s until it ends at 8 s, when
    # the second has 6 of its 10 bytes left for 2 B/s.
    graph = graph_of([Task(1.0, 10.0, (0,)), Task(4.0, 10.0, (0,))], [2.0])
    np.testing.assert_allclose(solve(graph, solver).finish_s, [8.0, 11.0], rtol=1e-15)


@pytest.mark.parametrize("solver", SOLVERS)
def test_bandwidth_a_flow_cannot_use_goes_to_the_others(solver: Solver) -> None:
    # Link 0 has 9 B/s for a capped flow (1), a flow held to 2 by link 1, and one which takes the other 6.
    tasks = [Task(bytes=10.0, path=(0,), cap=1.0), Task(bytes=20.0, path=(0, 1)), Task(bytes=60.0, path=(0,))]
    np.testing.assert_allclose(solve(graph_of(tasks, [9.0, 2.0]), solver).finish_s, 10.0, rtol=1e-15)


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_loads_a_link_less_leaves_more_to_others(solver: Solver) -> None:
    # Both rise to 3 B/s, where link 0 is full: a byte of the first takes half as much of it as one of the second.
    tasks = [Task(bytes=6.0, path=(0,), loads=(0.5,)), Task(bytes=12.0, path=(0,))]
    np.testing.assert_allclose(solve(graph_of(tasks, [4.5]), solver).finish_s, [2.0, 2.0 + 6.0 / 4.5], rtol=1e-15)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_flow_without_links_runs_at_its_cap(solver: Solver) -> None:
    timing = solve(graph_of([Task(1.0, 6.0, cap=2.0), Task(0.5, after=(0, 0))], []), solver)
    assert timing.start_s.tolist() == [0.0, 4.0]
    assert timing.finish_s.tolist() == [4.0, 4.5]


@pytest.mark.parametrize("solver", SOLVERS)
def test_close_but_distinct_instants_stay_distinct(solver: Solver) -> None:
    # The first flow has the link to itself for 1e-8 s, and both then share it to the end.
    late = 1.0 + 1e-8
    timing = solve(graph_of([Task(1.0, 1.0, (0,)), Task(late, 1.0, (0,))], [1.0]), solver)
    np.testing.assert_allclose(timing.finish_s, [late + 2 * (1.0 - 1e-8), 3.0], rtol=1e-15)


def test_ends_that_differ_by_rounding_share_one_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [float(rate) for rate in np.random.default_rng(0).uniform(1.0, 2.0, 64)]
    graph = graph_of([Task(0.1, 0.3 * rate, (link,)) for link, rate in enumerate(rates)], rates)
    solves = []
    fill = kernel._fill
    monkeypatch.setattr(kernel, "_fill", lambda *arguments: solves.append(fill(*arguments)))
    timing = solve(graph, "python")
    assert len(set(timing.finish_s)) > 1
    assert len(solves) == 2  # one as they join, one as they leave


@pytest.mark.parametrize(("size", "least_s", "one_solve"), [(1.0, 0.0, True), (1e-2, 0.0, False), (1e-2, 1.0, True)])
def test_many_flows_that_begin_almost_at_once_share_one_solve(
    size: float, least_s: float, one_solve: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However early that is: it is the whole time that counts, from the busiest link or from the caller."""
    starts = np.random.default_rng(0).uniform(1e-7, 2e-7, 64).tolist()
    solves, fill = [], kernel._fill
    monkeypatch.setattr(kernel, "_fill", lambda *arguments: solves.append(fill(*arguments)))
    monkeypatch.setattr(flows, "MANY_FLOWS", 0)
    graph = graph_of([Task(start, size, (0,)) for start in starts], [64.0])
    found_s = solve(graph, "python", least_s=least_s, noisy=True).finish_s
    np.testing.assert_allclose(found_s, size, rtol=0, atol=1e-6)
    assert (len(solves) == 2) == one_solve  # one as they join, one as they leave


def ring_tasks(ranks: int, steps: int, block_bytes: float, latency_s: float, compute_s: float) -> list[Task]:
    """Task 2 * (step * ranks + rank) is a rank's send to its right neighbour in a step, the next one its computation.

    A send waits for the rank's send and receive of the step before; the computation runs beside it, on the block that
    the rank then holds, after the computation before. The block received last is not computed on.
    """
    tasks = []
    for step in range(steps):
        for rank in range(ranks):
            right, left = (rank + 1) % ranks, (rank - 1) % ranks
            own, received = 2 * ((step - 1) * ranks + rank), 2 * ((step - 1) * ranks + left)
            path = (rank, ranks + right)
            tasks.append(Task(latency_s, block_bytes, path, (own, received) if step else ()))
            tasks.append(Task(compute_s, after=(own + 1, received) if step else ()))
    return tasks


@pytest.mark.parametrize("solver", [exhaustive(solver) if solver == "python" else solver for solver in SOLVERS])
@pytest.mark.parametrize(("compute_s", "makespan_s"), [(100e-6, 43.8019008e-3), (300e-6, 76.5e-3)])
def test_a_ring_of_256_takes_the_longer_of_transfer_and_compute(
    solver: Solver, compute_s: float, makespan_s: float
) -> None:
    # 255 x (4 us + 8 MiB / 50 GB/s = 171.77216 us) = 43.8019008 ms hides 100 us of computation, and 300 us hide it.
    graph = graph_of(ring_tasks(256, 255, 8 * 2.0**20, 4e-6, compute_s), [50e9] * 512)
    timing = solve(graph, solver)
    assert timing.makespan_s == pytest.approx(makespan_s, rel=1e-12)
    sends = timing.finish_s[::2].reshape(255, 256)
    np.testing.assert_allclose(sends, np.arange(1, 256)[:, None] * np.full(256, 171.77216e-6), rtol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
@given(random_dags(), st.floats(0.0, 1.5))
def test_a_limit_ends_only_what_takes_longer(
    solver: Solver, case: tuple[list[Task], list[float]], share: float
) -> None:
    whole = solve(graph_of(*case), solver)
    limit_s = share * whole.makespan_s
    if limit_s >= whole.makespan_s:
        assert np.array_equal(solve(graph_of(*case), solver, most_s=limit_s).finish_s, whole.finish_s)
    else:
        with pytest.raises(LongerError):
            solve(graph_of(*case), solver, most_s=limit_s)


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_empty_graph_takes_no_time(solver: Solver) -> None:
    assert solve(graph_of([], []), solver).makespan_s == 0.0


def test_the_callers_arrays_stay_as_they_were() -> None:
    graph = graph_of(*permutation_rounds(0, ranks=8, rounds=2, ranks_per_link=2))
    before = {name: value.copy() for name, value in vars(graph).items()}
    first, second = solve(graph, "python"), solve(graph, "python")
    np.testing.assert_array_equal(first.finish_s, second.finish_s)
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(graph, name), value)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_cycle_is_named(solver: Solver) -> None:
    tasks = [Task(1.0), Task(1.0, after=(0, 2)), Task(1.0, after=(1,)), Task(1.0, after=(2,))]
    with pytest.raises(ValueError, match=r"dependency cycle: 3 tasks never start.*: 1, 2, 3$"):
        solve(graph_of(tasks, []), solver)


VALID: dict[str, Any] = dict(
    delay_s=[1.0, 0.5],
    flow_bytes=[0.0, 8.0],
    path_start=[0, 0, 1],
    path_links=[0],
    path_loads=[1.0],
    dep_start=[0, 0, 1],
    dep_tasks=[0],
    rate_cap=[np.inf, np.inf],
    weight=[1.0, 1.0],
    link_bytes_per_s=[4.0],
)


def test_lists_are_taken_as_arrays() -> None:
    assert solve(TaskGraph(**VALID), "python").finish_s.tolist() == [1.0, 3.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(delay_s=[1.0, -2.5]), r"delay_s\[1\] is -2.5: must be finite and not negative"),
        (dict(delay_s=[np.nan, 0.5]), r"delay_s\[0\] is nan"),
        (dict(delay_s=[[1.0, 0.5]]), r"delay_s has shape \(1, 2\)"),
        (dict(delay_s=["1", "2"]), r"delay_s has type <U1"),
        (dict(flow_bytes=[0.0, -8.0]), r"flow_bytes\[1\] is -8.0"),
        (dict(flow_bytes=[0.0, np.inf]), r"flow_bytes\[1\] is inf"),
        (dict(flow_bytes=[0.0]), "flow_bytes has 1 entries: must have 2"),
        (dict(flow_bytes=[0.0, 0.0]), r"flow_bytes\[1\] is 0.0: a task without bytes must have no path"),
        (dict(rate_cap=[np.inf, 0.0]), r"rate_cap\[1\] is 0.0: must be positive"),
        (dict(rate_cap=[np.inf, np.nan]), r"rate_cap\[1\] is nan"),
        (dict(weight=[1.0, 0.0]), r"weight\[1\] is 0.0: must be finite and positive"),
        (dict(weight=[1.0, np.inf]), r"weight\[1\] is inf: must be finite and positive"),
        (dict(weight=[1.0]), "weight has 1 entries: must have 2"),
        (dict(path_start=[0, 0, 0], path_links=[], path_loads=[]), r"rate_cap\[1\] is inf: .* path needs a finite cap"),
        (dict(link_bytes_per_s=[-4.0]), r"link_bytes_per_s\[0\] is -4.0: must be finite and positive"),
        (dict(link_bytes_per_s=[0.0]), r"link_bytes_per_s\[0\] is 0.0"),
        (dict(link_bytes_per_s=[np.inf]), r"link_bytes_per_s\[0\] is inf"),
        (dict(path_links=[1]), r"path_links\[0\] is 1: must be an id from 0 to 0"),
        (dict(path_links=[2**32]), r"path_links\[0\] is 4294967296"),
        (dict(path_links=[0.5]), "path_links has type float64"),
        (dict(path_loads=[]), "path_loads has 0 entries: must have 1"),
        (dict(path_loads=[0.0]), r"path_loads\[0\] is 0.0: must be finite and positive"),
        (dict(path_loads=[np.inf]), r"path_loads\[0\] is inf: must be finite and positive"),
        (dict(path_start=[0, 1]), "path_start has 2 entries: must have 3"),
        (dict(path_start=[0, 0, 2]), "path_start runs from 0 to 2: must be 0 to 1"),
        (dict(path_start=[0, 2, 1]), r"path_start\[2\] is 1: must not decrease"),
        (dict(dep_tasks=[-1]), r"dep_tasks\[0\] is -1: must be an id from 0 to 1"),
        (dict(dep_start=[1, 1, 1]), "dep_start runs from 1 to 1: must be 0 to 1"),
    ],
)
def test_invalid_graphs_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskGraph(**{**VALID, **changes})


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="solver is 'fast'"):
        solve(graph_of([], []), "fast")  # type: ignore[arg-type]


def test_the_python_engine_never_imports_numba() -> None:
    script = """
import sys
from sp_bench.simulate.flows import solve
from sp_bench.simulate.task_graph import TaskGraph
names = "delay_s", "flow_bytes", "path_links", "path_loads", "dep_tasks", "rate_cap", "weight", "link_bytes_per_s"
empty = dict.fromkeys(names, [])
solve(TaskGraph(**empty, path_start=[0], dep_start=[0]), "python")
print("numba" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout.strip() == "False", ran.stderr


def test_auto_does_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(machine_code, "run", None)
    assert solve(TaskGraph(**VALID), "auto").finish_s.tolist() == [1.0, 3.5]
