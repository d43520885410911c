"""Measured times in long form: one row for each rank, iteration, phase and part. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np

STEP = "step"
"""The part that is the whole phase."""
START = "start"
"""The part that is the barrier on a GPU's stream before a phase: how much earlier than the last rank this one came."""
COMPUTE_ONLY, COMMUNICATION_ONLY = "compute_only", "communication_only"
"""The parts that are a phase without its transfers, and a phase without its blocks."""
INSIDE = ("blocks", "waits", "kernels", "folds", "caller")
"""Parts of a phase's `STEP`, each a field of run.executor.Spent: blocks and folds together, waits for transfers, block
kernels, folds, and the thread that executes the plan (on a GPU: that queues the work)."""
CORES = {STEP: "core", COMPUTE_ONLY: "compute_only_core", COMMUNICATION_ONLY: "communication_only_core"}
"""The part that is busy core seconds of the rank's machine, beside each of these parts: all processes, over all phases
together and the barriers around them. Not sampled on a GPU."""
CORE_WINDOW = "core_window"
"""The part that is how long the time lasted in which the `core` seconds were counted."""
ALL_PHASES = "all"


class Row(NamedTuple):
    """One sample, in long form."""

    rank: int
    iteration: int
    phase: str
    part: str
    seconds: float
    began_s: float = np.nan
    """When it began, by a clock that all ranks of a machine share; NaN if there is none, as on a GPU."""


@dataclass(frozen=True, eq=False)
class Samples:
    """The columns of the table, each (rows,)."""

    rank: np.ndarray
    iteration: np.ndarray
    phase: np.ndarray
    part: np.ndarray
    seconds: np.ndarray
    began_s: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """The samples of these rows. There may be none."""
        columns = zip(*rows, strict=True) if rows else [()] * len(Row._fields)
        kinds = (int, int, str, str, float, float)
        return cls(*(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))

    @classmethod
    def joined(cls, several: Iterable[Self]) -> Self:
        """The rows of several samples, in one table."""
        several = list(several)
        return cls(*(np.concatenate([getattr(one, f.name) for one in several]) for f in fields(cls)))

    def by_rank(self, part: str, phase: str | None = None) -> np.ndarray:
        """Seconds of a part in one phase, or in all phases together: (ranks, iterations), ranks in order.

        The shape is (0, 0) if the part was not sampled.
        """
        chosen = self.part == part if phase is None else (self.part == part) & (self.phase == phase)
        ranks, row = np.unique(self.rank[chosen], return_inverse=True)
        iterations, column = np.unique(self.iteration[chosen], return_inverse=True)
        total = np.zeros((ranks.size, iterations.size))
        np.add.at(total, (row, column), self.seconds[chosen])
        return total

    def from_first_start(self, machines: Mapping[int, str]) -> Self:
        """The samples with times counted from when the first rank on the same machine began.

        `machines` has the machine of each rank. After a barrier, ranks that share cores may wait for their first turn
        while others already compute. A rank's own time would leave out that wait.
        """
        _, machine = np.unique([machines[rank] for rank in self.rank.tolist()], return_inverse=True)
        _, phase = np.unique(self.phase, return_inverse=True)
        _, part = np.unique(self.part, return_inverse=True)
        _, together = np.unique(np.stack([machine, phase, part, self.iteration]), axis=1, return_inverse=True)
        first_s = np.full(len(self.rank), np.nan)
        np.fmin.at(first_s, together.ravel(), self.began_s)
        first_s = first_s[together.ravel()]
        later_s = np.nan_to_num(self.began_s - first_s)  # NaN if there is no common clock
        return type(self)(self.rank, self.iteration, self.phase, self.part, self.seconds + later_s, first_s)

    def columns(self) -> dict[str, list[Any]]:
        """The columns of the samples file beside a record: rank, iteration, phase, part, seconds."""
        return {name: getattr(self, name).tolist() for name in ("rank", "iteration", "phase", "part", "seconds")}
