"""The rows of a point's table, and the columns of a sweep's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from sp_bench.cli.words import (
    amount,
    host_bound,
    largest_error,
    lengths,
    milliseconds,
    number,
    over_least,
    shape,
    share,
    step,
    tokens,
    variant,
)
from sp_bench.records import Record
from sp_bench.records.rows import Result
from sp_bench.records.schema import quantities
from sp_bench.records.workloads import model_in_words

FEWEST_CORE_MS, SHORTEST_MS = 500.0, 200.0
"""Busy core time of all iterations, and the time of a step with its barriers, below which the number of busy cores is
not shown: the kernel's ticks are too coarse, or barriers weigh too much."""
KINDS = ("parameters", "gradients", "optimizer", "activations", "attention", "gathered", "loss")
"""The kinds of memory of a training step."""


def _divided(record: Record) -> str:
    """The degrees of a training step whose ranks don't all share one sequence, in words; otherwise empty."""
    data, tensor, turns = record.data_parallel or 1, record.tensor_parallel or 1, record.turns or 1
    if data * tensor * turns == 1:
        return ""
    times = f", {turns} turns a step" if turns > 1 else ""
    return f"CP {record.gpus // (data * tensor)} x DP {data} x TP {tensor}{times}"


def _padding(record: Record) -> str:
    """The heads that a method adds, in words; empty if it adds none."""
    if record.padded_heads is None or record.padded_kv_heads is None:
        return ""
    more, of_keys = record.padded_heads - record.heads, record.padded_kv_heads - record.kv_heads
    return f"{more} of {record.padded_heads}; of keys, copies included, {of_keys} of {record.padded_kv_heads}"


def _first_token(record: Record) -> str:
    """The time to the first token in seconds; without a model it is one layer's attention, and says so."""
    if record.ttft_s is None:
        return "-"
    return f"{number(record.ttft_s, 4)} s" + ("" if record.model else " (one layer's attention)")


def _chunks(record: Record) -> str:
    """The chunks of a prompt, and the first and last one's time."""
    if record.chunks is None or record.prefill_chunk is None:
        return "-"
    cached = f", {tokens(record.prefill_cached)} cached before" if record.prefill_cached else ""
    each_ms = record.chunk_ms or []
    ends = f": {number(each_ms[0], 4)} to {number(each_ms[-1], 4)} ms" if len(each_ms) > 1 else ""
    return f"{record.chunks} of {tokens(record.prefill_chunk)}{cached}{ends}"


def _errors(record: Record) -> str:
    return _together(record.err_out, record.err_dq, record.err_dk, record.err_dv) or "-"


def _timed_errors(record: Record) -> str:
    errors = _together(record.err_timed_out, record.err_timed_dq, record.err_timed_dk, record.err_timed_dv)
    return errors or ("- (none were compared)" if record.err_timed_seqlen else "-")


def _together(*errors: float | None) -> str:
    """The errors, with a dash for each that isn't known; empty if none is."""
    known = any(error is not None for error in errors)
    return " ".join("-" if error is None else f"{error:.1e}" for error in errors) if known else ""


def _expected(record: Record) -> str:
    if record.comm_bytes_expected is None:
        return "-"
    equal = "=" if record.comm_bytes_expected == record.comm_bytes_per_gpu else "NOT EQUAL to the count"
    return f"{amount(record.comm_bytes_expected)} {equal}"


def _share_of_sent(record: Record, bound: float | None) -> str:
    if bound is None or record.comm_bytes_per_gpu is None:
        return "-"
    return amount(bound) + (f" ({over_least(record, bound)} sent)" if bound else "")


def _bound(record: Record) -> str:
    return f"{number(record.bound_ms, 4)} ms, by {record.bound_by}" if record.bound_ms else "-"


def _over_time_bound(record: Record) -> str:
    return f"{record.step_ms_median / record.bound_ms:.2f}x" if record.bound_ms and record.step_ms_median else "-"


def _validation(record: Record) -> str:
    """How far measurements like the point are from simulations; what they are of is a line of its own."""
    known = record.validation or "-"
    if record.validation_error is not None:
        known = known.partition(": ")[2]
    return known.partition(" (")[0]


