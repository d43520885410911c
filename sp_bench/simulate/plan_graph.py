"""The task graph of a plan, as it is simulated: which tasks are which operations of which ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from sp_bench.plan.schedule import Segment
from sp_bench.simulate.rows import CORE_WORK_PER_S
from sp_bench.simulate.symmetry import Quotient
from sp_bench.simulate.task_graph import TaskGraph, Timing

LEAST_WORK = 1e-12
"""The least work of a task that takes cores, in seconds or their unit: one without any would need another path."""


@dataclass(frozen=True, eq=False)
class Item:
    """A segment, or a transfer by its index in the plan, and its rows of tasks."""

    what: Segment | int
    rows: range


@dataclass(frozen=True)
class PlanGraph:
    """The task graph of a plan, and which tasks are which."""

    tasks: TaskGraph
    items: tuple[Item, ...]
    quotient: Quotient
    """The ranks that stand for others: rows have a task for each of quotient.ranks."""
    work: str
    """The field of `tasks` that has the work of segments: delay_s, or flow_bytes where cores are shared."""
    exact: bool
    """Whether all ranks of a kind are alike, not only nearly so."""
    least: Mapping[int, np.ndarray]
    """If they are nearly so, the least work of the ranks of a kind, by row of a segment: (ranks,) seconds each."""
    share: np.ndarray
    """The share of the work that a rank has here which is its own: (n,), 1 where ranks of a kind are alike."""

    @property
    def work_per_s(self) -> float:
        """A second in the unit of that field."""
        return CORE_WORK_PER_S if self.work == "flow_bytes" else 1.0

    def by_rank(self, of_tasks: np.ndarray) -> np.ndarray:
        """Something of each task by row and simulated rank, without the rows of later_bytes: (rows, ranks)."""
        return of_tasks.reshape(-1, self.quotient.ranks.size)[: self.items[-1].rows.stop]

    def rows_of(self, *, blocks: bool) -> np.ndarray:
        """The rows of segments, or of the transfers that move something."""
        if blocks:
            return self._segment_rows
        moving = self.by_rank(self.tasks.flow_bytes).any(axis=1)
        return np.setdiff1d(np.flatnonzero(moving), self._segment_rows)

    @cached_property
    def _segment_rows(self) -> np.ndarray:
        return np.array([row for item in self.items if isinstance(item.what, Segment) for row in item.rows], int)

    def work_s(self, tasks: TaskGraph) -> np.ndarray:
        """Seconds that each rank has to compute, alone on its core or device, by such tasks: (n,)."""
        work = getattr(tasks, self.work).reshape(-1, self.quotient.ranks.size)[self.rows_of(blocks=True)]
        return self.share * work.sum(axis=0)[self.quotient.orbit] / self.work_per_s

    def busy_s(self, timing: Timing) -> np.ndarray:
        """Seconds that each rank spends in its segments, waiting for a core among it where cores are shared: (n,)."""
        taken_s = (timing.finish_s - timing.start_s).reshape(-1, self.quotient.ranks.size)
        return self.share * taken_s[self.rows_of(blocks=True)].sum(axis=0)[self.quotient.orbit]

    def without_tasks(self) -> PlanGraph:
        """The graph with no tasks, which take a hundred bytes each: it still says which times are whose."""
        none: dict[str, Any] = {each.name: np.empty(0) for each in fields(TaskGraph)}
        return replace(self, tasks=TaskGraph(**none | dict.fromkeys(("path_start", "dep_start"), np.zeros(1, int))))

    @property
    def fastest(self) -> TaskGraph:
        """The tasks where each rank is as fast as the fastest of its kind; in `tasks` it is as slow as the slowest."""
        work = getattr(self.tasks, self.work).reshape(-1, self.quotient.ranks.size).copy()
        for row, seconds in self.least.items():
            work[row] = np.minimum(work[row], np.maximum(seconds * self.work_per_s, LEAST_WORK))
        return replace(self.tasks, **{self.work: work.ravel()})
