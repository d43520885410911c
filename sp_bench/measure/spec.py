"""What ranks are told and what they answer; imports no torch, so that the process which asks needn't."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sp_bench.plan import Plan, Problem

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""Relative L2 error against fp64 that the gate lets through, by dtype."""
HEAD_FACTOR = 4
"""A single head may be off by so many times as much."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One point as the ranks need it."""

    plans: dict[str, Plan]
    """By phase: forward, or forward and backward. The gate runs the same ones on its small problem."""
    problem: Problem
    kernel: str
    verify: bool
    seed: int


@dataclass(kw_only=True)
class Measured:
    """What one rank saw of one point. Times in seconds, one for each timed iteration."""

    errors: dict[str, float] = field(default_factory=dict)
    """Of the gate, by tensor: relative L2 over everything; the same on all ranks."""
    worst_head_errors: dict[str, float] = field(default_factory=dict)
    """The same over the worst single head, so that one wrong block among many shows."""
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    blocks_s: list[float] = field(default_factory=list)
    """In blocks and folds."""
    waits_s: list[float] = field(default_factory=list)
    """Waiting for transfers."""
    sent_bytes: dict[str, Counter[tuple[str, str, str]]] = field(default_factory=dict)
    """In one iteration, by phase."""
    finite: bool = True
    """Whether the results of the last timed iteration are finite."""
    kernel: str = ""

    def wrong(self, dtype: str) -> str:
        """What the gate has against it; empty if it passes. NaN does not."""
        limits = ((self.errors, TOLERANCE[dtype]), (self.worst_head_errors, HEAD_FACTOR * TOLERANCE[dtype]))
        found = [
            f"{name} is off by {error:.1e} (at most {limit:.0e})"
            for errors, limit in limits
            for name, error in errors.items()
            if not error <= limit
        ]
        return ", ".join(found) or ("" if self.finite else "a timed result is not finite")
