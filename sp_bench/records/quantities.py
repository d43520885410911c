"""The quantities of a record: one row for each, with its name, type, meaning and how it is shown.

A row is a field of one of the parts below. Everything that lists fields reads them from here: the record's file and its
JSON Schema, the columns of tables, W&B's keys, the explorer's settings and results, and the page of fields. A row that
is marked `Setting` or `Result` is shown by its label; of unmarked rows numbers go to W&B's summary, and texts and
nested values stay in the record. None means not known. Names carry units: times are in ms, sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

from sp_bench.records.rows import SUMMARY, Result, Setting

Time = partial(Result, better="less", noisy=True)
Rate = partial(Result, better="more", noisy=True, interval="inverse")
Sent = partial(Result, unit="GB", factor=1e-9, better="less")
"""How times, what is computed a second, and bytes that are sent are shown."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request, as far as it could be resolved."""

    how: ClassVar[str] = "asked"

    workload: Annotated[str, Setting("workload")]
    """The operation that is timed."""
    method: Annotated[str, Setting("method")]
    """The method, or the implementation of a peer."""
    impl: Annotated[str | None, Setting("implementation")] = None
    """With method=peer: the implementation that ran."""
    gpus: Annotated[int, Setting("GPUs")]
    """The number of GPUs, which is that of ranks times train.tensor_parallel times train.data_parallel."""
    seqlen: Annotated[int, Setting("sequence length", words="tokens")]
    """Tokens of the whole sequence."""
    kv_seqlen: Annotated[int | None, Setting("keys", words="tokens")] = None
    """Keys of the whole sequence, if there are others than queries: with a causal mask a history and then the queries'
    own tokens, with a full one those of another sequence. None: as many as queries."""
    batch: Annotated[int, Setting("batch")]
    """The number of sequences."""
    heads: Annotated[int, Setting("query heads")]
    """The number of query heads."""
    kv_heads: Annotated[int, Setting("KV heads")]
    """The number of key heads."""
    head_dim: Annotated[int, Setting("head dimension")]
    """Elements of a head."""
    v_head_dim: Annotated[int | None, Setting("value dimension")] = None
    """Elements of a head of values and outputs, if they are fewer than those of queries and keys."""
    latent_dim: Annotated[int | None, Setting("latent dimension")] = None
    """Elements of the latent that travels, and that keys and values of all heads are made of, if one does."""
    rope_dim: Annotated[int | None, Setting()] = None
    """Elements of a key that are not made of the latent, and travel with it."""
    mask: Annotated[str, Setting("mask")] = ""
    """The name of the attention mask. Files without it get causal or full, by `causal`."""
    causal: Annotated[bool, Setting()]
    """Whether a query sees keys up to its own position only; in a pack, inside each document."""
    documents: Annotated[int | None, Setting("documents")] = None
    """The number of packed documents."""
    longest_document: Annotated[int | None, Setting()] = None
    """Tokens of the longest document."""
    window: Annotated[list[int | None] | None, Setting()] = None
    """How many keys before and behind its own position a query sees; None for no limit."""
    sinks: Annotated[bool | None, Setting("sinks")] = None
    """Whether every softmax has a learned score by head besides those of keys; None for no."""
    dtype: Annotated[str, Setting("dtype")]
    """The dtype of inputs and results."""
    wire_dtype: Annotated[str, Setting("wire dtype")]
    """The dtype of partial results on the wire."""
    phase: Annotated[str, Setting("phase")]
    """The timed phases: forward, backward or forward_backward."""
    cluster: Annotated[str, Setting("cluster")]
    """The cluster file."""
    seed: Annotated[int | None, Setting()] = None
    """The seed of inputs, of drawn documents and of stragglers."""
    iters: Annotated[int | None, Setting()] = None
    """Measured: timed iterations."""
    warmup: Annotated[int | None, Setting()] = None
    """Measured: iterations before them, which are not kept."""
    stragglers: Annotated[dict[str, Any] | None, Setting()] = None
    """The simulated slow ranks, slow links and noise."""
    config: dict[str, Any] | None = None
    """The resolved config, as `--cfg` prints it."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The method's variant, and the hardware and software it ran on."""

    how: ClassVar[str] = "resolved from the request, or found where it ran"

    layout: Annotated[str | None, Setting("layout")] = None
    """The assignment of tokens to ranks."""
    tile_a: Annotated[int | None, Setting()] = None
    """Ranks of a Q group: the a of a tile a x b."""
    tile_b: Annotated[int | None, Setting()] = None
    """Ranks of a KV group."""
    variant: Annotated[str | None, Setting("variant")] = None
    """The method's variant, if it has several: its tile, ring or group sizes; and its padded heads, if it has some."""
    padded_heads: Annotated[int | None, Setting("padded heads")] = None
    """With method.pad_heads, where the degree doesn't divide the heads: the query heads that are computed and sent,
    those of zeros included; None where there are none of these."""
    padded_kv_heads: Annotated[int | None, Setting("padded KV heads")] = None
    """Likewise the key heads, with copies of true ones."""
    nodes: Annotated[int | None, Setting("nodes")] = None
    """The number of nodes."""
    kernel: Annotated[str | None, Setting("kernel")] = None
    """The block kernel that ran, or whose figures were simulated."""
    sm_margin: int | None = None
    """Measured on GPUs: SMs that a persistent block kernel leaves to transfers, the least of all ranks; None if the
    kernel takes all."""
    lane_ctas: int | None = None
    """Measured on GPUs: the SMs that the transfers of one lane take at most: the least of all ranks' shares."""
    transport: Annotated[str | None, Setting()] = None
    """The transport of the plan's transfers, and its options, such as `nccl, registered buffers`; None for a peer.
    Measured with CUDA graphs it has NCCL_GRAPH_REGISTER, by which NCCL registers the buffers of captured transfers."""
    implementation: Annotated[str | None, Setting()] = None
    """Simulated: whose code it stands for (conf/implementation)."""
    validation: Annotated[str | None, Result()] = None
    """Simulated: which measurements like it back its times, and how far from them simulations were (point.backing)."""
    validation_error: float | None = None
    """Simulated: what two of three errors of that validation are within, and how far the step is from the one simulated
    with the implementation that was measured; None where nothing backs the times."""
    validation_kind: Annotated[dict[str, str] | None, Result()] = None
    """Simulated: the kind of points that the validation is of: workload, mask, transfers and links."""
    device_name: Annotated[str | None, Setting("device")] = None
    """The ranks' device."""
    alone_ranks: Annotated[list[int] | None, Setting()] = None
    """With mode=alone: the ranks that were executed, each without its peers, receiving copies of what it sent."""
    work_imbalance: Annotated[float | None, Result("work of the busiest rank over mean", better="less")] = None
    """(query, key) pairs of the rank that computes most over the mean of all, from the first phase's plan."""
    work_imbalance_lower_bound: float | None = None
    """The least possible work_imbalance: above 1 only where documents are assigned whole."""
    candidates: list[dict[str, Any]] | None = None
    """If an option was auto: every variant with its simulated time and peak memory, or a lower bound on its time. Of a
    prompt in several chunks none: each has its own."""
    planning_ms: Annotated[float | None, Time("planning of a new pack", "ms")] = None
    """With mask=document: how long a core of the machine that wrote the record takes to plan a pack that is new to it,
    for the first rank: to assign tokens, and to find plans, rows and regions (point.planning). No part of the step."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The time of a step: the sum of its phases, each as long as its slowest rank. Statistics are over iterations."""

    how: ClassVar[str] = "measured or simulated"

    step_ms_median: Annotated[float | None, Time("step time", "ms", interval="direct")] = None
    """The median step."""
    step_ms_p25: float | None = None
    """The first quartile."""
    step_ms_p75: float | None = None
    """The third quartile."""
    step_ms_ci95_low: float | None = None
    """The lower end of a bootstrap 95% interval of the median."""
    step_ms_ci95_high: float | None = None
    """Its upper end."""
    step_ms_validated_low: float | None = None
    """Simulated: the shortest step that would be measured in two of three cases, by the errors of simulations of
    measurements like it (validation); None where there are none."""
    step_ms_validated_high: float | None = None
    """Simulated: the longest step that would be measured in two of three cases."""
    forward_ms_median: Annotated[float | None, Time("forward time", "ms", interval="of simulated")] = None
    """The median of the forward."""
    backward_ms_median: Annotated[float | None, Time("backward time", "ms", interval="of simulated")] = None
    """The median of the backward."""
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

    how: ClassVar[str] = "computed from the step and the shape"

    iters_per_s: float | None = None
    """Steps per second."""
    tokens_per_s: Annotated[float | None, Rate("throughput", "tokens/s")] = None
    """Tokens of the sequences per second, on all GPUs together."""
    tflops_per_gpu: Annotated[float | None, Rate("model FLOP/s per GPU", "TFLOP/s")] = None
    """Model FLOPs: a causal mask counts half, a backward 2.5 times its forward."""
    mfu: Annotated[float | None, Rate("MFU", "%", 100.0)] = None
    """Model FLOP utilisation; None if the device's peak is not known."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that the GPUs send in one step."""

    how: ClassVar[str] = "counted"

    comm_bytes_per_gpu: Annotated[float | None, Sent("sent per GPU")] = None
    """The mean over the GPUs: counted from the tensors that were sent if measured, otherwise from the plan."""
    comm_bytes_busiest_gpu: Annotated[int | None, Sent("sent by the busiest GPU")] = None
    """The bytes of the GPU that sends most."""
    comm_bytes_expected: Annotated[float | None, Result("closed form of sent per GPU", "GB", 1e-9)] = None
    """The value of the method's closed form; None with packed documents, which have none."""
    comm_bytes_lower_bound: Annotated[float | None, Result("lower bound of sent per GPU", "GB", 1e-9)] = None
    """The fewest payload bytes any method with the same head split can send (account.lower_bound_bytes)."""
    comm_bytes_least: Annotated[float | None, Result("lower bound with any split of heads", "GB", 1e-9)] = None
    """The fewest payload bytes any method can send, however it splits heads (account.least_bytes); None for packs."""
    comm_bytes_statistics: float | None = None
    """The share of lse in comm_bytes_per_gpu. Papers leave it out."""
    comm_bytes_by_lane: Annotated[dict[str, float] | None, Result()] = None
    """comm_bytes_per_gpu by phase, lane, tensor and field."""
    comm_bytes_across_nodes_max: Annotated[int | None, Sent("sent to other nodes by the busiest GPU")] = None
    """The bytes to other nodes of the rank that sends most of them."""
    comm_bytes_by_link: Annotated[dict[str, float] | None, Result()] = None
    """Bytes that cross each class of links (port, nic, ...), divided by the number of GPUs."""
    interface_bytes_per_gpu: float | None = None
    """Measured on emulated hosts: bytes sent by the hosts' link counters, headers included, divided by the number of
    GPUs."""


