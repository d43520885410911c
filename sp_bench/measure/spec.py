"""What ranks are asked and what they answer; imports no torch, so that the process which asks needn't."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sp_bench.measure.samples import Samples
from sp_bench.workload import GateErrors, Workload


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One point as the ranks need it."""

    workload: Workload
    verify: bool
    """Whether the correctness gate runs before any timing."""
    parts: bool
    """Whether to time blocks alone and transfers alone too."""


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """The most memory that one step took on a rank, in bytes."""

    live_bytes: int = 0
    """The executor's tensors together: inputs, buffers, accumulators, results; 0 of a peer's code."""
    grown_bytes: int = 0
    """On a CPU: how much resident memory grew from before the point's inputs to its peak in the first step."""
    device_bytes: int = 0
    """On a GPU: the same of what torch's allocator had given out."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank saw of one point. Only `gate` is there of a point that has failed it."""

    gate: GateErrors = field(default_factory=GateErrors)
    samples: Samples = field(default_factory=lambda: Samples.of([]))
    """Of the timed iterations, counted from when this rank began (`Samples.from_first_start`)."""
    memory: MemoryPeak = field(default_factory=MemoryPeak)
    sent_bytes: Mapping[str, Counter[tuple[str, ...]]] = field(default_factory=dict)
    """In one iteration, by phase, then by lane, tensor and field, or by operation where a peer's code ran."""
    link_sent_bytes: tuple[int, ...] = ()
    """What the rank's emulated host sent over its link in each iteration, headers and barriers included."""
    finite: bool = True
    """Whether the results of the last timed iteration are finite."""
    kernel: str = ""
    device: Mapping[str, str] = field(default_factory=dict)
    """The rank's device by name, and the versions of what drives it."""
    machine: str = ""
    """Which machine it is on: its kernel's boot id."""

    def wrong(self, dtype: str) -> str:
        """Why the numbers can't be trusted; empty if they can."""
        return self.gate.wrong(dtype) or ("" if self.finite else "a timed result is not finite")
