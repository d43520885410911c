"""The correctness gate: how far results may be from fp64. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""The largest relative L2 error against fp64 that passes, by dtype."""
HEAD_FACTOR = 4
"""A single head may be off by so many times as much."""


@dataclass(frozen=True, kw_only=True)
class GateErrors:
    """Relative L2 errors against fp64, by tensor; the same on all ranks. Empty where nothing was compared."""

    overall: Mapping[str, float] = field(default_factory=dict)
    worst_head: Mapping[str, float] = field(default_factory=dict)
    """Of the worst single head, so that one wrong block among many shows."""

    def wrong(self, dtype: str) -> str:
        """What is further off than the dtype allows; empty if nothing is. NaN is."""
        limits = ((self.overall, TOLERANCE[dtype]), (self.worst_head, HEAD_FACTOR * TOLERANCE[dtype]))
        return ", ".join(
            f"{name} is off by {error:.1e} (at most {limit:.0e})"
            for errors, limit in limits
            for name, error in errors.items()
            if not error <= limit
        )
