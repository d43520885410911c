"""The record of one benchmark point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sp_bench.records.parts import Asked, Breakdown, Exactness, Memory, Rates, Setup, Timing, Traffic, TrainingStep

SCHEMA_VERSION = 4
STATUSES = ("ok", "oom", "unsupported", "incorrect", "timeout", "failed")
MODES = ("measure", "alone", "simulate")

Part = Asked | Setup | Timing | Rates | Traffic | Breakdown | Memory | Exactness | TrainingStep


@dataclass(frozen=True, kw_only=True)
class Record(TrainingStep, Exactness, Memory, Breakdown, Traffic, Rates, Timing, Setup, Asked):
    """One benchmark point: the fields of all parts, and the point's identity. None means not known.

    The fields have the order of the file: a dataclass takes those of its last base first. Raises ValueError for an
    unknown status or mode.
    """

    run_id: str
    """A hash of everything the numbers depend on (records.identity)."""
    status: str
    mode: str
    """measure, alone (single ranks without their peers) or simulate. Numbers of different modes are never mixed."""
    schema_version: int = SCHEMA_VERSION
    error: str | None = None
    notes: list[str] | None = None
    """Remarks that a reader of the numbers must know."""
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status}: must be one of {', '.join(STATUSES)}")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode}: must be one of {', '.join(MODES)}")
        if not self.mask:
            object.__setattr__(self, "mask", "causal" if self.causal else "full")

    @property
    def measured(self) -> bool:
        """Whether the times are wall times, of a whole run or of single ranks."""
        return self.mode != "simulate"

    def to_dict(self) -> dict[str, Any]:
        """The record as a flat JSON object."""
        return asdict(self)


def fields_of(parts: Iterable[Part]) -> dict[str, Any]:
    """The fields of some parts together, to make a `Record` of."""
    return {name: value for part in parts for name, value in vars(part).items()}
