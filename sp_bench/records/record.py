"""What a record says of one benchmark point."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from sp_bench.records.parts import Asked, Breakdown, Exactness, Memory, Rates, Setup, Timing, Traffic

SCHEMA_VERSION = 4
STATUSES = ("ok", "oom", "unsupported", "incorrect", "timeout", "failed")
MODES = ("measure", "alone", "simulate")

Part = Asked | Setup | Timing | Rates | Traffic | Breakdown | Memory | Exactness


@dataclass(frozen=True, kw_only=True)
class Record(Exactness, Memory, Breakdown, Traffic, Rates, Timing, Setup, Asked):
    """One benchmark point: the fields of all parts, and which point it is. None is "not known".

    Fields are those of the file, in its order: a dataclass takes them from its last base first.
    """

    run_id: str
    """Hash of all that changes the numbers (records.identity)."""
    status: str
    mode: str
    """measure, alone (single ranks without their peers) or simulate; their numbers are never mixed."""
    schema_version: int = SCHEMA_VERSION
    error: str | None = None
    notes: list[str] | None = None
    """What a reader must know about these numbers."""
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status}: must be one of {', '.join(STATUSES)}")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode}: must be one of {', '.join(MODES)}")
        if not self.mask:
            object.__setattr__(self, "mask", "causal" if self.causal else "full")

    @classmethod
    def of(
        cls,
        *parts: Part,
        run_id: str,
        status: str,
        mode: str,
        error: str | None = None,
        notes: list[str] | None = None,
        provenance: dict[str, Any] | None = None,
    ) -> Self:
        """The record of some parts, `Asked` among them; fields of the others are None."""
        about = {"run_id": run_id, "status": status, "mode": mode, "error": error}
        fields = {name: value for part in parts for name, value in vars(part).items()}
        return cls(**about, **fields, notes=notes, provenance=provenance)

    @property
    def measured(self) -> bool:
        """Whether its times are wall time, of a whole run or of ranks alone."""
        return self.mode != "simulate"

    def to_dict(self) -> dict[str, Any]:
        """The flat JSON object."""
        return asdict(self)
