"""A lower bound on when the last task of some rows ends, for which nothing is solved by events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sp_bench.simulate.rows import CORE_WORK_PER_S, Crossed, Rows


def least_makespan_s(
    rows: Rows, cores: int | None, first_rows: int, least: Mapping[int, np.ndarray], *, alike: bool
) -> float:
    """Seconds that so many first rows take at least; rows of work that is in `least` take those seconds: (n,) each.

    Tasks end no sooner than if no flow slowed another down, but those of ranks of a kind if these are `alike`, which
    run at the same time. What joins a link from any moment on takes it as long as its full rate lets it, however flows
    share that, and then comes what follows the last of it: on one machine, with jobs that have heads and tails, this is
    the bound of Carlier (The one-machine sequencing problem, 1982).
    """
    links, known = _Links(rows.link_bytes_per_s(cores)), dict[tuple[int, int], _Crossing]()
    taken, finish_s = list[tuple[np.ndarray, _Crossing | None]](), np.zeros(first_rows * rows.n)
    for row, deps in enumerate(rows.deps[:first_rows]):
        delay_s, sizes, crossed, cap = rows.delays[row], rows.sizes[row], rows.crossed[row], rows.caps[row]
        if row in least:
            delay_s, sizes = (delay_s, least[row] * CORE_WORK_PER_S) if cores else (least[row], sizes)
        ended_s = finish_s[row * rows.n : (row + 1) * rows.n]
        for tasks in deps:
            there_s = finish_s[tasks.row * rows.n :]
            np.maximum(ended_s, there_s[: rows.n] if tasks.ranks is None else there_s[tasks.ranks], out=ended_s)
        ended_s += delay_s
        if sizes is rows.nothing:
            taken.append((delay_s, None))
            continue
        key = id(crossed), id(cap)
        if key not in known:
            known[key] = _Crossing(rows, crossed, cap, links.bytes_per_s, alike=alike)
        crossing = known[key]
        sending_s = sizes / crossing.rates
        taken.append((delay_s + sending_s, crossing))
        links.join(crossing, sizes, ended_s)
        ended_s += sending_s
    makespan_s = float(finish_s.max(initial=0.0))
    del finish_s  # it takes as much memory as what follows
    _follow(rows, taken, links)
    return max(makespan_s, links.least_s)


def _follow(rows: Rows, taken: Sequence[tuple[np.ndarray, _Crossing | None]], links: _Links) -> None:
    """Let each link know what comes after the flows that it carries, at least. Rows take so many seconds alone, (n,)
    each, and cross those links.
    """
    after_s = np.zeros(len(taken) * rows.n)
    for row in range(len(taken) - 1, -1, -1):
        seconds, crossing = taken[row]
        row_s = after_s[row * rows.n : (row + 1) * rows.n]
        if crossing:
            links.leave(crossing, row_s)
        row_s += seconds  # from the beginning of the row on
        for tasks in rows.deps[row]:
            before_s, ranks = after_s[tasks.row * rows.n :], slice(rows.n) if tasks.ranks is None else tasks.ranks
            # Of several ranks that wait for one, one is enough.
            before_s[ranks] = np.maximum(before_s[ranks], row_s)


class _Crossing:
    """The links that rows with the same paths cross: of each flow the slowest ones. (H,) are by crossing, those of one
    link together.
    """

    def __init__(self, rows: Rows, crossed: Crossed, cap: np.ndarray, bytes_per_s: np.ndarray, *, alike: bool) -> None:
        tasks, links, loads = crossed.tasks, crossed.links, crossed.loads
        flow_bytes_per_s, slowest = bytes_per_s[links] / loads, np.full(cap.size, np.inf)
        np.minimum.at(slowest, tasks, flow_bytes_per_s)
        # Where ranks may run at other times, no other rank's flow is on a link; cores are one link more.
        crowd = 1 if alike else rows.quotient.sizes[tasks] // np.append(rows.quotient.link_sizes, 1)[links]
        self.rates = cap.copy()
        """Bytes per second of each task's flow where there is no other or, if ranks are `alike`, none of another kind:
        (n,).
        """
        np.minimum.at(self.rates, tasks, flow_bytes_per_s * crowd)
        some = np.flatnonzero(flow_bytes_per_s <= slowest[tasks])
        some = some[np.argsort(links[some], kind="stable")]
        self._tasks, self._s_per_byte = tasks[some], 1 / flow_bytes_per_s[some]
        self._first = np.flatnonzero(np.diff(links[some], prepend=-1))
        each = links[some][self._first]
        in_one = each.size > 0 and each[-1] - each[0] == each.size - 1
        self.links = slice(each[0], each[-1] + 1) if in_one else each
        """Each once."""

    def seconds(self, sizes: np.ndarray) -> np.ndarray:
        """The time that flows of so many bytes, (n,), take of each link at its full rate, all together."""
        return self._by_link(np.add, sizes[self._tasks] * self._s_per_byte)

    def least(self, of_tasks: np.ndarray) -> np.ndarray:
        """The least value, (n,), of the tasks on each link."""
        return self._by_link(np.minimum, of_tasks[self._tasks])

    def _by_link(self, reduced: np.ufunc, values: np.ndarray) -> np.ndarray:
        return values if self._first.size == values.size else reduced.reduceat(values, self._first)


class _Links:
    """The flows on each link, by link: (L,)."""

    def __init__(self, bytes_per_s: np.ndarray) -> None:
        self.bytes_per_s = bytes_per_s
        self._end_s, self._joined_s = np.full((2, bytes_per_s.size), -np.inf)
        self._after_s = np.full(bytes_per_s.size, np.inf)

    def join(self, crossing: _Crossing, sizes: np.ndarray, joined_s: np.ndarray) -> None:
        """Have the flows of one more row join the links, of so many bytes and at no time before `joined_s`: (n,) each.

        A link's end is the most, over what has joined it from some row on, of when the first of that joins and the
        seconds of all of it. A row that joins before the last one makes that first moment earlier by no more than that.
        """
        begin_s, links = crossing.least(joined_s), crossing.links
        earlier_s = np.maximum(self._joined_s[links] - begin_s, 0.0)
        self._end_s[links] = np.maximum(self._end_s[links] - earlier_s, begin_s) + crossing.seconds(sizes)
        self._joined_s[links] = begin_s

    def leave(self, crossing: _Crossing, after_s: np.ndarray) -> None:
        """Have so much come after the flows of a row: (n,)."""
        links = crossing.links
        self._after_s[links] = np.minimum(self._after_s[links], crossing.least(after_s))

    @property
    def least_s(self) -> float:
        """When what comes after all that links carry ends, at least."""
        used = np.isfinite(self._after_s)
        return float((self._end_s[used] + self._after_s[used]).max(initial=0.0))
