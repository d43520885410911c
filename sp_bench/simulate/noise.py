"""Noise from one block or message to the next, drawn by a seed."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np


class Noise:
    """Factors around 1 with that relative standard deviation."""

    def __init__(self, jitter: float, seed: int) -> None:
        self.variance, self._seed = math.log(1 + jitter**2), seed

    @cached_property
    def generator(self) -> np.random.Generator:
        """The generator, made when it is first asked for: numpy.random is loaded for it."""
        return np.random.default_rng(self._seed)

    def __call__(self, size: int) -> np.ndarray | float:
        return log_normal(self.generator, self.variance, size) if self.variance else 1.0


def log_normal(generator: np.random.Generator, variance: np.ndarray | float, size: int) -> np.ndarray:
    """Numbers with a mean of 1 whose logarithms have that variance."""
    return np.exp(generator.normal(-variance / 2, np.sqrt(variance), size))
