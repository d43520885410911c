"""Tasks of a plan in rows: one task for each rank that is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from sp_bench.simulate.symmetry import Quotient
from sp_bench.simulate.task_graph import TaskGraph, starts

CORE_WORK_PER_S = 1e12
"""Work on shared cores flows in picoseconds. In fair shares, which rise by weight, transfers' bytes per second are far
below such numbers, so that transfers take their part of the cores before any block does."""

AT_ONCE = 2**16
"""The predecessors of so many tasks are found together."""


class Path(NamedTuple):
    """The paths of the simulated ranks' flows: (n,) latencies and caps, (n, P) links and how much they load each."""

    target: np.ndarray
    """(n,) The kind of rank that each sends to."""
    source: np.ndarray
    """(n,) The kind that each receives from."""
    latency_s: np.ndarray
    rate_cap: np.ndarray
    links: np.ndarray
    loads: np.ndarray
    inter: np.ndarray
    """(n,) Whether they leave their node."""
    alone_bytes_per_s: np.ndarray
    """(n,) What each gets where there is no other."""


class Crossed(NamedTuple):
    """The links that a row's flows cross, by task."""

    hops: np.ndarray
    """(n,) How many links each task crosses."""
    links: np.ndarray
    loads: np.ndarray

    @property
    def tasks(self) -> np.ndarray:
        """The task of each load."""
        return np.repeat(np.arange(self.hops.size), self.hops)


class Tasks(NamedTuple):
    """A task of each simulated rank, by which rows of thousands of tasks are named without a number for each."""

    row: int
    ranks: np.ndarray | None = None
    """(n,) The rank whose task of the row each rank has, or, beyond the first n tasks, any task by its number from the
    row's first one on; None of its own."""


