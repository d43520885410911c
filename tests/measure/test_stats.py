"""Statistics of samples."""

from __future__ import annotations

import numpy as np
import pytest

from sp_bench.measure.stats import summarise


def test_summary_of_a_known_set() -> None:
    found = summarise(np.array([5.0, 1.0, 4.0, 2.0, 3.0]))
    assert (found.p25, found.median, found.p75) == (2.0, 3.0, 4.0)
    assert 1.0 <= found.ci95_low <= 3.0 <= found.ci95_high <= 5.0


def test_equal_samples_have_no_spread_and_the_same_seed_the_same_interval() -> None:
    assert summarise(np.full(7, 2.5)).ci95_low == summarise(np.full(7, 2.5)).ci95_high == 2.5
    samples = np.random.default_rng(1).normal(size=30)
    assert summarise(samples, 3) == summarise(samples, 3)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    intervals = [summarise(generator.exponential(size=25), seed) for seed in range(200)]
    covered = sum(i.ci95_low <= np.log(2) <= i.ci95_high for i in intervals) / 200
    assert 0.88 <= covered <= 0.995


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarise(np.array([]))
