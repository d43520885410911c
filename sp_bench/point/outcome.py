"""The outcome of a benchmark point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sp_bench.records import Record
from sp_bench.records.timeline import Timeline

if TYPE_CHECKING:
    from sp_bench.measure.samples import Samples


@dataclass(frozen=True)
class Outcome:
    """A finished point: its record, and what is written beside it."""

    record: Record
    timeline: Timeline | None = None
    """The timeline that is printed with the point."""
    samples: Samples | None = None
    """The samples of a measured point."""
    hang: dict[str, Any] | None = None
    """The thread dumps of ranks that hung (measure.thread_dump), by rank."""
    trace: dict[str, Any] | None = None
    """The simulated timeline, for Perfetto."""
    ranks: dict[str, list[float]] | None = None
    """The time breakdown of each simulated rank in milliseconds (simulated.time_by_rank)."""
    reused: bool = False
    """Whether the record is of an earlier run."""
