"""The parts that a record is composed of. None is "not known"; times in ms, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for, as far as resolved."""

    workload: str
    """What is timed."""
    method: str
    impl: str | None = None
    """With method=peer, whose code ran."""
    gpus: int
    seqlen: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str = ""
    """Which keys a query sees: causal or full. Follows from `causal` in files that lack it."""
    causal: bool
    """Whether the mask is the causal one."""
    dtype: str
    wire_dtype: str
    phase: str
    cluster: str
    seed: int | None = None
    iters: int | None = None
    warmup: int | None = None
    stragglers: dict[str, Any] | None = None
    """Slow ranks, slow links and noise that were simulated."""
    config: dict[str, Any] | None = None
    """All that was asked for, resolved: what `--cfg` prints."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What ran, and on what."""

    layout: str | None = None
    tile_a: int | None = None
    tile_b: int | None = None
    variant: str | None = None
    """Which of the method's variants, where it has several: its tile, ring or group sizes."""
    nodes: int | None = None
    kernel: str | None = None
    device_name: str | None = None
    alone_ranks: list[int] | None = None
    """Of mode=alone: the ranks that were executed, each without its peers, receiving copies of what it sent."""
    candidates: list[dict[str, Any]] | None = None
    """Where an option was auto: every variant with its simulated or bounded time."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a step takes: the slowest rank's phases, over iterations."""

    step_ms_median: float | None = None
    step_ms_p25: float | None = None
    step_ms_p75: float | None = None
    step_ms_ci95_low: float | None = None
    step_ms_ci95_high: float | None = None
    forward_ms_median: float | None = None
    backward_ms_median: float | None = None
    rank_step_ms_min: float | None = None
    """Measured: the median of each rank's own steps, of the rank with the shortest."""
    rank_step_ms_max: float | None = None
    alone_ms_median: float | None = None
    """Of the slowest of alone_ranks, its phases together, with copies for transfers. Not a step of so many GPUs."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Throughput of the median step."""

    iters_per_s: float | None = None
    tokens_per_s: float | None = None
    tflops_per_gpu: float | None = None
    """Model FLOPs: causal counts half, backward 2.5 times forward."""
    mfu: float | None = None
    """None where the device's peak is not known."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the GPUs send in one step."""

    comm_bytes_per_gpu: float | None = None
    """Counted, the mean over the GPUs: from the tensors handed to the network if measured, else from the plan."""
    comm_bytes_busiest_gpu: int | None = None
    """Of the GPU that sends most."""
    comm_bytes_expected: float | None = None
    """The method's closed form."""
    comm_bytes_lower_bound: float | None = None
    """The least payload of any method with the same head split (account.lower_bound_bytes)."""
    comm_bytes_statistics: float | None = None
    """The part of comm_bytes_per_gpu that is lse, which the papers leave out."""
    comm_bytes_by_lane: dict[str, float] | None = None
    """comm_bytes_per_gpu by phase, lane, tensor and field."""
    comm_bytes_across_nodes_max: int | None = None
    """Of the rank that sends most to other nodes."""
    comm_bytes_by_link: dict[str, float] | None = None
    """Bytes that cross links of each class (port, nic, ...), over the number of GPUs."""
    interface_bytes_per_gpu: float | None = None
    """Measured on emulated hosts: what their links' counters say was sent, headers included; hosts' sum over the
    GPUs."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """What a step is made of."""

    bound_ms: float | None = None
    """What the step takes at least on that cluster: each phase its blocks, or its busiest link, or its latencies."""
    bound_by: str | None = None
    """What sets most of it: compute, latency, or a class of links."""
    compute_ms: float | None = None
    """Blocks and folds of the busiest rank; on shared cores this includes waiting for a core."""
    compute_only_ms_median: float | None = None
    """Measured: the same plans without their transfers, in turn with the step; of each phase the slowest rank's time,
    or of alone_ranks the time of the slowest one's phases together."""
    compute_only_forward_ms_median: float | None = None
    """Of its forward; None of alone_ranks."""
    compute_only_backward_ms_median: float | None = None
    communication_only_ms_median: float | None = None
    """The same plans without their blocks."""
    communication_only_forward_ms_median: float | None = None
    communication_only_backward_ms_median: float | None = None
    core_ms_mean: float | None = None
    """Measured on CPUs: how long cores of all the ranks' machines were busy in one step, added up, with whatever, and
    with the barriers around it. Kernels count in ticks of 10 ms, so that short steps mean nothing."""
    compute_only_core_ms_mean: float | None = None
    """The same in the plans without their transfers."""
    communication_only_core_ms_mean: float | None = None
    """The same in the plans without their blocks."""
    exposed_comm_ms: float | None = None
    """The step less compute_only_ms_median or, where that was not measured, less compute_ms."""
    kernels_ms: float | None = None
    """Measured: in block kernels, of the rank that has most of them."""
    folds_ms: float | None = None
    """Measured: in folds, of the rank that has most of them."""
    interpreter_ms: float | None = None
    """Measured: on a CPU what blocks take beside kernels and folds; on a GPU all that it takes to queue a step."""
    rank_idle_ms_max: float | None = None
    """Simulated: how long the first rank to end waits for the last one, over the phases."""
    rank_imbalance: float | None = None
    """Blocks and folds of the busiest rank over the mean of all."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a rank holds for the attention."""

    peak_mem_bytes_max: int | None = None
    """At most: inputs, buffers, accumulators, results."""
    peak_mem_bytes_min: int | None = None
    """Of the rank with least, where memory is measured."""
    peak_mem_source: str | None = None
    """What these two are: computed from the plans, of which tensors they are the sum, or what an allocator says."""
    peak_mem_bytes_expected: int | None = None
    """Computed from the plans, for lanes as late as the waits allow (account.peak_bytes)."""
    peak_rss_growth_bytes_max: int | None = None
    """Measured on CPU: how much a rank's resident memory grew, from before its inputs to its peak in the first step."""
    peak_rss_growth_bytes_min: int | None = None


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """Relative L2 errors against fp64, of the scaled-down problem of the correctness gate."""

    err_out: float | None = None
    err_dq: float | None = None
    err_dk: float | None = None
    err_dv: float | None = None
