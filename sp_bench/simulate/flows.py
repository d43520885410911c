"""Flow-level network simulation of a task graph: when does each delay and each transfer end?

The model is fluid. A transfer is a flow: `delay_s` after its predecessors are done it joins every link of its path,
and from then on it drains at a rate which changes only when some flow joins or leaves. Rates are max-min fair: all
flows rise together, each by its weight, until a link is full or a flow meets its own cap, those flows stop there, and
the others rise on (progressive filling). A flow may load a link with more or less than its rate, as often as its path
lists it. A full-duplex cable is two links.

Within that model the answer is exact up to floating point. It stands for a real network as far as the transport
shares links evenly and reaches its share in a time that is short beside the flows: packets, queues, incast losses and
congestion-control transients do not exist here.

Rates are solved again once per instant, and only where they change. Events closer together than 1e-12 of the time since
the start count as one instant, so that rounding cannot split the simultaneous ends of a symmetric workload into
hundreds of solves. Every task still ends at its own time; only the links' rates may change late, by at most that
fraction of the time. With more than 100,000 flows, events within a billionth of the time, or of a lower bound on the
makespan, count as one; where noise makes all of them differ, within a millionth.

Both solvers run the same functions: `numba` runs the machine code that numba makes of them (machine_code.py), `python`
runs them as they are on lists. Results are bitwise equal. Importing this module does not import numba.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sp_bench.simulate import _flows_numba as kernel
from sp_bench.simulate import machine_code
from sp_bench.simulate.task_graph import Floats, TaskGraph, Timing, starts

Solver = Literal["auto", "numba", "python"]
AT_ONCE = 64
"""Flows that may be on a link at once at first: solving begins again, with memory for all of a link's flows, where
they are more."""
FEW_TASKS = 4_000
"""Up to so many tasks of all graphs of a process, plain Python beats loading the machine code."""
COUNTED_AT_ONCE = 2**20
"""Ids that are counted at once: a count takes eight bytes for each."""
SAME_INSTANT, MANY_FLOWS = 1e-12, 100_000
"""Events closer than this, relative to the time since the start, share one solve of the rates, but with many flows."""
NEARLY_AN_INSTANT, ABOUT_AN_INSTANT = 1e-9, 1e-6
"""With many flows, events closer than this do, relative to the time and to a lower bound on the makespan; the latter
where noise makes ranks differ by far more. Where they are nearly alike, a millionth would keep them in step: 256 ranks
of TokenRing ended 1.5% too early."""


class LongerError(Exception):
    """The makespan of a graph is longer than `most_s`, at which solving it ended."""

    def __init__(self, most_s: float) -> None:
        super().__init__(f"takes longer than {most_s:.4g} s")
        self.most_s = most_s


def solve(
    graph: TaskGraph,
    solver: Solver = "auto",
    *,
    least_s: float = 0.0,
    most_s: float = math.inf,
    noisy: bool = False,
) -> Timing:
    """Simulate the graph from time 0. `least_s` is a lower bound on the makespan, if the caller has one; `noisy` says
    that noise makes all delays differ.

    `auto` takes numba where it is installed and plain Python elsewhere; the results are bitwise equal. ValueError
    on an unknown solver, and on a dependency cycle, naming tasks that never started. ImportError where `numba` is asked
    for and missing. LongerError as soon as the makespan is known to be above `most_s`.
    """
    if solver not in ("auto", "numba", "python"):
        raise ValueError(f"solver is {solver!r}: must be 'auto', 'numba' or 'python'")
    compiled = solver == "numba" or (solver == "auto" and machine_code.can_be_had())
    run = partial(_run, graph, _same_instant(graph, least_s, noisy=noisy), most_s, compiled=compiled)
    solved = run(AT_ONCE) or run(graph.delay_s.size)
    assert solved, "a link has a seat for each of its flows"
    tasks, events = solved
    if events.size[0]:
        raise LongerError(most_s)
    timing = Timing(start_s=np.asarray(tasks.start_s), finish_s=np.asarray(tasks.finish_s))
    _check_complete(timing)
    return timing


def _run(
    graph: TaskGraph, same_instant: Floats, most_s: float, at_once: int, *, compiled: bool
) -> tuple[kernel.Tasks, kernel.Heaps] | None:
    """The tasks and the events that are left; None if a link has more flows than `at_once` together."""
    arguments = _kernel_arguments(graph, same_instant, most_s, at_once)
    if not compiled:
        # Indexing a list is several times faster than indexing an array, and the functions only index.
        arguments = tuple(type(fields)(*(array.tolist() for array in fields)) for fields in arguments)
    is_solved = (machine_code.run() if compiled else kernel.run)(*arguments)
    return (arguments[1], arguments[4]) if is_solved else None


def prepare() -> None:
    """Compile the solver, which takes about ten seconds once: its machine code is kept for all later processes."""
    one, none = np.ones(1), np.zeros(0, np.int32)
    graph = TaskGraph(
        delay_s=0 * one,
        flow_bytes=one,
        path_start=np.array([0, 1]),
        path_links=np.array([0]),
        path_loads=one,
        dep_start=np.array([0, 0]),
        dep_tasks=none,
        rate_cap=math.inf * one,
        weight=one,
        link_bytes_per_s=one,
    )
    solve(graph, "numba")


def sooner(graph: TaskGraph) -> Solver:
    """The solver that will have solved a graph sooner: `python` as long as this process has solved few tasks so and has
    not loaded the machine code, which takes as long as some thousand tasks in Python.
    """
    tasks, is_loaded = graph.delay_s.size, machine_code.run.cache_info().currsize > 0
    if is_loaded or _InPython.tasks + tasks > FEW_TASKS:
        return "auto"
    _InPython.tasks += tasks
    return "python"


class _InPython:
    """The state of this process."""

    tasks = 0
    """How many tasks `sooner` has had solved in plain Python."""


def _check_complete(timing: Timing) -> None:
    stuck = np.flatnonzero(np.isnan(timing.finish_s))
    if stuck.size:
        some = ", ".join(map(str, stuck[:8])) + (", ..." if stuck.size > 8 else "")
        raise ValueError(f"dependency cycle: {stuck.size} tasks never start, being on it or behind it: {some}")


def _same_instant(graph: TaskGraph, least_s: float, *, noisy: bool) -> Floats:
    """How close events that count as one instant are: relative to the time since the start, and in seconds."""
    if np.count_nonzero(graph.flow_bytes) <= MANY_FLOWS:
        return np.array([SAME_INSTANT, 0.0])
    crossing = graph.path_loads * np.repeat(graph.flow_bytes, np.diff(graph.path_start))
    busy_s = np.bincount(graph.path_links, crossing, graph.link_bytes_per_s.size) / graph.link_bytes_per_s
    instant = ABOUT_AN_INSTANT if noisy else NEARLY_AN_INSTANT
    return instant * np.array([1.0, max(least_s, float(busy_s.max(initial=0.0)))])


def _kernel_arguments(graph: TaskGraph, same_instant: Floats, most_s: float, at_once: int) -> tuple[Any, ...]:
    """The kernel's arrays, with seats for `at_once` flows on each link.

    Of ids and counts, of which there may be tens of millions, they have the smaller type.
    """
    tasks = graph.delay_s.size
    path_start, hop_task, path_links, hop_load, link_bytes_per_s = _hops(graph)
    links, hops = link_bytes_per_s.size, hop_task.size
    link_seat_start = starts(np.minimum(_counts(path_links, links), at_once))
    seats_of_all = int(link_seat_start[-1])
    # At least 1, so that every seat has another link to look at.
    width = max(int(np.diff(path_start).max(initial=0)) - 1, 1)
    constants = kernel.Graph(
        delay_s=graph.delay_s,
        flow_bytes=graph.flow_bytes if _all_ones(graph.weight) else graph.flow_bytes / graph.weight,
        path_start=path_start,
        path_links=path_links,
        hop_load=hop_load,
        hop_task=hop_task,
        dep_start=graph.dep_start,
        dep_tasks=graph.dep_tasks,
        next_start=np.zeros(tasks + 1, np.int32),
        next_tasks=np.empty(graph.dep_tasks.size, np.int32),
        link_bytes_per_s=link_bytes_per_s,
        link_seat_start=link_seat_start,
        same_instant=same_instant,
        most_s=np.array([most_s]),
        counts=np.array([tasks, links, hop_load.size], np.int64),
    )
    task_state = kernel.Tasks(
        start_s=np.full(tasks, np.nan),
        finish_s=np.full(tasks, np.nan),
        awaited=np.diff(graph.dep_start),
        holder=np.full(tasks, -1, np.int32),
        joined=np.zeros(tasks, np.int32),
    )
    caps = link_bytes_per_s[graph.link_bytes_per_s.size :]
    level = np.concatenate([np.full(links - caps.size, np.inf), caps, [np.inf]])
    clean_level = np.concatenate([level[: links - caps.size], np.zeros(caps.size + 1)])
    link_state = kernel.Links(
        taken=np.zeros(links, np.int64),
        level=level,
        clean_level=clean_level,
        before=np.zeros(links),
        turn=np.zeros(1, np.int64),
        marked=np.zeros(links, np.int64),
        settled=np.zeros(links, np.int64),
        is_changed=np.zeros(links, np.bool_),
        changed=np.zeros(links, np.int64),
        is_misheld=np.zeros(links, np.bool_),
        misheld=np.zeros(links, np.int64),
        beside=np.zeros(width * int(np.diff(link_seat_start).max(initial=0)) + 1, np.int64),
        clock_bytes=np.zeros(links),
        read_s=np.zeros(links),
        pace=level.copy(),
    )
    seats = kernel.Seats(
        hop=np.zeros(seats_of_all, np.int32),
        load=np.zeros(seats_of_all),
        others=np.zeros(seats_of_all * width, np.int32),
        is_held=np.zeros(seats_of_all),
        of_hop=np.zeros(hops, np.int32),
        width=np.array([width]),
    )
    # Of what is zero, only what is used takes memory: there are few events.
    events, dirty = (_empty_heaps(items, np.array([0, items], np.int32)) for items in (tasks + links, links))
    # No task is an event and held at once, so that it has one place, in the heap that has it.
    held = _empty_heaps(0, link_seat_start)._replace(place=events.place)
    return constants, task_state, link_state, seats, events, held, dirty


def _all_ones(values: Floats) -> bool:
    return bool(values.min(initial=1.0) == values.max(initial=1.0) == 1.0)


def _hops(graph: TaskGraph) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], Floats, Floats]:
    """The first hop of each task; (task, link, load) of each hop, by task and each link once in a path; and the rates
    of all links. Where every load is 1, there are no loads.

    A flow of weight w is one of weight 1 that has 1/w of the bytes, each of which loads links w times. A cap is a link
    that no other flow crosses.
    """
    hop_count, links = np.diff(graph.path_start), graph.link_bytes_per_s.size
    capped = np.flatnonzero((graph.flow_bytes > 0) & np.isfinite(graph.rate_cap))
    rates = np.concatenate([graph.link_bytes_per_s, (graph.rate_cap / graph.weight)[capped]])
    start, link, load = graph.path_start, graph.path_links, graph.path_loads
    if not _all_ones(graph.weight):
        load = load * np.repeat(graph.weight, hop_count)
    loads_are_ones = _all_ones(load)
    if capped.size:  # at the end of each path, where the largest number stands
        ends = graph.path_start[capped + 1]
        link = np.insert(link, ends, links + np.arange(capped.size))
        load = load if loads_are_ones else np.insert(load, ends, 1.0)
        hop_count[capped] += 1
        start = starts(hop_count)
    task = np.repeat(np.arange(hop_count.size, dtype=np.int32), hop_count)
    if np.all((link[1:] > link[:-1]) | (task[1:] != task[:-1])):
        return start, task, link, np.empty(0) if loads_are_ones else np.ascontiguousarray(load), rates
    load = np.ones(task.size) if loads_are_ones else load
    ids = task.astype(np.int64) * rates.size + link
    order = np.argsort(ids, kind="stable")  # they are almost in order
    task, link, load, ids = task[order], link[order], load[order], ids[order]
    first = np.concatenate([np.ones(min(ids.size, 1), bool), ids[1:] != ids[:-1]])
    if not first.all():
        load = np.bincount(np.cumsum(first) - 1, load).astype(np.float64)
        task, link = task[first], link[first]
    return starts(_counts(task, hop_count.size)), task, link, load, rates


def _counts(ids: NDArray[Any], count: int) -> NDArray[np.int64]:
    """How often each id below `count` is there."""
    counts = np.zeros(count, np.int64)
    for first in range(0, ids.size, COUNTED_AT_ONCE):
        counts += np.bincount(ids[first : first + COUNTED_AT_ONCE], minlength=count)
    return counts


def _empty_heaps(items: int, starts: NDArray[np.int32]) -> kernel.Heaps:
    """Heaps that have items between two starts each."""
    count, room = starts.size - 1, int(starts[-1])
    place = np.full(items, -1, np.int32)
    return kernel.Heaps(np.zeros(room), np.zeros(room, np.int32), place, starts, np.zeros(count, np.int64))