@dataclass
class Rows:
    """Rows of tasks, one for each rank that is simulated, as they are added.

    A plan has thousands of rows of few kinds: arrays that were given before are taken as they are.
    """

    quotient: Quotient
    delays: list[np.ndarray] = field(default_factory=list)
    sizes: list[np.ndarray] = field(default_factory=list)
    crossed: list[Crossed] = field(default_factory=list)
    caps: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    deps: list[Sequence[Tasks]] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = self.n = self.quotient.ranks.size
        self.nothing, self.ones, self.uncapped = np.zeros(n), np.ones(n), np.full(n, np.inf)
        self.same: dict[float, np.ndarray] = {0.0: self.nothing, 1.0: self.ones}
        """The rows that have one number everywhere, by that."""
        self.none = Crossed(np.zeros(n, np.int64), np.empty(0, np.int64), np.empty(0))
        self.own = np.arange(n)
        self.known: dict[tuple[int, int], tuple[Path, Crossed]] = {}
        """By the links and loads of a path on which every rank sends, which are kept so that their ids stay theirs."""
        self.caps_known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """By a path's caps, which are kept like that, the caps of its row."""
        self.named: dict[tuple[int, int], tuple[np.ndarray | None, np.ndarray, np.ndarray | None]] = {}
        """By two arrays of ranks, which are kept like that, the ranks that the first has for those of the second."""
        self.alike: dict[bytes, np.ndarray | None] = {self.own.tobytes(): None}
        """One array of all that are equal."""

    def add(
        self,
        delay_s: np.ndarray | float,
        deps: Sequence[Tasks],
        flow_bytes: np.ndarray | float = 0.0,
        path: Path | None = None,
        weight: np.ndarray | float = 1.0,
    ) -> Tasks:
        """Add a row: delays (n,), predecessors, and for flows bytes (n,), what they cross, weights (n,).

        Returns its tasks. Predecessors that are named twice are there once.
        """
        sizes = self._each(flow_bytes)
        self.delays.append(self._each(delay_s))
        self.sizes.append(sizes)
        self.crossed.append(self._crossed(path, sizes) if path else self.none)
        self.caps.append(self._caps(path.rate_cap) if path else self.uncapped)
        self.weights.append(self._each(weight))
        self.deps.append([*{(tasks.row, id(tasks.ranks)): tasks for tasks in deps}.values()])
        return Tasks(len(self.delays) - 1)

    def at(self, tasks: Tasks, ranks: np.ndarray) -> Tasks:
        """The tasks of other ranks: for each rank, that of the rank which `ranks`, (n,), names. Equal ones have the
        same array.
        """
        key = id(tasks.ranks), id(ranks)
        if key not in self.named:
            others = ranks if tasks.ranks is None else tasks.ranks[ranks]
            self.named[key] = tasks.ranks, ranks, self.alike.setdefault(others.tobytes(), others)
        return Tasks(tasks.row, self.named[key][2])

    def either(self, there: np.ndarray | bool, tasks: Tasks, others: Tasks) -> Tasks:
        """The tasks of the ranks where `there`, (n,), is true, and the other ones elsewhere."""
        return Tasks(0, np.where(there, self._numbers(tasks), self._numbers(others)))

    def _numbers(self, tasks: Tasks) -> np.ndarray:
        return tasks.row * self.n + self._ranks(tasks)

    def _ranks(self, tasks: Tasks) -> np.ndarray:
        return self.own if tasks.ranks is None else tasks.ranks

    def _each(self, value: np.ndarray | float) -> np.ndarray:
        if isinstance(value, np.ndarray) and value.shape == (self.n,):
            return value if value.dtype == float else value.astype(float)
        if isinstance(value, float | int) or np.ndim(value) == 0:
            number = float(value)
            if number not in self.same:
                self.same[number] = np.full(self.n, number)
            return self.same[number]
        return np.broadcast_to(np.asarray(value, float), self.n)

    def _caps(self, caps: np.ndarray) -> np.ndarray:
        """Caps of a row; one array of all rows without any."""
        if id(caps) not in self.caps_known:
            self.caps_known[id(caps)] = caps, caps if np.isfinite(caps).any() else self.uncapped
        return self.caps_known[id(caps)][1]

    def _crossed(self, path: Path, sizes: np.ndarray) -> Crossed:
        if not sizes.all():
            return _by_task(path.links, path.loads * (sizes[:, None] > 0))
        key = id(path.links), id(path.loads)
        if key not in self.known:
            self.known[key] = path, _by_task(path.links, path.loads)
        return self.known[key][1]

    def link_bytes_per_s(self, cores: int | None) -> np.ndarray:
        """The rate of each link, with one more where cores are shared."""
        return np.append(self.quotient.link_bytes_per_s, [cores * CORE_WORK_PER_S] if cores else [])

    def task_graph(self, cores: int | None) -> TaskGraph:
        """The finished graph, with one more link where cores are shared."""
        return TaskGraph(
            delay_s=np.concatenate(self.delays),
            flow_bytes=np.concatenate(self.sizes),
            path_start=starts(*(each.hops for each in self.crossed)),
            path_links=np.concatenate([each.links for each in self.crossed]),
            path_loads=self._loads(),
            dep_start=starts(np.repeat(np.array([len(deps) for deps in self.deps], np.int32), self.n)),
            dep_tasks=self._predecessors(),
            rate_cap=self._together(self.caps, self.uncapped),
            weight=self._together(self.weights, self.ones),
            link_bytes_per_s=self.link_bytes_per_s(cores),
        )

    def _loads(self) -> np.ndarray:
        """Bytes that each byte takes of each link; an array without memory of its own where that is one everywhere."""
        kinds = {id(each): each.loads for each in self.crossed}
        if all(np.all(loads == 1) for loads in kinds.values()):
            return np.broadcast_to(1.0, sum(each.loads.size for each in self.crossed))
        return np.concatenate([each.loads for each in self.crossed])

    def _together(self, rows: list[np.ndarray], usual: np.ndarray) -> np.ndarray:
        """The values of all rows; an array without memory of its own where all of them are the usual ones."""
        if all(row is usual for row in rows):
            return np.broadcast_to(usual[:1], self.n * len(rows))
        return np.concatenate(rows)

    def _predecessors(self) -> np.ndarray:
        """The predecessors of every task, one after the other."""
        n, first = self.n, 0
        predecessors = np.empty(n * sum(map(len, self.deps)), np.int32)
        for count, alike in groupby(filter(None, self.deps), len):
            while some := list(islice(alike, max(AT_ONCE // n, 1))):
                named = [tasks for deps in some for tasks in deps]
                of_each = np.array([self._ranks(tasks) for tasks in named], np.int32)
                of_each += np.array([tasks.row * n for tasks in named], np.int32)[:, None]
                of_rows = predecessors[first : first + of_each.size].reshape(-1, n, count)
                of_rows[...] = of_each.reshape(-1, count, n).swapaxes(1, 2)
                first += of_each.size
        return predecessors


def _by_task(links: np.ndarray, loads: np.ndarray) -> Crossed:
    loaded = loads > 0
    return Crossed(loaded.sum(axis=1), links[loaded], loads[loaded])
