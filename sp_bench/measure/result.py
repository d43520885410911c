"""The results of ranks that measure a point. Imports no torch: the asking process needs none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sp_bench.measure.gpu_watch import GpuLoad
from sp_bench.measure.samples import Samples
from sp_bench.workload import GateErrors


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """Peak memory of one step on a rank."""

    live_bytes: int = 0
    """All tensors of the executor: inputs, buffers, accumulators, results; 0 for a peer's code."""
    grown_bytes: int = 0
    """On a CPU: growth of resident memory from before the point's inputs to its peak in the first step."""
    device_bytes: int = 0
    """On a GPU: the same growth of memory given out by torch's allocator, and of what was made outside of it."""
    active_bytes: int = 0
    """On a GPU: the peak of what the allocator could not give out, as it was in use, or marked as used by a stream."""
    reserved_bytes: int = 0
    """On a GPU: the peak of what the allocator has taken of the GPU."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Bytes that are held, by kind (Step.memory); empty if the attention's tensors are all."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank's results of one point. A point that fails the correctness gate has only `gate`."""

    gate: GateErrors = field(default_factory=GateErrors)
    timed: GateErrors = field(default_factory=GateErrors)
    """Errors of rows sampled from what was timed."""
    samples: Samples = field(default_factory=lambda: Samples.of([]))
    """Samples of the timed iterations. Times count from when this rank began (`Samples.from_first_start`)."""
    memory: MemoryPeak = field(default_factory=MemoryPeak)
    sent_bytes: Mapping[str, Counter[tuple[str, ...]]] = field(default_factory=dict)
    """Bytes sent in one iteration: by phase, then by lane, tensor and field, or by operation for a peer's code."""
    link_sent_bytes: tuple[int, ...] = ()
    """Bytes that the rank's emulated host sent over its link in each iteration, including headers and barriers."""
    finite: bool = True
    """Whether the results of the last timed iteration are finite."""
    losses: tuple[float, ...] = ()
    """The loss of each complete iteration, untimed ones included; empty if nothing is trained."""
    kernel: str = ""
    lane_ctas: int | None = None
    """CTAs that one lane's transfers take of the GPU at most; None on a CPU, or for a peer."""
    sm_margin: int | None = None
    """SMs that block kernels leave free; None if they take all."""
    notes: tuple[str, ...] = ()
    """Notes on the kernels for a reader of the times."""
    communicators: tuple[str, ...] = ()
    """NCCL's communicators of the point, in words."""
    gpu: GpuLoad | None = None
    """Clocks and power of the rank's GPU while it was timed; None on a CPU, or without NVML."""
    device: Mapping[str, str] = field(default_factory=dict)
    """The rank's device and its software (devices.device_versions)."""
    machine: str = ""
    """The machine the rank is on: its kernel's boot id."""

    def wrong(self, dtype: str) -> str:
        """Why the results are incorrect; empty if they are correct."""
        if wrong := self.gate.wrong(dtype) or ("" if self.finite else "a timed result is not finite"):
            return wrong
        wrong = self.timed.wrong(dtype)
        return f"of what was timed, {wrong}" if wrong else ""
