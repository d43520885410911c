"""The correctness gate: the largest errors against fp64 that pass. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""The largest relative L2 error against fp64 that passes, by dtype."""
HEAD_FACTOR = 4
"""The tolerance of a single head, as a multiple of TOLERANCE."""


@dataclass(frozen=True, kw_only=True)
class GateErrors:
    """Relative L2 errors against fp64, by tensor; the same on all ranks. Empty where nothing was compared."""

    overall: Mapping[str, float] = field(default_factory=dict)
    worst_head: Mapping[str, float] = field(default_factory=dict)
    """The errors of the worst single head, or of the parameters of a model. They show one wrong block among many."""
    factor: float = 1.0
    """The tolerance as a multiple of that of one attention."""

    def wrong(self, dtype: str) -> str:
        """The errors above the dtype's tolerance as a text; empty if there are none. NaN counts as above."""
        most = self.factor * TOLERANCE[dtype]
        limits = ((self.overall, most), (self.worst_head, HEAD_FACTOR * most))
        return ", ".join(
            f"{name} is off by {error:.1e} (at most {limit:.0e})"
            for errors, limit in limits
            for name, error in errors.items()
            if not error <= limit
        )
