"""The record of one benchmark point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from sp_bench.records.quantities import (
    Asked,
    Breakdown,
    DecodeStep,
    Exactness,
    GpuState,
    Memory,
    Prompt,
    Rates,
    Setup,
    Timing,
    Traffic,
    TrainingStep,
)
from sp_bench.records.rows import SUMMARY, Result, Setting
from sp_bench.records.workloads import workload_id

SCHEMA_VERSION = 4
STATUSES = ("ok", "oom", "unsupported", "incorrect", "timeout", "failed")
MODES = ("measure", "alone", "simulate")
"""The modes of points that this suite runs."""
REPORTED = "report"
"""The mode of a record that holds what others published about their own code on their own machines."""

Part = (
    Asked
    | Setup
    | Timing
    | Rates
    | Traffic
    | Breakdown
    | Memory
    | GpuState
    | Exactness
    | Prompt
    | TrainingStep
    | DecodeStep
)


@dataclass(frozen=True, kw_only=True)
class Record(
    DecodeStep, TrainingStep, Prompt, Exactness, GpuState, Memory, Breakdown, Traffic, Rates, Timing, Setup, Asked
):
    """One benchmark point: the fields of all parts, and the point's identity. None means not known.

    The fields have the order of the file: a dataclass takes those of its last base first. Raises ValueError for an
    unknown status or mode.
    """

    how: ClassVar[str] = "kept by the suite"

    run_id: str
    """A hash of everything the numbers depend on (records.identity)."""
    status: Annotated[str, Setting("status", wandb=SUMMARY)]
    """ok, oom, unsupported, incorrect, timeout or failed."""
    mode: Annotated[str, Setting("mode")]
    """measure, alone (single ranks without their peers), simulate, or report (what others published). Numbers of
    different modes are never mixed."""
    schema_version: Annotated[int, Setting()] = SCHEMA_VERSION
    """The version of these fields."""
    workload_id: Annotated[str, Setting()] = ""
    """The question that the record answers, in words (records.workloads). Files may leave it out."""
    source: Annotated[str | None, Setting()] = None
    """With mode=report: where the numbers are published, a URL or a citation with its table or figure."""
    error: Annotated[str | None, Result()] = None
    """Why the status isn't ok."""
    notes: list[str] | None = None
    """Remarks that a reader of the numbers must know."""
    provenance: dict[str, Any] | None = None
    """The code, its versions, the command and the machine that made the record."""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status}: must be one of {', '.join(STATUSES)}")
        if self.mode not in (*MODES, REPORTED):
            raise ValueError(f"mode={self.mode}: must be one of {', '.join((*MODES, REPORTED))}")
        if (self.mode == REPORTED) != bool(self.source):
            raise ValueError(
                f"mode={self.mode} source={self.source}: mode={REPORTED} has a source, the others have none"
            )
        if not self.mask:
            object.__setattr__(self, "mask", "causal" if self.causal else "full")
        if not self.workload_id:
            object.__setattr__(self, "workload_id", workload_id(vars(self)))

    @property
    def measured(self) -> bool:
        """Whether the times are wall times, of a whole run or of single ranks."""
        return self.mode in ("measure", "alone")

    def to_dict(self) -> dict[str, Any]:
        """The record as a flat JSON object."""
        return dict(vars(self))


def fields_of(parts: Iterable[Part]) -> dict[str, Any]:
    """The fields of some parts together, to make a `Record` of."""
    return {name: value for part in parts for name, value in vars(part).items()}
