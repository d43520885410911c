"""Tasks of a plan in rows: one task for each rank that is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sp_bench.simulate.flows import TaskGraph
from sp_bench.simulate.symmetry import Quotient

CORE_WORK_PER_S = 1e12
"""Work on shared cores flows in picoseconds. In fair shares, which rise by weight, transfers' bytes per second are far
below such numbers, so that transfers take their part of the cores before any block does."""


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
    deps: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = self.n = self.quotient.ranks.size
        self.nothing, self.ones, self.uncapped = np.zeros(n), np.ones(n), np.full(n, np.inf)
        self.none = Crossed(np.zeros(n, np.int64), np.empty(0, np.int64), np.empty(0))
        self.alone, self.no_deps = np.arange(n), np.empty((n, 0), np.int64)
        self.known: dict[tuple[int, int], tuple[Path, Crossed]] = {}
        """By the links and loads of a path on which every rank sends, which are kept so that their ids stay theirs."""

    def add(
        self,
        delay_s: np.ndarray | float,
        deps: Sequence[np.ndarray],
        flow_bytes: np.ndarray | float = 0.0,
        path: Path | None = None,
        weight: np.ndarray | float = 1.0,
    ) -> np.ndarray:
        """Add a row: delays (n,), predecessors [(n,), ...], and for flows bytes (n,), what they cross, weights (n,).

        Returns its tasks by rank: (n,).
        """
        sizes = self._each(flow_bytes)
        self.delays.append(self._each(delay_s))
        self.sizes.append(sizes)
        self.crossed.append(self._crossed(path, sizes) if path else self.none)
        self.caps.append(path.rate_cap if path else self.uncapped)
        self.weights.append(self._each(weight))
        self.deps.append(np.stack(deps, axis=1) if deps else self.no_deps)
        return (len(self.delays) - 1) * self.n + self.alone

    def _each(self, value: np.ndarray | float) -> np.ndarray:
        if isinstance(value, np.ndarray) and value.shape == (self.n,):
            return value
        if np.ndim(value) == 0:
            return self.nothing if value == 0 else self.ones if value == 1 else np.full(self.n, float(value))
        return np.broadcast_to(np.asarray(value, float), self.n)

    def _crossed(self, path: Path, sizes: np.ndarray) -> Crossed:
        if not sizes.all():
            return _by_task(path.links, path.loads * (sizes[:, None] > 0))
        key = id(path.links), id(path.loads)
        if key not in self.known:
            self.known[key] = path, _by_task(path.links, path.loads)
        return self.known[key][1]

    def task_graph(self, cores: int | None) -> TaskGraph:
        """The finished graph, with one more link where cores are shared."""
        return TaskGraph(
            delay_s=np.concatenate(self.delays),
            flow_bytes=np.concatenate(self.sizes),
            path_start=np.concatenate(([0], np.cumsum(np.concatenate([each.hops for each in self.crossed])))),
            path_links=np.concatenate([each.links for each in self.crossed]),
            path_loads=np.concatenate([each.loads for each in self.crossed]),
            dep_start=np.concatenate(([0], np.cumsum(np.repeat([dep.shape[1] for dep in self.deps], self.n)))),
            dep_tasks=np.concatenate([dep.ravel() for dep in self.deps]),
            rate_cap=np.concatenate(self.caps),
            weight=np.concatenate(self.weights),
            link_bytes_per_s=np.append(self.quotient.link_bytes_per_s, [cores * CORE_WORK_PER_S] if cores else []),
        )


def _by_task(links: np.ndarray, loads: np.ndarray) -> Crossed:
    there = loads > 0
    return Crossed(there.sum(axis=1), links[there], loads[there])
