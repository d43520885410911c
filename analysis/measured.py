"""Measured records in the words of pages: medians with intervals, and ratios of points that were timed in turn."""

from __future__ import annotations

from pathlib import Path

from sp_bench.analysis.frames import iterations, samples
from sp_bench.analysis.pairs import in_turn
from sp_bench.analysis.verdict import Ratio, of_medians
from sp_bench.records import Record


def known(number: float | None) -> float:
    """The number, which a measured point with status ok always has."""
    assert number is not None
    return number


def interval(record: Record) -> str:
    """The median step with its 95% interval, in milliseconds."""
    return f"{record.step_ms_median:.0f} [{record.step_ms_ci95_low:.0f}, {record.step_ms_ci95_high:.0f}]"


def ratio(found: Ratio, digits: int) -> str:
    """A ratio with its 95% interval."""
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def other_over_one(one: Record, other: Record, folder: Path, phase: str) -> Ratio | None:
    """The ratio of a phase's times, or of the step's, by the samples in a folder; None where one has none."""
    both = [iterations(samples(record, folder / f"{record.run_id}.json")) for record in (one, other)]
    if any(frame.empty for frame in both):
        return None
    return of_medians(*(frame[phase].to_numpy() for frame in both), in_turn=in_turn(one, other))
