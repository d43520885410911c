"""The correctness gate: the largest errors against fp64 that pass. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""The largest relative L2 error against fp64 that passes on any inputs, by dtype: 1.3 to 17 of its roundings."""
HEAD_FACTOR = 4
"""The tolerance of a single head, as a multiple of that of all."""
OF_ROUNDINGS = 10
"""Up to so many times its limit an error may be of roundings alone: those of thousands of hops."""
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The largest relative error of one rounding, by dtype."""


@dataclass(frozen=True, kw_only=True)
class GateErrors:
    """Relative L2 errors against fp64, by tensor; the same on all ranks. Empty where nothing was compared."""

    overall: Mapping[str, float] = field(default_factory=dict)
    worst_head: Mapping[str, float] = field(default_factory=dict)
    """The errors of the worst single head, or of the parameters of a model. They show one wrong block among many."""
    rounding: Mapping[str, float] = field(default_factory=dict)
    """The most that roundings alone can make of an error, in unit roundoffs, by tensor; where that is known. It is more
    than the tolerance where cancellation leaves little of a result and few rows count, as in dq of a few tokens."""
    worst_rounding: Mapping[str, float] = field(default_factory=dict)
    """The same of the worst head."""
    factor: float = 1.0
    """The tolerance as a multiple of that of one attention."""
    seqlen: int | None = None
    """The length of the sequence on which they were found."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Rows of each tensor that have little to do with the exact ones, summed over heads (exact_rows.LOST)."""
    rows: tuple[int, int] | None = None
    """The rows of queries and of keys that were compared, summed over heads; None if they aren't counted."""
    uncompared: str = ""
    """Why nothing could be compared that should have been; empty otherwise."""

    def limit(self, name: str, dtype: str) -> float:
        """The largest error of a tensor that passes."""
        return max(self.factor * TOLERANCE[dtype], UNIT_ROUNDOFF[dtype] * self.rounding.get(name, 0.0))

    def may_be_rounding(self, dtype: str) -> bool:
        """Whether errors are above their limits, none by more than OF_ROUNDINGS times, and no row is lost."""
        close = all(error <= OF_ROUNDINGS * most for _, error, most in self._limits(dtype))
        return bool(self.wrong(dtype)) and close and not any(self.lost.values())

    def wrong(self, dtype: str) -> str:
        """The errors above their limits as a text; empty if there are none. NaN counts as above."""
        too_large = [(name, error, most) for name, error, most in self._limits(dtype) if not error <= most]
        said = [f"{name} is off by {error:.1e} (at most {most:.0e})" for name, error, most in too_large]
        said += [f"{count} rows of {name} are wrong" for name, count in self.lost.items() if count]
        return ", ".join(said) + (f", at {self.seqlen} tokens" if said and self.seqlen else "")

    def _limits(self, dtype: str) -> Iterator[tuple[str, float, float]]:
        """Each error with its tensor and the largest that passes, those of worst heads last."""
        for name, error in self.overall.items():
            yield name, error, self.limit(name, dtype)
        of_a_head = HEAD_FACTOR * self.factor * TOLERANCE[dtype]
        for name, error in self.worst_head.items():
            yield name, error, max(of_a_head, UNIT_ROUNDOFF[dtype] * self.worst_rounding.get(name, 0.0))


def worst_of(several: Sequence[GateErrors], dtype: str, seqlen: int) -> GateErrors:
    """The errors of one of several attentions of a step: one that is wrong, else not compared, else off most.

    It has the rows of all, and `seqlen`, the tokens of all of them. Raises ValueError if there are none.
    """

    def badness(one: GateErrors) -> tuple[bool, bool, float]:
        shares = [error / one.limit(name, dtype) for name, error in one.overall.items()]
        return bool(one.wrong(dtype)), bool(one.uncompared), max(shares, default=0.0)

    compared = [one.rows for one in several if one.rows]
    rows = (sum(each[0] for each in compared), sum(each[1] for each in compared)) if compared else None
    return replace(max(several, key=badness), rows=rows, seqlen=seqlen)
