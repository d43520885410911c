"""What became of a benchmark point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sp_bench.bench.choose import Choice
from sp_bench.measure.samples import Samples
from sp_bench.records import Record


@dataclass(frozen=True)
class Outcome:
    """A finished point: its record, and what tables and timelines can draw from this run."""

    record: Record
    choice: Choice | None = None
    samples: Samples | None = None
    """Of a measured point."""
    hang: dict[str, Any] | None = None
    """Where each rank was when none answered any more (measure.thread_dump), by rank."""
    trace: dict[str, Any] | None = None
    """The simulated timeline, for Perfetto."""
    ranks: dict[str, list[float]] | None = None
    """What each simulated rank's time went to, in milliseconds."""
    reused: bool = False
