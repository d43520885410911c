"""Nonlinear least squares in a few positive parameters (Levenberg-Marquardt), with the errors of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

STEP, MAX_MOVE, MAX_ROUNDS, TRIES = 0.02, 0.5, 20, 6
SETTLED = 1e-5
"""The fit ends with a round that lowers the sum of squares by less than this."""


@dataclass(frozen=True, eq=False)
class Fit:
    """A minimum of the sum of squares, with the slopes there."""

    values: Mapping[str, float]
    residuals: np.ndarray
    """Residuals at the minimum: (m,)."""
    slopes: np.ndarray
    """The derivative of each residual by the logarithm of each parameter: (m, k)."""

    @property
    def squares(self) -> float:
        return float(self.residuals @ self.residuals)

    @property
    def aicc(self) -> float:
        """Akaike's information criterion for small samples; less is better, differences below 2 say little."""
        m, k = self.slopes.shape
        k += 1  # the variance is estimated too
        return m * math.log(self.squares / m) + 2 * k + 2 * k * (k + 1) / (m - k - 1)

    @property
    def left_out_rms(self) -> float:
        """The rms error on each point if only the others were fitted, to first order in the slopes."""
        leverage = np.einsum("ij,jk,ik->i", self.slopes, np.linalg.pinv(self.slopes.T @ self.slopes), self.slopes)
        return float(np.sqrt(np.mean((self.residuals / (1 - leverage)) ** 2)))

    @property
    def spread(self) -> dict[str, float]:
        """Each parameter's relative standard error; inf where the data don't depend on it."""
        m, k = self.slopes.shape
        seen = np.abs(self.slopes).max(axis=0) > 1e-6
        covariance = np.linalg.pinv(self.slopes.T @ self.slopes) * self.squares / (m - k)
        return {name: float(np.sqrt(covariance[i, i])) if seen[i] else math.inf for i, name in enumerate(self.values)}

    @property
    def correlation(self) -> np.ndarray:
        """The correlations of the parameters' errors: (k, k)."""
        covariance = np.linalg.pinv(self.slopes.T @ self.slopes)
        scale = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
        return covariance / np.outer(scale, scale)


def fit(
    residuals: Callable[[Mapping[str, float]], np.ndarray],
    start: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
) -> Fit:
    """Minimise the residuals in the parameters' logarithms, from `start`, within `bounds`. Deterministic."""
    names = tuple(start)
    low, high = (np.log([bounds[name][side] for name in names]) for side in (0, 1))

    def at(x: np.ndarray) -> np.ndarray:
        return residuals(dict(zip(names, np.exp(x).tolist(), strict=True)))

    def slopes_at(x: np.ndarray, moved_residuals: np.ndarray) -> np.ndarray:
        # Towards the inside, so that no bound is crossed.
        steps = np.where(x + STEP > high, -STEP, STEP)
        return np.stack(
            [(at(x + step * e) - moved_residuals) / step for step, e in zip(steps, np.eye(x.size), strict=True)], 1
        )

    x = np.log(list(start.values()))
    at_x, damping = at(x), 0.01
    slopes = slopes_at(x, at_x)
    for _ in range(MAX_ROUNDS):
        before = at_x @ at_x
        squared = slopes.T @ slopes
        for _ in range(TRIES):
            damped = squared + damping * np.diag(np.diag(squared) + 1e-4)
            move = np.clip(-np.linalg.solve(damped, slopes.T @ at_x), -MAX_MOVE, MAX_MOVE)
            moved = np.clip(x + move, low, high)
            moved_residuals = at(moved)
            if moved_residuals @ moved_residuals < before:
                x, at_x, damping = moved, moved_residuals, damping * 0.3
                slopes = slopes_at(x, at_x)
                break
            damping = max(4 * damping, 0.02)
        if before - at_x @ at_x < SETTLED:
            break
    return Fit(dict(zip(names, np.exp(x).tolist(), strict=True)), at_x, slopes)
