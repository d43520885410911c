"""The interval of a record's step, and whether two steps can be told apart by it."""

from __future__ import annotations

from dataclasses import dataclass

from sp_bench.records.record import Record

FEWEST_ITERATIONS = 5
"""With fewer iterations, the interval of a median means nothing."""


@dataclass(frozen=True)
class Interval:
    """A step and the ends that it may have, in ms; without ends where nothing says how far off it is."""

    low_ms: float | None
    step_ms: float
    high_ms: float | None
    meaningful: bool = True
    """Whether the ends are of enough iterations to tell of the spread."""

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends in ms; None where there are none."""
        return None if self.low_ms is None or self.high_ms is None else (self.low_ms, self.high_ms)

    @property
    def backed(self) -> bool:
        """Whether there are ends."""
        return self.ends is not None

    def overlaps(self, other: Interval) -> bool:
        """Whether both have ends, and by them could be in either order. Ends of few iterations tell nothing apart."""
        if self.ends is None or other.ends is None:
            return False
        (low, high), (other_low, other_high) = self.ends, other.ends
        return not (self.meaningful and other.meaningful) or (low <= other_high and other_low <= high)


def interval(record: Record) -> Interval:
    """The interval of a record's step: a measured one's 95% interval, a simulated one's of validation.

    Both stand in the record (point.backing). There are no ends for a step that was measured without samples, or that
    nothing validates.
    """
    assert record.step_ms_median is not None
    if record.measured:
        enough = (record.iters or 0) >= FEWEST_ITERATIONS
        return Interval(record.step_ms_ci95_low, record.step_ms_median, record.step_ms_ci95_high, enough)
    return Interval(record.step_ms_validated_low, record.step_ms_median, record.step_ms_validated_high)