def busy_cores(record: Record) -> str:
    """The mean number of busy cores; a dash for steps that are too short to tell.

    Means over means: core time over the time in which it was counted.
    """
    window_ms, iters = record.core_window_ms_mean, record.iters or 0
    parts_ms = record.core_ms_mean, record.compute_only_core_ms_mean, record.communication_only_core_ms_mean
    cores_ms, blocks_ms, transfers_ms = (x if x and x * iters >= FEWEST_CORE_MS else None for x in parts_ms)
    if cores_ms is None or window_ms is None or window_ms < SHORTEST_MS:
        return "-"
    alone = ""
    if blocks_ms is not None and transfers_ms is not None:
        alone = f" (for blocks alone {blocks_ms / window_ms:.2f}, for transfers alone {transfers_ms / window_ms:.2f})"
    return f"{cores_ms / window_ms:.2f}{alone}"


def _imbalance(record: Record) -> str:
    """The busiest rank's work over the mean, and the least that it can be."""
    if record.work_imbalance is None:
        return "-"
    return f"{record.work_imbalance:.3f} of the mean (at least {record.work_imbalance_lower_bound or 1:.3f})"


class Row(NamedTuple):
    """A row of a point's table."""

    name: str
    cell: Callable[[Record], str]
    always: bool = False
    """Whether it is printed though not all rows are asked for."""


def _part(record: Record, name: str, *, if_any: bool) -> str:
    """A part of a step, as a share of it."""
    part_ms = getattr(record, name)
    return share(part_ms or None if if_any else part_ms, record)


