"""What ranks are told and what they answer; imports no torch, so that the process which asks needn't."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sp_bench.plan import CostProfile, Method, Problem

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""Relative L2 error against fp64 that the gate lets through, by dtype."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One point as the ranks need it."""

    method: Method
    problem: Problem
    costs: CostProfile
    kernel: str
    backward: bool
    verify: bool
    seed: int


@dataclass(kw_only=True)
class Measured:
    """What one rank saw of one point. Times in seconds, one for each timed iteration."""

    errors: dict[str, float] = field(default_factory=dict)
    """Of the gate, by tensor; the same on all ranks."""
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    blocks_s: list[float] = field(default_factory=list)
    """In blocks and folds."""
    waits_s: list[float] = field(default_factory=list)
    """Waiting for transfers."""
    sent_bytes: dict[str, Counter[tuple[str, str, str]]] = field(default_factory=dict)
    """In one iteration, by phase."""
    kernel: str = ""
    peak_rss_bytes: int = 0

    def passes(self, dtype: str) -> bool:
        """Whether the gate lets it through; NaN does not."""
        return all(error <= TOLERANCE[dtype] for error in self.errors.values())
