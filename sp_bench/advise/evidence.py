"""How far simulated times can be trusted, from what was measured (docs/results/validation.csv)."""

from __future__ import annotations

from dataclasses import dataclass

POINTS = 61
"""Points that were measured and simulated: 4 and 8 CPU ranks over shaped links."""
USUAL_ERROR = 0.058
"""The error of a step, simulated / measured - 1, that nine of ten of them stay below."""
LARGEST_ERROR = 0.14
"""The largest of them."""
MEASURED_CLUSTERS = ("box", "local", "shaped", "cpu_local")
"""Clusters that points were measured on. Steps on others were never measured by this suite."""


@dataclass(frozen=True)
class Interval:
    """A simulated time with what its error may be, in ms."""

    low_ms: float
    step_ms: float
    high_ms: float

    def overlaps(self, other: Interval) -> bool:
        """Whether the two could be in either order."""
        return self.low_ms <= other.high_ms and other.low_ms <= self.high_ms


def interval(step_ms: float) -> Interval:
    """What would be measured with an error that nine of ten points stay below."""
    return Interval(step_ms / (1 + USUAL_ERROR), step_ms, step_ms / (1 - USUAL_ERROR))


def is_measured(cluster: str) -> bool:
    """Whether steps were measured on the cluster."""
    return cluster in MEASURED_CLUSTERS


def backing(cluster: str, figures: str) -> str:
    """In words, what backs times on a cluster. `figures` says where its kernel rates are from."""
    seen = f"{POINTS} steps measured on 4 and 8 CPU ranks over shaped links: nine of ten were within "
    seen += f"{USUAL_ERROR:.1%} of the simulated time, the worst was {LARGEST_ERROR:.0%} off"
    if is_measured(cluster):
        return seen
    return (
        f"{seen}. No step was measured on {cluster}, whose kernel rates are {figures}: measure the first two yourself"
    )
