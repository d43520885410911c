"""What ranks are told and what they answer; imports no torch, so that the process which asks needn't."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sp_bench.peers.peer import Peer
from sp_bench.plan import PHASES, Plan, Problem

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""Relative L2 error against fp64 that the gate lets through, by dtype."""
HEAD_FACTOR = 4
"""A single head may be off by so many times as much."""
TIMES = tuple(f"{part}{phase}_s" for part in ("", "compute_only_", "communication_only_") for phase in PHASES)
"""Of a rank in one phase, from the common start of all to its own end."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One point as the ranks need it."""

    phases: tuple[str, ...]
    """forward, or forward and backward."""
    plans: Mapping[str, Plan]
    """By phase; the gate runs the same ones on its small problem. Empty where a peer's code runs."""
    peer: Peer | None
    problem: Problem
    """As the plans' method, or the peer, deals it out."""
    kernel: str
    verify: bool
    parts: bool
    """Whether to time blocks alone and transfers alone too."""
    seed: int
    alone: int | None = None
    """The rank whose plans this one process executes without its peers, getting copies of what it sends."""


@dataclass(kw_only=True)
class Measured:
    """What one rank saw of one point. Times in seconds, one for each timed iteration; 0 of a phase that is not done.

    Those of TIMES count from when this rank began; `from_first_start` makes them count from when the first one did.
    """

    errors: dict[str, float] = field(default_factory=dict)
    """Of the gate, by tensor: relative L2 over everything; the same on all ranks."""
    worst_head_errors: dict[str, float] = field(default_factory=dict)
    """The same over the worst single head, so that one wrong block among many shows."""
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    compute_only_forward_s: list[float] = field(default_factory=list)
    """Of the same plan without its transfers."""
    compute_only_backward_s: list[float] = field(default_factory=list)
    communication_only_forward_s: list[float] = field(default_factory=list)
    """Of the same plan without its blocks."""
    communication_only_backward_s: list[float] = field(default_factory=list)
    began_s: dict[str, list[float]] = field(default_factory=dict)
    """When each time of TIMES began, by a clock of the rank's machine; nothing of a GPU's time."""
    blocks_s: list[float] = field(default_factory=list)
    """In blocks and folds, of the step with everything."""
    waits_s: list[float] = field(default_factory=list)
    """Waiting for transfers, of the step with everything."""
    kernels_s: list[float] = field(default_factory=list)
    """In block kernels, of the step with everything."""
    folds_s: list[float] = field(default_factory=list)
    """In folds, of the step with everything."""
    caller_s: list[float] = field(default_factory=list)
    """Of the thread that executes, in the step with everything: on a GPU, what it takes to queue it."""
    core_s: list[float] = field(default_factory=list)
    """That the cores of the rank's machine were busy, with whatever, in the step with everything and the barriers
    around it; empty on a GPU."""
    compute_only_core_s: list[float] = field(default_factory=list)
    """The same in the blocks alone."""
    communication_only_core_s: list[float] = field(default_factory=list)
    """The same in the transfers alone."""
    live_bytes: int = 0
    """The most that the executor's tensors took together in one step: inputs, buffers, accumulators, results."""
    grown_bytes: int = 0
    """How much the process's resident memory grew from before the point's inputs to its peak in the first step."""
    device_bytes: int = 0
    """The same of what torch's allocator had given out on the rank's GPU."""
    sent_bytes: dict[str, Counter[tuple[str, ...]]] = field(default_factory=dict)
    """In one iteration, by phase, then by lane, tensor and field, or by operation where a peer's code ran."""
    interface_sent_bytes: list[int] = field(default_factory=list)
    """What the rank's host sent over its link in each iteration, headers and barriers included; empty on no host."""
    finite: bool = True
    """Whether the results of the last timed iteration are finite."""
    kernel: str = ""
    device: dict[str, str] = field(default_factory=dict)
    """The rank's device by name, and the versions of what drives it."""
    machine: str = ""
    """Which machine it is on: its kernel's boot id."""

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


def from_first_start(ranks: Sequence[Measured]) -> None:
    """Make TIMES count from when the first rank on the same machine began.

    Where ranks share cores, one that a barrier lets go may still have to wait for its first turn on a core, while those
    that it shares it with are at their blocks: by its own clock it would be spared what it waited.
    """
    for machine in {rank.machine for rank in ranks}:
        here = [rank for rank in ranks if rank.machine == machine]
        for name in here[0].began_s:
            began = np.array([rank.began_s[name] for rank in here])  # by rank and iteration
            for rank, later in zip(here, began - began.min(axis=0), strict=True):
                setattr(rank, name, np.add(getattr(rank, name), later).tolist())
