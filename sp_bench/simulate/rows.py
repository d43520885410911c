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
    """What the simulated ranks' flows cross: (n,) latencies and caps, (n, P) links and how much they load each."""

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


@dataclass
class Rows:
    """Rows of tasks, one for each rank that is simulated, as they are added."""

    quotient: Quotient
    delays: list[np.ndarray] = field(default_factory=list)
    sizes: list[np.ndarray] = field(default_factory=list)
    paths: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    caps: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    deps: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n = self.quotient.ranks.size
        self.none = np.full((self.n, 1), -1), np.zeros((self.n, 1), np.int64)
        self.uncapped = np.full(self.n, np.inf)

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
        n, sizes = self.n, np.broadcast_to(np.asarray(flow_bytes, float), self.n)
        self.delays.append(np.broadcast_to(np.asarray(delay_s, float), n))
        self.sizes.append(sizes)
        self.paths.append((path.links, path.loads * (sizes[:, None] > 0)) if path else self.none)
        self.caps.append(path.rate_cap if path else self.uncapped)
        self.weights.append(np.broadcast_to(np.asarray(weight, float), n))
        self.deps.append(np.stack(deps, axis=1) if deps else np.empty((n, 0), np.int64))
        return (len(self.delays) - 1) * n + np.arange(n)

    def task_graph(self, cores: int | None) -> TaskGraph:
        """The finished graph, with one more link where cores are shared."""
        crossed = [loads > 0 for _, loads in self.paths]
        dep_counts = np.concatenate([np.full(self.n, dep.shape[1]) for dep in self.deps])
        return TaskGraph(
            delay_s=np.concatenate(self.delays),
            flow_bytes=np.concatenate(self.sizes),
            path_start=np.concatenate(([0], np.cumsum(np.concatenate([there.sum(axis=1) for there in crossed])))),
            path_links=np.concatenate([links[there] for (links, _), there in zip(self.paths, crossed, strict=True)]),
            path_loads=np.concatenate([loads[there] for (_, loads), there in zip(self.paths, crossed, strict=True)]),
            dep_start=np.concatenate(([0], np.cumsum(dep_counts))),
            dep_tasks=np.concatenate([dep.ravel() for dep in self.deps]),
            rate_cap=np.concatenate(self.caps),
            weight=np.concatenate(self.weights),
            link_bytes_per_s=np.append(self.quotient.link_bytes_per_s, [cores * CORE_WORK_PER_S] if cores else []),
        )
