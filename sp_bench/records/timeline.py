"""The timeline that is printed with a point. It stands beside the record, so that a reused point prints it too."""

from __future__ import annotations

from pathlib import Path

import msgspec


class SimulatedTimeline(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="simulated"):
    """The timeline of one rank, all phases one after the other, in seconds."""

    rank: int
    phases: list[str]
    end_s: float
    lanes: dict[str, list[tuple[float, float]]]
    """When transfers arrive, by lane: (start_s, end_s)."""
    blocks: list[tuple[float, float]]
    waits: list[tuple[float, float]]
    """When its blocks wait."""


class MeasuredTimeline(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="measured"):
    """Mean seconds of a step, by rank."""

    blocks_s: list[float]
    """Blocks and folds."""
    waits_s: list[float]


Timeline = SimulatedTimeline | MeasuredTimeline


def read_timeline(record: Path) -> Timeline | None:
    """The timeline beside the record at this path; None if there is none that this code reads."""
    try:
        return msgspec.json.decode(record.with_suffix(".timeline.json").read_bytes(), type=Timeline)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
