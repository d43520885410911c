"""A lower bound on when the last task of some rows ends, for which nothing is solved by events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
    # What is known of a row once is that of all like it: arrays are the same ones.
    known, links = dict[tuple[int, ...], _Taken](), _Links(rows.link_bytes_per_s(cores))
    taken, finish_s = list[_Taken](), np.zeros(first_rows * rows.n)
    for row, deps in enumerate(rows.deps[:first_rows]):
        key = tuple(map(id, (rows.delays[row], rows.sizes[row], rows.crossed[row], rows.caps[row])))
        of_row = None if row in least else known.get(key)
        if of_row is None:
            of_row = known[key] = _Taken.of(rows, row, cores, least.get(row), links.bytes_per_s, alike=alike)
        taken.append(of_row)
        ended_s = finish_s[row * rows.n : (row + 1) * rows.n]
        for tasks in deps:
            there_s = finish_s[tasks.row * rows.n :]
            np.maximum(ended_s, there_s[: rows.n] if tasks.ranks is None else there_s[tasks.ranks], out=ended_s)
        if of_row.load:
            links.join(of_row.load, ended_s + of_row.delay_s)
        ended_s += of_row.seconds
    makespan_s = float(finish_s.max(initial=0.0))
    _follow(rows, taken, links)
    return max(makespan_s, links.least_s)


def _follow(rows: Rows, taken: list[_Taken], links: _Links) -> None:
    """Let each link know what comes after the flows that it carries, at least."""
    after_s = np.zeros(len(taken) * rows.n)
    for row in range(len(taken) - 1, -1, -1):
        of_row, row_s = taken[row], after_s[row * rows.n : (row + 1) * rows.n]
        if of_row.load:
            links.leave(of_row.load, row_s)
        row_s += of_row.seconds  # from here on until the end, with the row itself
        for tasks in rows.deps[row]:
            before_s = after_s[tasks.row * rows.n :]
            if tasks.ranks is None:
                np.maximum(before_s[: rows.n], row_s, out=before_s[: rows.n])
            else:
                np.maximum.at(before_s, tasks.ranks, row_s)


class _Load(NamedTuple):
    """What the flows of a row take of the links that they cross."""

    links: np.ndarray
    """Each once."""
    seconds: np.ndarray
    """Of each at its full rate, for all of them."""
    tasks: np.ndarray
    """The task of each hop, those on one link beside each other."""
    first: np.ndarray | None
    """Where the hops of each link begin; None if each has one."""

    @classmethod
    def of(cls, crossed: Crossed, sizes: np.ndarray, bytes_per_s: np.ndarray) -> _Load | None:
        """None if nothing is crossed."""
        if not crossed.links.size:
            return None
        order = np.argsort(crossed.links, kind="stable")
        tasks, links = crossed.tasks[order], crossed.links[order]
        seconds = sizes[tasks] * crossed.loads[order] / bytes_per_s[links]
        first = np.flatnonzero(np.diff(links, prepend=-1))
        alone = first.size == links.size
        return cls(links[first], np.add.reduceat(seconds, first), tasks, None if alone else first)

    def least(self, of_tasks: np.ndarray) -> np.ndarray:
        """The least value of the tasks on each link."""
        values = of_tasks[self.tasks]
        return values if self.first is None else np.minimum.reduceat(values, self.first)


@dataclass(frozen=True)
class _Taken:
    """What a row takes at least: (n,) seconds, after the delay with its flows, if no other slows those down."""

    delay_s: np.ndarray
    seconds: np.ndarray
    load: _Load | None

    @classmethod
    def of(
        cls, rows: Rows, row: int, cores: int | None, work_s: np.ndarray | None, bytes_per_s: np.ndarray, *, alike: bool
    ) -> _Taken:
        """A row of `rows`; one of work takes `work_s`, (n,), if that is given."""
        delay_s, sizes, crossed, cap = rows.delays[row], rows.sizes[row], rows.crossed[row], rows.caps[row]
        if work_s is not None:
            delay_s, sizes = (delay_s, work_s * CORE_WORK_PER_S) if cores else (work_s, sizes)
        if sizes is rows.nothing:
            return cls(delay_s, delay_s, None)
        rates, tasks, loads = cap.copy(), crossed.tasks, crossed.loads
        if not alike:  # cores are one link more
            quotient = rows.quotient
            loads = loads / (quotient.sizes[tasks] // np.append(quotient.link_sizes, 1)[crossed.links])
        np.minimum.at(rates, tasks, bytes_per_s[crossed.links] / loads)
        return cls(delay_s, delay_s + sizes / rates, _Load.of(crossed, sizes, bytes_per_s))


class _Links:
    """What links carry, by link: (L,)."""

    def __init__(self, bytes_per_s: np.ndarray) -> None:
        self.bytes_per_s = bytes_per_s
        self._end_s, self._joined_s = np.full((2, bytes_per_s.size), -np.inf)
        self._after_s = np.full(bytes_per_s.size, np.inf)

    def join(self, load: _Load, joined_s: np.ndarray) -> None:
        """Have the flows of one more row join the links, at no time before `joined_s`, by task.

        A link's end is the most, over what has joined it from some row on, of when the first of that joins and the
        seconds of all of it. If a row joins before the one before it, that first moment is no more earlier than that.
        """
        begin_s, links = load.least(joined_s), load.links
        earlier_s = np.maximum(self._joined_s[links] - begin_s, 0.0)
        self._end_s[links] = np.maximum(self._end_s[links] - earlier_s, begin_s) + load.seconds
        self._joined_s[links] = begin_s

    def leave(self, load: _Load, after_s: np.ndarray) -> None:
        """So much comes after flows of a row, by task."""
        links = load.links
        self._after_s[links] = np.minimum(self._after_s[links], load.least(after_s))

    @property
    def least_s(self) -> float:
        """When what comes after all that links carry ends, at least."""
        used = np.isfinite(self._after_s)
        return float((self._end_s[used] + self._after_s[used]).max(initial=0.0))
