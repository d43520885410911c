"""What differs from one block or message to the next by chance, drawn by a seed."""

from __future__ import annotations

import math

import numpy as np

from sp_bench.plan import PHASES


class Noise:
    """Factors around 1 with that relative standard deviation."""

    def __init__(self, jitter: float, seed: int) -> None:
        self.variance = math.log(1 + jitter**2)
        self.generator = np.random.default_rng(seed)

    def __call__(self, size: int) -> np.ndarray | float:
        return _log_normal(self.generator, self.variance, size) if self.variance else 1.0


class Turns:
    """Shares of crowded cores that differ from block to block, since Linux hands cores over in turns.

    A block of w seconds has w / turn_s of them: what it gets of the cores has a relative standard deviation of
    sqrt(turn_s / w), and of 1 where it is shorter than a turn. All of them together get the same.
    """

    def __init__(self, turn_s: float, seed: int, phase: str) -> None:
        self.turn_s = turn_s
        self.generator = np.random.default_rng([seed, 1 + PHASES.index(phase)])

    def __call__(self, work_s: np.ndarray) -> np.ndarray | float:
        """Weights around 1 of blocks with so much work each."""
        if not self.turn_s:
            return 1.0
        variance = np.log1p(self.turn_s / np.maximum(work_s, self.turn_s))
        return _log_normal(self.generator, variance, work_s.size)


class Shares:
    """What messages get of a link that they share: queues let some go ahead of others, by about so many bytes.

    A message of b bytes gets shares whose logarithms have a standard deviation of ahead_bytes / b, and of 1 where it is
    shorter than that. One that has a link for itself gets all of it. Cores that messages have to themselves, since
    blocks leave them, are shared so too.
    """

    def __init__(self, ahead_bytes: float, seed: int, phase: str) -> None:
        self.ahead_bytes = ahead_bytes
        self.generator = np.random.default_rng([seed, 1 + len(PHASES) + PHASES.index(phase)])

    def __call__(self, sent: np.ndarray) -> np.ndarray | float:
        """Weights around 1 of messages of so many bytes."""
        if not self.ahead_bytes:
            return 1.0
        variance = (self.ahead_bytes / np.maximum(sent, self.ahead_bytes)) ** 2
        return _log_normal(self.generator, variance, sent.size)


def _log_normal(generator: np.random.Generator, variance: np.ndarray | float, size: int) -> np.ndarray:
    """Numbers with a mean of 1 whose logarithms have that variance."""
    return np.exp(generator.normal(-variance / 2, np.sqrt(variance), size))
