"""When the tasks of a plan run, where few of its flows share links.

Most plans send one tensor at a time, so that no link carries two flows at once. A task then ends when it must: after
its predecessors, its delay, and its bytes at the rate of its slowest link. All ranks of a row of tasks are worked out
at once, row after row, without events. Rows whose flows meet on a link, such as those of an all-to-all, are solved
together by events (flows.solve), with the ends of all earlier rows given. Max-min fair rates are unique: what ends
when follows from the flows that a flow meets, and is the same as if all rows were solved together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sp_bench.simulate.task_graph import TaskGraph, Timing

SAME_INSTANT = 1e-12
"""A flow may join so much, relative to the time, before another leaves: that is rounding."""
MOST_TOGETHER, MOST_SOLVED = 0.5, 50
"""If more of all rows, or rows more often, had to be solved together, all are solved at once."""

Solve = Callable[[TaskGraph], Timing]


class _Together(NamedTuple):
    """Rows whose flows meet, from the first to the last."""

    first: int
    last: int

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.last + 1 - self.first


def solve_rows(graph: TaskGraph, width: int, solve: Solve) -> Timing:
    """The times of a graph's tasks, in rows of `width`, as `solve` finds them for all.

    The tasks of a row have as many predecessors each, all in earlier rows.
    """
    alone = _Rows(graph, width)
    meeting = alone.meeting()
    if meeting == []:
        return alone.timing
    del alone  # it takes as much memory as a part of the graph
    return (_Rows(graph, width).solved(meeting, solve) if meeting else None) or solve(graph)


class _Rows:
    """Rows as they are worked out, and when the last flow of those so far leaves each link."""

    def __init__(self, graph: TaskGraph, width: int) -> None:
        self._graph, self._width, tasks = graph, width, graph.delay_s.size
        self.rows = tasks // width
        self.timing = Timing(start_s=np.empty(tasks), finish_s=np.empty(tasks))
        self._deps = graph.dep_start[::width].tolist()
        links = graph.link_bytes_per_s.size
        self._left_s, self._before = np.zeros(links), list[tuple[np.ndarray | slice, np.ndarray] | None]()
        """When they leave, and of each row, which links its flows cross and when others had left these before it. The
        first of rows that meet has it for all of them."""
        self._first_of = dict[int, int]()
        """By the last of rows that meet, the first of them."""
        self._crossing = _Crossing.of(graph, width, 0)

    def meeting(self) -> list[_Together] | None:
        """Work out all rows as if no flow slowed another down. Returns the rows whose flows meet then, in order; None
        as soon as they are too many to be solved apart from the others.
        """
        runs, together = list[_Together](), 0
        for row in range(self.rows):
            first = self._work_out(row)
            if first is None:
                continue
            while runs and runs[-1].last >= first:
                last_run = runs.pop()
                first, together = min(first, last_run.first), together - last_run.rows
            runs.append(_Together(first, row))
            together += runs[-1].rows
            if together > MOST_TOGETHER * self.rows:
                return None
        return runs if len(runs) <= MOST_SOLVED else None

    def solved(self, expected: list[_Together], solve: Solve) -> Timing | None:
        """Work out all rows, and solve those together whose flows meet: the `expected` ones, and others that come out.

        None if that would be too often.
        """
        until = {row: each.last for each in expected for row in range(each.first, each.last + 1)}
        first, last, times = self.rows, -1, 0  # of the rows to be solved together next
        for row in range(self.rows):
            meets = self._work_out(row)
            if meets is not None:
                # Of rows that met only as contention delayed them, as many again: rows behind them may, too.
                more = until.get(row, row if first <= row else row + (row - meets))
                first, last = min(first, meets), max(last, more)
            if first <= row and row >= min(last, self.rows - 1):
                times += 1
                if times > MOST_SOLVED:
                    return None
                self._solve(_Together(first, row), solve)
                first, last = self.rows, -1
        return self.timing

    def _work_out(self, row: int) -> int | None:
        """Work out a row's times if no flow slows another down. Returns the first row with flows that its own meet on a
        link; None if they meet none.
        """
        graph, n, tasks = self._graph, self._width, self._tasks(row, row)
        if not self._crossing.first <= row < self._crossing.after:
            self._crossing = _Crossing.of(graph, n, row)
        crossing, here = self._crossing, row - self._crossing.first
        self._before.append(None)
        start_s, (first, last) = self.timing.start_s[tasks], self._deps[row : row + 2]
        start_s[:] = 0.0
        if last > first:
            for each in graph.dep_tasks[first:last].reshape(n, -1).T:
                np.maximum(start_s, self.timing.finish_s[each], out=start_s)
        finish_s = self.timing.finish_s[tasks]
        np.add(start_s, graph.delay_s[tasks], out=finish_s)
        if not crossing.has_flows[here]:
            return None
        hops = slice(*crossing.hops[here : here + 2])
        links, task = crossing.links[hops], crossing.task[hops]
        joined_s = finish_s[task]
        finish_s += crossing.sending_s[here]
        return self._meets(row, links, joined_s, finish_s[task], alone=crossing.alone[here])

    def _tasks(self, first: int, last: int) -> slice:
        """The tasks of some rows."""
        return slice(first * self._width, (last + 1) * self._width)

    def _meets(
        self, row: int, links: np.ndarray, joined_s: np.ndarray, left_s: np.ndarray, *, alone: bool
    ) -> int | None:
        """The first row whose flows those of a row meet, itself among them, given the link and times of each hop.

        `alone`: no two of its own are on one link.
        """
        before_s = self._left_s[links]
        meets = joined_s < before_s * (1 - SAME_INSTANT)
        self._before[row], first = (links, before_s), None if alone else row
        if meets.any():
            first, there_s = self._first_after(links[meets], joined_s[meets])
            self._before[first:] = [(slice(None), there_s), *[None] * (row - first)]
            self._first_of[row] = first
        if alone:
            self._left_s[links] = np.maximum(before_s, left_s)
        else:
            np.maximum.at(self._left_s, links, left_s)
        return first

    def _first_after(self, links: np.ndarray, joined_s: np.ndarray) -> tuple[int, np.ndarray]:
        """The first row of which a flow leaves one of some links after a time, at which another joins it, and when
        flows before that row leave each link.
        """
        there_s = self._left_s.copy()
        row = len(self._before) - 2
        while row >= 0:
            row = self._first_of.get(row, row)
            if before := self._before[row]:
                there_s[before[0]] = before[1]
                if not np.any(joined_s < there_s[links] * (1 - SAME_INSTANT)):
                    return row, there_s
            row -= 1
        raise AssertionError("no flow is there before the first")

    def _solve(self, rows: _Together, solve: Solve) -> None:
        """Solve rows together, after all that end before."""
        tasks, timing = self._tasks(*rows), self.timing
        graph, given_s = self._after(tasks)
        size = tasks.stop - tasks.start
        timing_of_rows = solve(graph)
        timing.start_s[tasks] = np.maximum(timing_of_rows.start_s[:size], given_s)
        timing.finish_s[tasks] = timing_of_rows.finish_s[:size]
        for row in range(rows.last, rows.first - 1, -1):
            if before := self._before[row]:
                self._left_s[before[0]] = before[1]
            self._before[row] = None
        links, task = _hops(self._graph, tasks)
        self._before[rows.first] = links, self._left_s[links]
        self._first_of[rows.last] = rows.first
        np.maximum.at(self._left_s, links, timing.finish_s[tasks][task])

    def _after(self, tasks: slice) -> tuple[TaskGraph, np.ndarray]:
        """The graph of some tasks, and when all their predecessors from before have ended: (tasks,) seconds.

        A task that also has predecessors among them waits for one more, a delay of so many seconds.
        """
        graph, size = self._graph, tasks.stop - tasks.start
        starts, hops = (of[tasks.start : tasks.stop + 1] for of in (graph.dep_start, graph.path_start))
        owner, deps = np.repeat(np.arange(size), np.diff(starts)), graph.dep_tasks[starts[0] : starts[-1]]
        inside, given_s = deps >= tasks.start, np.zeros(size)
        np.maximum.at(given_s, owner[~inside], self.timing.finish_s[deps[~inside]])
        owner, deps = owner[inside], deps[inside] - tasks.start
        waits = np.bincount(owner, minlength=size) > 0
        both = np.flatnonzero(waits & (given_s > 0))
        owner, deps = np.concatenate([owner, both]), np.concatenate([deps, size + np.arange(both.size)])
        order, more = np.argsort(owner, kind="stable"), np.ones(both.size)
        counts = np.bincount(owner, minlength=size + both.size)
        delay_s = np.concatenate([graph.delay_s[tasks] + np.where(waits, 0.0, given_s), given_s[both]])
        crossed = slice(hops[0], hops[-1])
        rows_graph = replace(
            graph,
            delay_s=delay_s,
            flow_bytes=np.concatenate([graph.flow_bytes[tasks], 0 * more]),
            path_start=np.concatenate([hops - hops[0], np.full(both.size, hops[-1] - hops[0])]),
            path_links=graph.path_links[crossed],
            path_loads=graph.path_loads[crossed],
            dep_start=np.concatenate([[0], np.cumsum(counts)]),
            dep_tasks=deps[order],
            rate_cap=np.concatenate([graph.rate_cap[tasks], np.inf * more]),
            weight=np.concatenate([graph.weight[tasks], more]),
        )
        return rows_graph, given_s


@dataclass(frozen=True)
class _Crossing:
    """The links that flows of some rows cross, known before any time is."""

    first: int
    after: int
    """The rows: first <= row < after."""
    has_flows: list[bool]
    alone: list[bool]
    """True for rows no two of whose flows cross one link."""
    sending_s: np.ndarray
    """(rows, width) Seconds that its bytes take a task alone, at the rate of its slowest link."""
    hops: list[int]
    """The first hop of each row; the last entry is the end of all."""
    links: np.ndarray
    """(hops,) The link of each hop."""
    task: np.ndarray
    """(hops,) The place in its row of the task that takes it."""

    @classmethod
    def of(cls, graph: TaskGraph, width: int, first: int) -> _Crossing:
        """Those of the rows from the first on, as many as there are and have AT_ONCE tasks together."""
        after = min(first + max(AT_ONCE // width, 1), graph.delay_s.size // width)
        tasks, rows = slice(first * width, after * width), after - first
        links, task = _hops(graph, tasks)
        rates, sent = graph.rate_cap[tasks].copy(), graph.flow_bytes[tasks]
        np.minimum.at(rates, task, graph.link_bytes_per_s[links] / graph.path_loads[_hops_of(graph, tasks)])
        crossings = np.sort(task // width * graph.link_bytes_per_s.size + links)  # of one link by flows of one row
        again = crossings[1:][crossings[1:] == crossings[:-1]] // graph.link_bytes_per_s.size
        starts = graph.path_start[first * width : after * width + 1 : width]
        return cls(
            first,
            after,
            np.logical_or.reduce((sent > 0).reshape(rows, width), axis=1).tolist(),
            np.equal(np.bincount(again, minlength=rows), 0).tolist(),
            (sent / rates).reshape(rows, width),
            (starts - starts[0]).tolist(),
            links,
            task % width,
        )


AT_ONCE = 4096
"""So many tasks, of whole rows, are looked at together before their times are found."""


def _hops_of(graph: TaskGraph, tasks: slice) -> slice:
    return slice(graph.path_start[tasks.start], graph.path_start[tasks.stop])


def _hops(graph: TaskGraph, tasks: slice) -> tuple[np.ndarray, np.ndarray]:
    """(the link of each hop of some tasks, the task that takes it, counted from the first of these)."""
    starts = graph.path_start[tasks.start : tasks.stop + 1]
    return graph.path_links[_hops_of(graph, tasks)], np.repeat(np.arange(starts.size - 1), np.diff(starts))
