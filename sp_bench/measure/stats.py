"""Statistics of samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sp_bench.measure.samples import Samples

RESAMPLES = 2000


@dataclass(frozen=True)
class Summary:
    """Median, quartiles, and the 95% bootstrap interval of the median, in the samples' unit."""

    median: float
    p25: float
    p75: float
    ci95_low: float
    ci95_high: float


def summarise(samples: np.ndarray, seed: int = 0) -> Summary:
    """The summary of at least one sample, (iterations,). Nothing is dropped. Raises ValueError if there is none."""
    if samples.size == 0:
        raise ValueError("no samples")
    resampled = np.random.default_rng(seed).choice(samples, (RESAMPLES, samples.size))
    low, high = np.percentile(np.median(resampled, axis=1), [2.5, 97.5])
    p25, median, p75 = np.percentile(samples, [25, 50, 75])
    return Summary(float(median), float(p25), float(p75), float(low), float(high))


def slowest_ms(samples: Samples, part: str, phase: str) -> np.ndarray:
    """The time of a phase in each iteration, (iterations,): the slowest rank's. All ranks start it together."""
    return 1e3 * samples.by_rank(part, phase).max(axis=0)


def rank_medians_ms(samples: Samples, part: str) -> np.ndarray:
    """Each rank's median over iterations of all phases together, (ranks,)."""
    return 1e3 * np.median(samples.by_rank(part), axis=1)
