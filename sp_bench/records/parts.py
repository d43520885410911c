"""The parts that a record is composed of. None means not known. Times are in ms, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request, as far as it could be resolved."""

    workload: str
    """The operation that is timed."""
    method: str
    impl: str | None = None
    """With method=peer: the implementation that ran."""
    gpus: int
    seqlen: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str = ""
    """The name of the attention mask. Files without it get causal or full, by `causal`."""
    causal: bool
    """Whether a query sees keys up to its own position only; in a pack, inside each document."""
    documents: int | None = None
    """The number of packed documents."""
    longest_document: int | None = None
    """Tokens of the longest document."""
    window: list[int | None] | None = None
    """How many keys before and behind its own position a query sees; None for no limit."""
    dtype: str
    wire_dtype: str
    phase: str
    cluster: str
    seed: int | None = None
    iters: int | None = None
    warmup: int | None = None
    stragglers: dict[str, Any] | None = None
    """The simulated slow ranks, slow links and noise."""
    config: dict[str, Any] | None = None
    """The resolved config, as `--cfg` prints it."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The method's variant, and the hardware and software it ran on."""

    layout: str | None = None
    tile_a: int | None = None
    tile_b: int | None = None
    variant: str | None = None
    """The method's variant, if it has several: its tile, ring or group sizes."""
    nodes: int | None = None
    kernel: str | None = None
    sm_margin: int | None = None
    """Measured on GPUs: SMs that a persistent block kernel leaves to transfers; None if the kernel takes all."""
    lane_ctas: int | None = None
    """Measured on GPUs: the SMs that the transfers of one lane take at most."""
    transport: str | None = None
    """What carries the plan's transfers, and its options, such as `nccl, registered buffers`; None for a peer."""
    implementation: str | None = None
    """Simulated: whose code it stands for (conf/implementation)."""
    validation: str | None = None
    """Simulated: which measurements like it back its times, and how far from them simulations were (bench.backing)."""
    validation_error: float | None = None
    """Simulated: what two of three errors of that validation are within; None where nothing backs the times."""
    device_name: str | None = None
    alone_ranks: list[int] | None = None
    """With mode=alone: the ranks that were executed, each without its peers, receiving copies of what it sent."""
    work_imbalance: float | None = None
    """(query, key) pairs of the rank that computes most over the mean of all, from the first phase's plan."""
    work_imbalance_lower_bound: float | None = None
    """The least possible work_imbalance: above 1 only where documents are dealt whole."""
    candidates: list[dict[str, Any]] | None = None
    """If an option was auto: every variant with its simulated time, or a lower bound on it."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The time of a step: the sum of its phases, each as long as its slowest rank. Statistics are over iterations."""

    step_ms_median: float | None = None
    step_ms_p25: float | None = None
    step_ms_p75: float | None = None
    step_ms_ci95_low: float | None = None
    step_ms_ci95_high: float | None = None
    forward_ms_median: float | None = None
    backward_ms_median: float | None = None
    update_ms_median: float | None = None
    """The end of a training step: the summation of gradients over the ranks, and the optimizer."""
    rank_step_ms_min: float | None = None
    """Measured: the smallest of the ranks' own median steps."""
    rank_step_ms_max: float | None = None
    """Measured: the largest of the ranks' own median steps."""
    start_skew_ms_median: float | None = None
    """Measured on GPUs: how far apart ranks came to the barrier on their streams before a phase, which takes it out of
    the step; of the phase with most."""
    alone_ms_median: float | None = None
    """With mode=alone: the time of all phases of the slowest rank, with copies in place of transfers. It is no step."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Throughput of the median step."""

    iters_per_s: float | None = None
    tokens_per_s: float | None = None
    tflops_per_gpu: float | None = None
    """Model FLOPs: a causal mask counts half, a backward 2.5 times its forward."""
    mfu: float | None = None
    """Model FLOP utilisation; None if the device's peak is not known."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that the GPUs send in one step."""

    comm_bytes_per_gpu: float | None = None
    """The mean over the GPUs: counted from the tensors that were sent if measured, otherwise from the plan."""
    comm_bytes_busiest_gpu: int | None = None
    """The bytes of the GPU that sends most."""
    comm_bytes_expected: float | None = None
    """The value of the method's closed form; None with packed documents, which have none."""
    comm_bytes_lower_bound: float | None = None
    """The fewest payload bytes any method with the same head split can send (account.lower_bound_bytes)."""
    comm_bytes_least: float | None = None
    """The fewest payload bytes any method can send, however it splits heads (account.least_bytes); None for packs."""
    comm_bytes_statistics: float | None = None
    """The share of lse in comm_bytes_per_gpu. Papers leave it out."""
    comm_bytes_by_lane: dict[str, float] | None = None
    """comm_bytes_per_gpu by phase, lane, tensor and field."""
    comm_bytes_across_nodes_max: int | None = None
    """The bytes to other nodes of the rank that sends most of them."""
    comm_bytes_by_link: dict[str, float] | None = None
    """Bytes that cross each class of links (port, nic, ...), divided by the number of GPUs."""
    interface_bytes_per_gpu: float | None = None
    """Measured on emulated hosts: bytes sent by the hosts' link counters, headers included, divided by the number of
    GPUs."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The components of a step's time."""

    bound_ms: float | None = None
    """A lower bound on the step on that cluster: for each phase its blocks, its busiest link, or its latencies."""
    bound_by: str | None = None
    """What sets most of the bound: compute, latency, or a class of links."""
    compute_ms: float | None = None
    """Blocks and folds of the busiest rank. On shared cores this includes waiting for a core."""
    compute_only_ms_median: float | None = None
    """Measured: the same plans without transfers, timed in turn with the step: each phase's slowest rank or, with
    mode=alone, all phases of the slowest rank."""
    compute_only_forward_ms_median: float | None = None
    """The forward of compute_only_ms_median; None with mode=alone."""
    compute_only_backward_ms_median: float | None = None
    compute_only_update_ms_median: float | None = None
    communication_only_ms_median: float | None = None
    """Measured: the same plans without blocks."""
    communication_only_forward_ms_median: float | None = None
    communication_only_backward_ms_median: float | None = None
    communication_only_update_ms_median: float | None = None
    core_ms_mean: float | None = None
    """Measured on CPUs: busy core time of all the ranks' machines in one step and the barriers around it, by all
    processes. The kernel counts ticks of 10 ms, so the value of a short step is meaningless."""
    compute_only_core_ms_mean: float | None = None
    """The same for the plans without transfers."""
    communication_only_core_ms_mean: float | None = None
    """The same for the plans without blocks."""
    exposed_comm_ms: float | None = None
    """The step minus compute_only_ms_median or, if that was not measured, minus compute_ms. Measured: at least 0."""
    kernels_ms: float | None = None
    """Measured: time in block kernels of the rank with most."""
    folds_ms: float | None = None
    """Measured: time in folds of the rank with most."""
    interpreter_ms: float | None = None
    """Measured: on a CPU the time of blocks outside kernels and folds; on a GPU the time to queue the whole step."""
    rank_idle_ms_max: float | None = None
    """Simulated: how long the first rank to end waits for the last, over all phases."""
    rank_imbalance: float | None = None
    """Blocks and folds of the busiest rank, divided by the mean of all ranks."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory that a rank needs for the attention."""

    peak_mem_bytes_max: int | None = None
    """The peak of the rank with most: inputs, buffers, accumulators, results."""
    peak_mem_bytes_min: int | None = None
    """The peak of the rank with least, if measured."""
    peak_mem_source: str | None = None
    """Where these two come from: the plans, the executor's tensors, or an allocator."""
    peak_mem_bytes_expected: int | None = None
    """The peak computed from the plans, with lanes as late as the waits allow (account.peak_bytes)."""
    peak_rss_growth_bytes_max: int | None = None
    """Measured on CPUs: growth of a rank's resident memory from before its inputs to its peak in the first step."""
    peak_rss_growth_bytes_min: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """Measured on GPUs where NVML is installed (extra gpu): samples of all ranks' GPUs, one in each timed phase."""

    sm_mhz_min: int | None = None
    """The lowest SM clock of any GPU."""
    sm_mhz_median: float | None = None
    sm_mhz_most: int | None = None
    """The highest SM clock that the cards have."""
    gpu_power_w_median: float | None = None
    clocks_held_down: list[str] | None = None
    """What held clocks down in any sample; the software power cap is usual under full load."""


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """Relative L2 errors against fp64 on the scaled-down problem of the correctness gate."""

    err_out: float | None = None
    err_dq: float | None = None
    err_dk: float | None = None
    err_dv: float | None = None
    err_loss: float | None = None
    err_gradient: float | None = None
    """The error of the gradients of all parameters together, in a training step."""


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A training step: its model, the times of its parts, and its memory by kind. None for workload=attention.

    Measured times of parts are medians over iterations of the rank with most.
    """

    model: str | None = None
    parameters: int | None = None
    """The number of the model's parameters."""
    recompute: str | None = None
    """What of a layer the backward computes again: none, attention (all but the attention), full."""
    sharded: bool | None = None
    """Whether parameters, gradients and the optimizer's state are split over the ranks."""
    tensor_parallel: int | None = None
    """How many GPUs share the tokens of a rank, with a part of the heads each."""
    attention_ms: float | None = None
    """The attention of all layers, waits for its transfers included."""
    attention_exposed_ms: float | None = None
    """The part of attention_ms that waits for transfers."""
    dense_ms: float | None = None
    """Forward and backward without attention and loss: matrix products, norms, activations."""
    loss_ms: float | None = None
    """The head and the loss, with their gradients (losses.cross_entropy)."""
    gradient_sync_ms: float | None = None
    """The summation of gradients over the ranks, and gathers of sharded parameters, as far as nothing hides them.
    Measured on GPUs: without what the layers' own collectives cost, which is in dense_ms."""
    tensor_sum_ms: float | None = None
    """Simulated: sums of activations over tensor-parallel GPUs, which nothing hides."""
    optimizer_ms: float | None = None
    parameters_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    activations_bytes: int | None = None
    """What the backward keeps from the forward: the attention's inputs and outputs, the head's gradient among it."""
    attention_bytes: int | None = None
    """The peak of one attention: its inputs, buffers, accumulators and results."""
    gathered_bytes: int | None = None
    """Gathered parameters in the compute dtype: those of two layers, and outside the layers. Measured: the most at a
    gather, with the buffer that it fills."""
    loss_bytes: int | None = None
    """Simulated: the logits of a chunk of tokens."""
    losses: list[float] | None = None
    """Measured: the loss of each complete iteration, untimed ones included."""