PARTS = tuple(
    Row(one.shown.row, partial(_part, name=name, if_any=one.shown.if_any))
    for name, one in quantities().items()
    if isinstance(one.shown, Result) and one.shown.row
)
"""The rows that stand at their quantities (records.quantities)."""
ROWS = (
    Row("layout, variant", lambda r: f"{r.layout}, {variant(r)}", always=True),
    Row("heads of zeros", lambda r: _padding(r) or "-"),
    Row("GPUs divided", lambda r: _divided(r) or "-"),
    Row("layers that see all", lambda r: str(r.full_layers or "-")),
    Row(
        "documents", lambda r: f"{r.documents:,}, the longest of {r.longest_document:,} tokens" if r.documents else "-"
    ),
    Row("work of the busiest rank", lambda r: _imbalance(r) if r.documents or r.window else "-"),
    Row("planning of a new pack, here", lambda r: milliseconds(r.planning_ms)),
    Row(
        "mode",
        lambda r: {"measure": "measured", "alone": "measured, ranks alone", "simulate": "SIMULATED"}[r.mode],
        True,
    ),
    Row("status", lambda r: r.status, always=True),
    Row("validation", _validation, always=True),
    Row("error against fp64", largest_error, always=True),
    Row("  out, dq, dk, dv", _errors),
    Row("  gradient of sinks", lambda r: _together(r.err_dsinks) or "-"),
    Row("  loss, gradient", lambda r: _together(r.err_loss, r.err_gradient) or "-"),
    Row("  of rows of what was timed", _timed_errors),
    Row("step [95% interval]", lambda r: step(r) if r.measured else "-", always=True),
    Row("step [two of three]", lambda r: "-" if r.measured else step(r), always=True),
    Row("time to first token", _first_token, always=True),
    Row("  chunks", _chunks, always=True),
    Row("KV cache of a GPU", lambda r: amount(r.kv_cache_bytes), always=True),
    Row("  forward", lambda r: milliseconds(r.forward_ms_median, 5)),
    Row("  backward", lambda r: milliseconds(r.backward_ms_median, 5)),
    Row("  update", lambda r: milliseconds(r.update_ms_median, 5)),
    Row("alone, with copies", lambda r: milliseconds(r.alone_ms_median) + host_bound(r), always=True),
    Row("throughput", lambda r: f"{number(r.tokens_per_s, 4)} tokens/s, {number(r.iters_per_s, 4)} iter/s"),
    Row("model FLOP/s for each GPU", lambda r: f"{number(r.tflops_per_gpu, 4)} TFLOP/s"),
    Row("MFU", lambda r: "- (peak not known)" if r.mfu is None else f"{r.mfu:.1%}"),
    Row("bound", _bound, always=True),
    Row("  step over it", _over_time_bound),
    Row("compute, busiest rank", lambda r: share(r.compute_ms, r)),
    Row("  kernels", lambda r: milliseconds(r.kernels_ms)),
    Row("  folds", lambda r: milliseconds(r.folds_ms)),
    Row("  interpreter", lambda r: milliseconds(r.interpreter_ms)),
    Row("  blocks alone", lambda r: share(r.compute_only_ms_median, r)),
    Row("  transfers alone", lambda r: share(r.communication_only_ms_median, r)),
    Row("cores busy", busy_cores),
    *PARTS,
    Row("loss, first and last step", lambda r: f"{r.losses[0]:.6g}, {r.losses[-1]:.6g}" if r.losses else "-"),
    Row("exposed communication", lambda r: share(r.exposed_comm_ms, r), always=True),
    Row("sent by each GPU", lambda r: amount(r.comm_bytes_per_gpu), always=True),
    Row("  lower bound", lambda r: _share_of_sent(r, r.comm_bytes_lower_bound), always=True),
    Row("    with any split of heads", lambda r: _share_of_sent(r, r.comm_bytes_least)),
    Row("  of it lse", lambda r: amount(r.comm_bytes_statistics)),
    Row("  closed form", _expected),
    Row("  by the links' counters", lambda r: amount(r.interface_bytes_per_gpu)),
    Row("peak memory", lambda r: amount(r.peak_mem_bytes_max), always=True),
    Row("  from the plans", lambda r: "-" if r.model else amount(r.peak_mem_bytes_expected)),
    *(Row(f"  {kind}", lambda r, kind=kind: amount(getattr(r, f"{kind}_bytes") or None)) for kind in KINDS),
    Row("  in the host's memory", lambda r: amount(r.host_bytes or None)),
    Row("  growth of resident memory", lambda r: amount(r.peak_rss_growth_bytes_max)),
)
"""The rows of a point's table, in the order of a reader's questions: what was asked, how far to trust it, the step,
what bounds it, exposed communication, bytes, memory."""
ALONE_ONLY = {"  kernels", "  folds", "  interpreter"}
"""Rows of ranks that were measured alone."""
NOT_ALONE = {"throughput", "model FLOP/s for each GPU", "MFU"}
"""Rows of all other records."""
NOTHING = {"-", "ok"}
"""Cells of which a row isn't printed if it has no other, unless all are asked for."""
POINT_COLUMNS: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("method", lambda r: r.method),
    ("variant", variant),
    ("gpus", lambda r: str(r.gpus)),
    ("seqlen", lengths),
    ("shape", shape),
    ("layout", lambda r: r.layout or "-"),
    ("workload", lambda r: model_in_words(vars(r)) or r.workload),
    ("cluster", lambda r: r.cluster),
    ("mode", lambda r: r.mode),
)
"""The columns that describe a point."""
FIGURE_COLUMNS: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("fwd ms", lambda r: number(r.forward_ms_median, 4)),
    ("bwd ms", lambda r: number(r.backward_ms_median, 4)),
    ("tokens/s", lambda r: number(r.tokens_per_s, 4)),
    ("MFU", lambda r: "-" if r.mfu is None else f"{r.mfu:.1%}"),
    ("sent/GPU", lambda r: amount(r.comm_bytes_per_gpu)),
    ("least, own split", lambda r: amount(r.comm_bytes_lower_bound)),
    ("/ least", lambda r: over_least(r, r.comm_bytes_least)),
    ("exposed", lambda r: share(r.exposed_comm_ms, r).partition("(")[2].rstrip(")") or "-"),
    ("exposed ms", lambda r: number(r.exposed_comm_ms, 4)),
    ("peak mem", lambda r: amount(r.peak_mem_bytes_max)),
)
"""The columns with a point's results, except the step. Ratios are over what all points of a problem share: the least
with any split of heads, unlike that with a method's own, and stands in bytes."""
WHERE_THERE_IS_ROOM = (
    *("exposed", "peak mem", "/ least", "sent/GPU", "MFU", "tokens/s", "fwd ms", "bwd ms", "exposed ms"),
    "least, own split",
)
"""The columns that are left out of a table that would be too wide, those that matter most first. Before them goes
the layout, if points are told apart without it."""
