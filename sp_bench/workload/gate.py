"""The correctness gate: the largest errors against fp64 that pass. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""The largest relative L2 error against fp64 that passes on any inputs, by dtype: 1.3 to 17 of its roundings."""
HEAD_FACTOR = 4
"""The tolerance of a single head, as a multiple of that of all."""
WELL_CONDITIONED = 3.0
"""Up to so many roundings of its own size a result has in any attention. Where cancellation makes it more, as in dq of
a few tokens whose probabilities are near 1, no dtype can give more, and the tolerance grows by the same."""


@dataclass(frozen=True, kw_only=True)
class GateErrors:
    """Relative L2 errors against fp64, by tensor; the same on all ranks. Empty where nothing was compared."""

    overall: Mapping[str, float] = field(default_factory=dict)
    worst_head: Mapping[str, float] = field(default_factory=dict)
    """The errors of the worst single head, or of the parameters of a model. They show one wrong block among many."""
    condition: Mapping[str, float] = field(default_factory=dict)
    """The error that roundings make over the dtype's unit roundoff and the result's norm, by tensor, where known."""
    worst_condition: Mapping[str, float] = field(default_factory=dict)
    """The same of the worst head."""
    factor: float = 1.0
    """The tolerance as a multiple of that of one attention."""
    seqlen: int | None = None
    """The length of the sequence on which they were found."""
    rows: tuple[int, int] | None = None
    """The rows of queries and of keys that were compared, summed over heads; None if they aren't counted."""

    def wrong(self, dtype: str) -> str:
        """The errors above the dtype's tolerance as a text; empty if there are none. NaN counts as above."""
        most = self.factor * TOLERANCE[dtype]
        found = [
            (name, error, limit)
            for errors, conditions, usual in (
                (self.overall, self.condition, most),
                (self.worst_head, self.worst_condition, HEAD_FACTOR * most),
            )
            for name, error in errors.items()
            for limit in [usual * _beyond(conditions.get(name, 1.0))]
            if not error <= limit
        ]
        text = ", ".join(f"{name} is off by {error:.1e} (at most {limit:.0e})" for name, error, limit in found)
        return text + (f", at {self.seqlen} tokens" if found and self.seqlen else "")


def _beyond(condition: float) -> float:
    """What a tolerance is multiplied by; 1 if the result is well conditioned, or where it is nothing but roundings."""
    return condition if WELL_CONDITIONED < condition < math.inf else 1.0