HOST_BOUND = 0.8
"""The host_share from which on a step is said to be host-bound: the GPU may wait for what is queued."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The components of a step's time."""

    how: ClassVar[str] = "measured or simulated"

    bound_ms: Annotated[float | None, Result("lower bound of the step", "ms")] = None
    """A lower bound on the step on that cluster: for each phase its blocks, its busiest link, or its latencies."""
    bound_by: Annotated[str | None, Setting("bound by", wandb=SUMMARY)] = None
    """The cause of most of the bound: compute, memory (reads of a decode step), latency, or a class of links."""
    compute_ms: Annotated[float | None, Result("compute time of the busiest rank", "ms", noisy=True)] = None
    """Blocks and folds of the busiest rank. On shared cores this includes waiting for a core."""
    compute_only_ms_median: float | None = None
    """Measured: the same plans without transfers, timed in turn with the step: each phase's slowest rank or, with
    mode=alone, all phases of the slowest rank."""
    compute_only_forward_ms_median: float | None = None
    """The forward of compute_only_ms_median; None with mode=alone."""
    compute_only_backward_ms_median: float | None = None
    """The backward of compute_only_ms_median."""
    compute_only_update_ms_median: float | None = None
    """The update of compute_only_ms_median."""
    communication_only_ms_median: float | None = None
    """Measured: the same plans without blocks."""
    communication_only_forward_ms_median: float | None = None
    """The forward of communication_only_ms_median."""
    communication_only_backward_ms_median: float | None = None
    """The backward of communication_only_ms_median."""
    communication_only_update_ms_median: float | None = None
    """The update of communication_only_ms_median."""
    core_ms_mean: float | None = None
    """Measured on CPUs: busy core time of all the ranks' machines in one step and the barriers around it, by all
    processes. The kernel counts ticks of 10 ms, so the value of a short step is meaningless."""
    core_window_ms_mean: float | None = None
    """The time in which core_ms_mean was counted: its quotient is the mean number of busy cores."""
    compute_only_core_ms_mean: float | None = None
    """core_ms_mean for the plans without transfers."""
    communication_only_core_ms_mean: float | None = None
    """The same for the plans without blocks."""
    exposed_comm_ms: Annotated[float | None, Time("exposed communication", "ms")] = None
    """The step minus compute_only_ms_median or, if that was not measured, minus compute_ms. Measured: at least 0."""
    kernels_ms: float | None = None
    """Measured: time in block kernels of the rank with most."""
    folds_ms: float | None = None
    """Measured: time in folds of the rank with most."""
    interpreter_ms: float | None = None
    """Measured: on a CPU the time of blocks outside kernels and folds; on a GPU the time to queue the whole step."""
    host_share: Annotated[float | None, Result("queueing over step", better="less", noisy=True)] = None
    """Measured on GPUs: interpreter_ms over the step, or over alone_ms_median. Above 0.8 the step is host-bound."""
    rank_idle_ms_max: float | None = None
    """Simulated: how long the first rank to end waits for the last, over all phases."""
    rank_imbalance: Annotated[float | None, Result("busiest rank over mean", better="less", noisy=True)] = None
    """Blocks and folds of the busiest rank, divided by the mean of all ranks."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory that a rank needs for the attention."""

    how: ClassVar[str] = "computed from the plans, or measured"

    peak_mem_bytes_max: Annotated[int | None, Result("peak memory per GPU", "GB", 1e-9, better="less")] = None
    """The peak of the rank with most: inputs, buffers, accumulators, results."""
    peak_mem_bytes_min: int | None = None
    """The peak of the rank with least, if measured."""
    peak_mem_source: Annotated[str | None, Result()] = None
    """The source of these two: the plans, the executor's tensors, or an allocator."""
    peak_mem_bytes_expected: int | None = None
    """The peak computed from the plans, with lanes as late as the waits allow (account.peak_bytes)."""
    peak_active_bytes_max: int | None = None
    """Measured on GPUs: the most that torch's allocator could not give out, of the rank with most. More than was in use
    where memory was freed that a stream may still read."""
    peak_reserved_bytes_max: int | None = None
    """Measured on GPUs: the most that torch's allocator has taken of a GPU."""
    peak_rss_growth_bytes_max: int | None = None
    """Measured on CPUs: growth of a rank's resident memory from before its inputs to its peak in the first step."""
    peak_rss_growth_bytes_min: int | None = None
    """The same of the rank with least."""


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """Measured on GPUs where NVML is installed (extra gpu): samples of all ranks' GPUs, one in each timed phase."""

    how: ClassVar[str] = "measured"

    sm_mhz_min: int | None = None
    """The lowest SM clock of any GPU."""
    sm_mhz_median: float | None = None
    """The median SM clock."""
    sm_mhz_most: int | None = None
    """The highest SM clock that the cards have."""
    gpu_power_w_median: float | None = None
    """The median of a GPU's power at the moment of each sample; None where only averages over a second are known."""
    clocks_held_down: Annotated[list[str] | None, Result()] = None
    """The reasons that held clocks down in any sample; the software power cap is usual under full load."""


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """Relative L2 errors against fp64: before timing, on a scaled-down problem (the correctness gate), and after it, of
    sampled rows at the timed length.

    With workload=attention these rows are of the very outputs and gradients of the last timed iteration. A training
    step is executed once more after the last one, and the rows are of its last layer's attention. Where memory runs out
    no rows are compared: err_timed_seqlen stands alone then, and a note says why.
    """

    how: ClassVar[str] = "measured"

    err_seqlen: int | None = None
    """Tokens of the gate's problem, on which err_out to err_gradient were found."""
    err_out: Annotated[float | None, Result("error of out")] = None
    """The error of the output."""
    err_dq: Annotated[float | None, Result("error of dq")] = None
    """The error of dq."""
    err_dk: Annotated[float | None, Result("error of dk")] = None
    """The error of dk."""
    err_dv: Annotated[float | None, Result("error of dv")] = None
    """The error of dv."""
    err_dsinks: float | None = None
    """The error of the gradient of sinks."""
    err_loss: float | None = None
    """The error of the loss, in a training step."""
    err_gradient: float | None = None
    """The error of the gradients of all parameters together, in a training step."""
    err_timed_seqlen: int | None = None
    """Tokens of what was timed, in which err_timed_out to err_timed_dv were looked for."""
    err_timed_query_rows: int | None = None
    """How many rows of out and dq were compared, each of one token and head: 16 tokens of each rank."""
    err_timed_key_rows: int | None = None
    """How many rows of dk and dv were compared: 256 tokens of one head, spread over the sequence, at least one of each
    rank."""
    err_timed_out: float | None = None
    """The error of the output."""
    err_timed_dq: float | None = None
    """The error of dq."""
    err_timed_dk: float | None = None
    """The error of dk."""
    err_timed_dv: float | None = None
    """The error of dv."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """With workload=prefill: how a prompt is computed, and the time to its first token."""

    how: ClassVar[str] = "asked, and measured or simulated"

    prefill_chunk: Annotated[int | None, Setting("chunk of the prompt", words="tokens")] = None
    """Tokens of each chunk of the prompt, or of all of it; the last chunk has the rest."""
    prefill_cached: Annotated[int | None, Setting("cached before it", words="tokens")] = None
    """Tokens that are cached before the first chunk."""
    chunks: Annotated[int | None, Setting("chunks")] = None
    """The number of chunks."""
    ttft_s: Annotated[float | None, Time("time to first token", "s", interval="direct")] = None
    """Seconds from the beginning of the prompt to its first token: with a model all layers and the last token's head;
    without one the attention of one layer over all chunks, which is only its share. The median if measured."""
    chunk_ms: list[float] | None = None
    """The time of each chunk, in order. Measured: of the rank with most, the median over iterations."""
    kv_cache_bytes: Annotated[int | None, Result("KV cache per GPU", "GB", 1e-9, better="less")] = None
    """Bytes of keys and values, of all layers, that the GPU with most of them must hold at most: after the last chunk
    or, under a window, during the chunk whose queries see most. What no later query sees is let go, though measured
    ranks keep it. Of a decode step with a model: the caches of its layers."""

    def timed(self, step_ms: float, chunk_ms: list[float]) -> Prompt:
        """The same with the times of its chunks; as it is for other workloads."""
        return self if self.chunks is None else replace(self, ttft_s=step_ms / 1e3, chunk_ms=chunk_ms)


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """A decode step: its sequences and their caches. None for other workloads."""

    how: ClassVar[str] = "from the request"

    sequences: Annotated[int | None, Setting("sequences")] = None
    """The number of sequences, each with a cache of its own."""
    cache_bytes: Annotated[int | None, Result("cache of one layer on a GPU", "GB", 1e-9, better="less")] = None
    """Keys and values of one layer that a GPU holds, of all sequences; those of the GPU that holds most, and of a model
    those of the layer that does. Of pages with what is left in the last ones."""
    cache_page_tokens: Annotated[int | None, Setting("page of the cache", words="tokens")] = None
    """Tokens of a page, if caches are assigned by whole pages; None: each GPU has a run of each cache."""
    latent_keys: Annotated[bool | None, Setting()] = None
    """Whether values are the first elements of one head of latent keys, if they are."""
    cache_tensor_parallel: Annotated[int | None, Setting()] = None
    """How many GPUs share each part of the caches, with a part of the heads each, if several do."""


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A step with a model: the times of its parts, and its memory by kind. None without a model.

    Measured times of parts are medians over iterations of the rank with most: PART_ms is of what a step calls PART
    (workload.base.Step.parts), such as attention, loss, gradient_sync and optimizer.
    """

    how: ClassVar[str] = "measured or simulated"

    model: Annotated[str | None, Setting()] = None
    """The model (conf/model)."""
    parameters: int | None = None
    """The number of the model's parameters."""
    recompute: Annotated[str | None, Setting()] = None
    """The part of a layer that the backward computes again: none, attention (all but the attention), full."""
    offload: Annotated[bool | None, Setting()] = None
    """Whether what the layers keep for the backward is in the host's memory until then."""
    sharded: Annotated[bool | None, Setting()] = None
    """Whether parameters, gradients and the optimizer's state are split over the ranks."""
    tensor_parallel: Annotated[int | None, Setting()] = None
    """How many GPUs share the tokens of a rank, with a part of the heads each."""
    data_parallel: Annotated[int | None, Setting()] = None
    """How many groups of ranks train on sequences of their own; gradients are summed over all of them."""
    turns: Annotated[int | None, Setting()] = None
    """How often a rank computes forward and backward in a step, whose gradients are added up."""
    text: Annotated[str | None, Setting("text")] = None
    """How text that all ranks hold enters a denoising step: joint or cross (workload.model)."""
    text_tokens: Annotated[int | None, Setting("text tokens", words="tokens")] = None
    """Its tokens, which seqlen doesn't count."""
    linears: Annotated[str | None, Setting()] = None
    """The dtype of a layer's matrix products: compute (that of the activations) or float8."""
    full_layers: Annotated[int | None, Setting("layers that see all")] = None
    """The number of layers that see all, where others see only what the window or the chunks of the mask leave."""
    attention_ms: Annotated[float | None, Result(row="attention")] = None
    """The attention of all layers, waits for its transfers included."""
    full_attention_ms: Annotated[float | None, Result(row="  of layers that see all")] = None
    """The part of attention_ms that is of layers that see all, where others don't."""
    attention_exposed_ms: Annotated[float | None, Result(row="  waiting for transfers")] = None
    """The part of attention_ms that waits for transfers."""
    dense_ms: Annotated[float | None, Result(row="matrix products and the rest")] = None
    """Forward and backward without attention and loss: matrix products, norms, activations."""
    loss_ms: Annotated[float | None, Result(row="head and loss")] = None
    """The head and the loss, with their gradients (losses.cross_entropy)."""
    gradient_sync_ms: Annotated[float | None, Result(row="gradients and parameters moved")] = None
    """The summation of gradients over the ranks, and gathers of sharded parameters, as far as nothing hides them.
    Measured on GPUs: without what the layers' own collectives cost, which is in dense_ms."""
    tensor_sum_ms: Annotated[float | None, Result(row="sums over tensor-parallel GPUs", if_any=True)] = None
    """Simulated: sums of activations over tensor-parallel GPUs, which nothing hides."""
    offload_ms: Annotated[float | None, Result(row="copies to the host and back", if_any=True)] = None
    """Simulated: copies of activations to the host and back, as far as nothing hides them."""
    optimizer_ms: Annotated[float | None, Result(row="optimizer")] = None
    """The time of the optimizer."""
    parameters_bytes: int | None = None
    """Bytes of the parameters."""
    gradients_bytes: int | None = None
    """Bytes of the gradients."""
    optimizer_bytes: int | None = None
    """The optimizer's state."""
    activations_bytes: int | None = None
    """Bytes that the backward keeps of the forward: the attention's inputs and outputs, the head's gradient too.
    Without a backward the most that a feed-forward network holds, its residual stream included."""
    attention_bytes: int | None = None
    """The peak of one attention: its inputs, buffers, accumulators and results."""
    gathered_bytes: int | None = None
    """Gathered parameters in the compute dtype: those of two layers, and outside the layers. Measured: the most at a
    gather, with the buffer that it fills."""
    loss_bytes: int | None = None
    """Simulated: the logits of a chunk of tokens."""
    host_bytes: int | None = None
    """Activations in the host's memory, of each GPU; simulated, or measured as copied in a forward."""
    losses: list[float] | None = None
    """Measured: the loss of each complete iteration, untimed ones included."""
