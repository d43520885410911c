"""What a record says of one benchmark point."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA_VERSION = 3
STATUSES = ("ok", "oom", "unsupported", "incorrect", "timeout", "failed")
MODES = ("measure", "alone", "simulate")


@dataclass(kw_only=True)
class Record:
    """One benchmark point: what was asked, what came out, and where it comes from. None is "not known"."""

    run_id: str
    """Hash of the resolved config, the code version and, if measured, the machine."""
    status: str
    mode: str
    """measure, alone (single ranks without their peers) or simulate; their numbers are never mixed."""
    method: str
    gpus: int
    seqlen: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: str
    wire_dtype: str
    phase: str
    cluster: str
    schema_version: int = SCHEMA_VERSION
    error: str | None = None
    impl: str | None = None
    """With method=peer, whose code ran."""
    layout: str | None = None
    tile_a: int | None = None
    tile_b: int | None = None
    variant: str | None = None
    """Which of the method's variants ran, where it has several: its tile, ring or group sizes."""
    nodes: int | None = None
    kernel: str | None = None
    device_name: str | None = None
    seed: int | None = None
    iters: int | None = None
    warmup: int | None = None

    step_ms_median: float | None = None
    step_ms_p25: float | None = None
    step_ms_p75: float | None = None
    step_ms_ci95_low: float | None = None
    step_ms_ci95_high: float | None = None
    forward_ms_median: float | None = None
    backward_ms_median: float | None = None
    iters_per_s: float | None = None
    tokens_per_s: float | None = None
    tflops_per_gpu: float | None = None
    """Model FLOPs: causal counts half, backward 2.5 times forward."""
    mfu: float | None = None
    """None where the device's peak is not known."""

    comm_bytes_per_gpu: float | None = None
    """Sent, counted, the mean over the GPUs: from the tensors handed to the network if measured, else from the plan."""
    comm_bytes_busiest_gpu: int | None = None
    """Of the GPU that sends most."""
    comm_bytes_expected: float | None = None
    """The method's closed form."""
    comm_bytes_lower_bound: float | None = None
    """Payload that no method can go below which splits the heads as this one does (account.lower_bound_bytes)."""
    comm_bytes_statistics: float | None = None
    """The part of comm_bytes_per_gpu that is lse, which the papers leave out."""
    comm_bytes_by_lane: dict[str, float] | None = None
    """comm_bytes_per_gpu by phase, lane, tensor and field."""
    comm_bytes_across_nodes_max: int | None = None
    """Of the rank that sends most to other nodes."""
    comm_bytes_by_link: dict[str, float] | None = None
    """Bytes that cross links of each class (port, nic, ...) in one step, over the number of GPUs."""
    interface_bytes_per_gpu: float | None = None
    """Measured on shaped hosts: what their links' counters say was sent, headers included; hosts' sum over the GPUs."""
    bound_ms: float | None = None
    """What the step takes at least on that cluster: each phase its blocks, or its busiest link, or its latencies."""
    bound_by: str | None = None
    """What sets most of it: compute, latency, or a class of links."""
    compute_ms: float | None = None
    """Blocks and folds of the busiest rank in one step; on shared cores this includes waiting for a core."""
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
    """Measured: in block kernels, of the rank that has most of them in one step."""
    folds_ms: float | None = None
    """Measured: in folds, of the rank that has most of them in one step."""
    interpreter_ms: float | None = None
    """Measured: on a CPU what blocks take beside kernels and folds; on a GPU all that it takes to queue a step."""
    alone_ranks: list[int] | None = None
    """Of mode=alone: the ranks that were executed, each without its peers, receiving copies of what it sent."""
    alone_ms_median: float | None = None
    """Of the slowest of alone_ranks, forward + backward, with those copies. Not a step of so many GPUs."""
    rank_step_ms_min: float | None = None
    """Measured: the median of each rank's own steps, of the rank with the shortest."""
    rank_step_ms_max: float | None = None
    peak_mem_bytes_max: int | None = None
    """What a rank holds at most for the attention: inputs, buffers, accumulators, results."""
    peak_mem_bytes_min: int | None = None
    """Of the rank with least, where memory is measured."""
    peak_mem_source: str | None = None
    """What these two are: computed from the plans, of which tensors they are the sum, or what an allocator says."""
    peak_mem_bytes_expected: int | None = None
    """Computed from the plans, for lanes as late as the waits allow (account.peak_bytes)."""
    peak_rss_growth_bytes_max: int | None = None
    """Measured on CPU: how much a rank's resident memory grew, from before its inputs to its peak in the first step."""
    peak_rss_growth_bytes_min: int | None = None
    rank_idle_ms_max: float | None = None
    """Of a simulated step: how long the first rank to end waits for the last one, over the phases."""
    rank_imbalance: float | None = None
    """Blocks and folds of the busiest rank over the mean of all."""
    err_out: float | None = None
    """Relative L2 error against fp64, of the scaled-down problem of the correctness gate; so for the gradients."""
    err_dq: float | None = None
    err_dk: float | None = None
    err_dv: float | None = None
    candidates: list[dict[str, Any]] | None = None
    """Where an option was auto: every variant with its simulated or bounded time."""
    stragglers: dict[str, Any] | None = None
    """Slow ranks, slow links and noise that were simulated."""
    notes: list[str] | None = None
    """What a reader must know about these numbers."""
    config: dict[str, Any] | None = None
    """All that was asked for, resolved: what `--cfg` prints."""
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status}: must be one of {', '.join(STATUSES)}")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode}: must be one of {', '.join(MODES)}")

    @property
    def measured(self) -> bool:
        """Whether its times are wall time, of a whole run or of ranks alone."""
        return self.mode != "simulate"

    def to_dict(self) -> dict[str, Any]:
        """The flat JSON object."""
        return asdict(self)
