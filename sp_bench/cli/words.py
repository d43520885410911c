"""A record in words and numbers: what stands in tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sp_bench.point import Outcome
from sp_bench.records import Record
from sp_bench.records.interval import interval
from sp_bench.records.quantities import HOST_BOUND
from sp_bench.records.workloads import model_in_words


def number(value: float | None, digits: int = 3) -> str:
    """A number for a table; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def amount(size: float | None) -> str:
    """Bytes for a table, in decimal units; a dash for None."""
    if size is None:
        return "-"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} B"


def title(record: Record) -> str:
    """The problem in one line."""
    heads = f"{record.heads} heads" + (f" ({record.kv_heads} kv)" if record.kv_heads != record.heads else "")
    ranks = f"{record.gpus} GPUs"
    if record.alone_ranks:
        ranks = f"rank{'s' * (len(record.alone_ranks) > 1)} {', '.join(map(str, record.alone_ranks))} of {ranks}, alone"
    model = f"{name}, " if (name := model_in_words(vars(record))) else ""
    return (
        f"{model}{ranks} on {record.cluster}, seqlen {lengths(record)}, batch {record.batch}, {heads} of "
        f"{widths(record)}, {record.mask}, {record.dtype}, {record.phase.replace('_', ' + ')}"
    )


def shape(record: Record) -> str:
    """Batch, heads, mask and dtype, abbreviated."""
    kv = f"/{record.kv_heads}" if record.kv_heads != record.heads else ""
    batch = f"{record.batch}x" if record.batch > 1 else ""
    dtype = record.dtype.replace("bfloat", "bf").replace("float", "fp")
    return f"{batch}{record.heads}{kv}x{widths(record)} {record.mask} {dtype}"


def widths(record: Record) -> str:
    """Elements of a head, of its values if they are fewer, and of latents if they travel: `192/128 of 512+64`."""
    latents = f" of {record.latent_dim}+{record.rope_dim}" if record.latent_dim else ""
    return (f"{record.head_dim}/{record.v_head_dim}" if record.v_head_dim else str(record.head_dim)) + latents


def lengths(record: Record) -> str:
    """The tokens of a sequence, and its keys if there are others, or text, such as `8k, 128k keys`."""
    more = f", {tokens(record.kv_seqlen)} keys" if record.kv_seqlen else ""
    return tokens(record.seqlen) + more + (f", {record.text_tokens} text tokens" if record.text_tokens else "")


def tokens(seqlen: int) -> str:
    """A sequence length with its unit, such as 1M for 1048576."""
    for unit, factor in (("M", 2**20), ("k", 2**10)):
        if seqlen % factor == 0:
            return f"{seqlen // factor}{unit}"
    return str(seqlen)


def variant(record: Record) -> str:
    """The method's variant, such as its tile a x b."""
    return record.variant or "-"


def milliseconds(time_ms: float | None, digits: int = 4) -> str:
    """A time with its unit; a dash for None."""
    return "-" if time_ms is None else f"{number(time_ms, digits)} ms"


def share(part_ms: float | None, record: Record) -> str:
    """A part of a step in milliseconds, and as a share of the step where that is known; a dash for None."""
    if part_ms is None or not record.step_ms_median:
        return milliseconds(part_ms) if record.alone_ranks else "-"
    return f"{number(part_ms, 4)} ms ({part_ms / record.step_ms_median:.0%})"


def step(record: Record) -> str:
    """The median of its steps in milliseconds, with its interval."""
    if record.step_ms_median is None:
        return "-"
    text = f"{number(record.step_ms_median, 5)} ms"
    digits = 4 if record.measured else 3
    if ends := interval(record).ends:
        text += f" [{', '.join(number(end, digits) for end in ends)}]"
    return text + host_bound(record)


def host_bound(record: Record) -> str:
    """A mark for a time that is bound by the thread which queues work; else empty."""
    return ", host-bound" if (record.host_share or 0.0) > HOST_BOUND else ""


def not_validated(*records: Record) -> bool:
    """Whether one of several simulated steps has no interval, so that nobody knows how far their ratio is off."""
    return any(not record.measured and not interval(record).backed for record in records)


def overlap(one: Record, other: Record) -> bool:
    """Whether two records can't be ranked: their intervals overlap, or the iterations are too few for one."""
    return one is not other and interval(one).overlaps(interval(other))


def ratio(over: Record, under: Record) -> str:
    """The ratio of two records' steps, with no more digits than their intervals leave it.

    If one isn't validated it has one digit, but two near 1, where one would hide which of both is the faster.
    """
    assert over.step_ms_median and under.step_ms_median
    value, square = over.step_ms_median / under.step_ms_median, 0.0
    if over is not under and not_validated(over, under):
        return f"{value:.{2 if 0.8 < value < 1.25 else 1}f}x"
    for record in (over, under) if over is not under else ():
        if ends := interval(record).ends:
            square += (math.log(ends[1] / ends[0]) / 2) ** 2
    off = value * math.sqrt(square)
    places = min(2, max(0, -math.floor(math.log10(min(off, 1.0))))) if off else 2
    return f"{value:.{places}f}x"


def speed_up(record: Record, outcomes: Sequence[Outcome]) -> str:
    """The speed-up over the last outcome with its interval, marked if it may be none, or if it has no interval.

    The ends are those of one step over the other ends of the other: 1 is between them where the steps' intervals
    overlap.
    """
    last = outcomes[-1].record
    if not record.step_ms_median or not last.step_ms_median:
        return "-"
    if record is last:
        return ratio(last, record)
    if not_validated(record, last):
        return f"{ratio(last, record)} (not validated)"
    text, ends, last_ends = ratio(last, record), interval(record).ends, interval(last).ends
    if ends and last_ends:
        text += f" [{last_ends[0] / ends[1]:.3g}, {last_ends[1] / ends[0]:.3g}]"
    return text + " ~" * overlap(record, last)


def against(record: Record, fastest: Record | None) -> str:
    """The step divided by the fastest one of its problem."""
    if not (record.step_ms_median and fastest and fastest.step_ms_median):
        return "-"
    if record is not fastest and not_validated(record, fastest):
        return f"{ratio(record, fastest)} ?"
    return ratio(record, fastest) + " ~" * overlap(record, fastest)


def largest_error(record: Record) -> str:
    """The largest of the errors that are known."""
    errors = (
        record.err_out,
        record.err_dq,
        record.err_dk,
        record.err_dv,
        record.err_dsinks,
        record.err_loss,
        record.err_gradient,
    )
    known = [error for error in errors if error is not None]
    return f"{max(known):.1e} at most" if known else "-"


def over_least(record: Record, least: float | None) -> str:
    """The payload sent over a lower bound on it in bytes; a dash where either is unknown, or the bound is zero."""
    if not least or record.comm_bytes_per_gpu is None:
        return "-"
    payload = record.comm_bytes_per_gpu - (record.comm_bytes_statistics or 0)
    return f"{payload / least:.2f}x"
