"""The comparison of two times: their ratio, its 95% interval, and one of four verdicts.

If a relative difference up to s counts as none, the verdicts on the ratio B / A and its interval [low, high] are

    SAME        the interval is within [1 / (1 + s), 1 + s]
    FASTER      the interval is below 1, and the ratio below 1 / (1 + s)
    SLOWER      the interval is above 1, and the ratio above 1 + s
    AMBIGUOUS   anything else, and wherever there is no interval

Exactly one holds, and A against B is the mirror image of B against A. Numbers without noise have the ratio itself as
their interval, and are never AMBIGUOUS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sp_bench.measure.stats import RESAMPLES
from sp_bench.records.interval import FEWEST_ITERATIONS

SAME, FASTER, SLOWER, AMBIGUOUS = "SAME", "FASTER", "SLOWER", "AMBIGUOUS"
LESS, MORE = "LESS", "MORE"
OF_AMOUNTS = {SAME: SAME, FASTER: LESS, SLOWER: MORE, AMBIGUOUS: AMBIGUOUS}
"""The verdicts on quantities in bytes."""
ENOUGH_RUNS = 3
"""Runs of a point that say how far apart runs are."""
ROUNDING = 1e-9
"""The difference that counts as none between numbers without noise."""


@dataclass(frozen=True)
class Ratio:
    """The ratio B / A with its 95% interval; without an interval, `why` says the reason."""

    value: float
    low: float | None
    high: float | None
    why: str = ""

    @property
    def ends(self) -> str:
        """The interval as text behind the ratio; empty without one."""
        return "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"

    def verdict(self, same: float) -> str:
        """The verdict: SAME, FASTER, SLOWER or AMBIGUOUS. `same` is the s of the module's table."""
        if self.low is None or self.high is None:
            return AMBIGUOUS
        low, high = min(self.low, self.value), max(self.high, self.value)
        if 1 / (1 + same) <= low and high <= 1 + same:
            return SAME
        if high < 1 and self.value < 1 / (1 + same):
            return FASTER
        if low > 1 and self.value > 1 + same:
            return SLOWER
        return AMBIGUOUS


@dataclass(frozen=True)
class Row:
    """A quantity of a pair, in seconds or bytes. There is no ratio where one of them has no value."""

    quantity: str
    a: float | None
    b: float | None
    ratio: Ratio | None
    verdict: str


def exact(a: float, b: float) -> Ratio:
    """The ratio of numbers without noise; of two zeros it is 1."""
    value = b / a if a else 1.0 if b == a else math.inf
    return Ratio(value, value, value)


def of_medians(a: np.ndarray, b: np.ndarray, *, in_turn: bool, seed: int = 0) -> Ratio:
    """The ratio of the medians of iterations, (iterations,) each, with a bootstrap percentile interval.

    `in_turn` says that iteration i of both ran one after the other: they are resampled together, so that drift which
    both had cancels. Otherwise each is resampled by itself.
    """
    value = float(np.median(b) / np.median(a))
    if (fewest := min(a.size, b.size)) < FEWEST_ITERATIONS:
        return Ratio(value, None, None, f"{fewest} iterations say nothing of the spread: {FEWEST_ITERATIONS} would")
    random = np.random.default_rng(seed)
    of_a = random.integers(a.size, size=(RESAMPLES, a.size))
    of_b = of_a if in_turn and a.size == b.size else random.integers(b.size, size=(RESAMPLES, b.size))
    ratios = np.median(b[of_b], axis=1) / np.median(a[of_a], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(value, float(low), float(high))


def over_runs(a: np.ndarray, b: np.ndarray) -> Ratio:
    """The ratio of the medians of several runs, (runs,) each, with the interval of all ratios of one of each."""
    why = f"of {a.size} runs of A and {b.size} of B: the interval is that of all ratios of one of each"
    return Ratio(float(np.median(b) / np.median(a)), float(b.min() / a.max()), float(b.max() / a.min()), why)
