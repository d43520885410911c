"""Print outcomes: a point beside its baseline, or a sweep as one table. What is asked for most fits a terminal."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from sp_bench.cli.timeline import print_timeline
from sp_bench.point import Outcome
from sp_bench.records import Record
from sp_bench.records.interval import interval
from sp_bench.records.quantities import HOST_BOUND
from sp_bench.records.timeline import read_timeline
from sp_bench.records.workloads import model_in_words

FEWEST_CORE_MS, SHORTEST_MS = 500.0, 200.0
"""Busy core time of all iterations, and the time of a step with its barriers, below which the number of busy cores is
not shown: the kernel's ticks are too coarse, or barriers weigh too much."""
KINDS = ("parameters", "gradients", "optimizer", "activations", "attention", "gathered", "loss")
"""The kinds of memory of a training step."""
ONE, SEVERAL = 80, 100
"""The most characters of a line of a point that is printed by itself, and of several side by side or in rows."""
VARIANT_LINES = 3
"""The most lines that a point's variants take, unless all are asked for."""


def make_console(*, beside_data: bool = False) -> Console:
    """A console without markup, at most as wide as several points. `beside_data`: it prints to stderr.

    If the output is not a terminal, it is as wide as $COLUMNS says.
    """
    output = sys.stderr if beside_data else sys.stdout
    known = output.isatty() or "COLUMNS" in os.environ
    console = Console(file=output, width=None if known else SEVERAL, markup=False, highlight=False)
    console.width = min(console.width, SEVERAL)
    return console


def print_json(records: Sequence[Record]) -> None:
    """Print records to stdout, one JSON object a line."""
    for record in records:
        print(json.dumps(record.to_dict()))


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
        f"{model}{ranks} on {record.cluster}, seqlen {tokens(record.seqlen)}, batch {record.batch}, {heads} of "
        f"{record.head_dim}, {record.mask}, {record.dtype}, {record.phase.replace('_', ' + ')}"
    )


def shape(record: Record) -> str:
    """Batch, heads, mask and dtype, abbreviated."""
    kv = f"/{record.kv_heads}" if record.kv_heads != record.heads else ""
    batch = f"{record.batch}x" if record.batch > 1 else ""
    dtype = record.dtype.replace("bfloat", "bf").replace("float", "fp")
    return f"{batch}{record.heads}{kv}x{record.head_dim} {record.mask} {dtype}"


def tokens(seqlen: int) -> str:
    """A sequence length with its unit, such as 1M for 1048576."""
    for unit, factor in (("M", 2**20), ("k", 2**10)):
        if seqlen % factor == 0:
            return f"{seqlen // factor}{unit}"
    return str(seqlen)


def variant(record: Record) -> str:
    """The method's variant, such as its tile a x b."""
    return record.variant or "-"


def _median(record: Record) -> str:
    if record.step_ms_median is None:
        return "-"
    text = f"{number(record.step_ms_median, 5)} ms"
    digits = 4 if record.measured else 3
    if ends := interval(record).ends:
        text += f" [{', '.join(number(end, digits) for end in ends)}]"
    return text + _host_bound(record)


def _host_bound(record: Record) -> str:
    return ", host-bound" if (record.host_share or 0.0) > HOST_BOUND else ""


def _not_validated(*records: Record) -> bool:
    """Whether one of several simulated steps has no interval, so that nobody knows how far their ratio is off."""
    return any(not record.measured and not interval(record).backed for record in records)


def ratio(over: Record, under: Record) -> str:
    """The ratio of two records' steps, with no more digits than their intervals leave it.

    If one isn't validated it has one digit, but two near 1, where one would hide which of both is the faster.
    """
    assert over.step_ms_median and under.step_ms_median
    value, square = over.step_ms_median / under.step_ms_median, 0.0
    if over is not under and _not_validated(over, under):
        return f"{value:.{2 if 0.8 < value < 1.25 else 1}f}x"
    for record in (over, under) if over is not under else ():
        if ends := interval(record).ends:
            square += (math.log(ends[1] / ends[0]) / 2) ** 2
    off = value * math.sqrt(square)
    places = min(2, max(0, -math.floor(math.log10(min(off, 1.0))))) if off else 2
    return f"{value:.{places}f}x"


def largest_error(record: Record) -> str:
    """The largest of the errors that are known."""
    errors = (record.err_out, record.err_dq, record.err_dk, record.err_dv, record.err_loss, record.err_gradient)
    known = [error for error in errors if error is not None]
    return f"{max(known):.1e} at most" if known else "-"


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


def _over_bound(record: Record) -> str:
    return _share_of_sent(record, record.comm_bytes_lower_bound)


def _over_least(record: Record) -> str:
    return _share_of_sent(record, record.comm_bytes_least)


def _share_of_sent(record: Record, bound: float | None) -> str:
    if bound is None or record.comm_bytes_per_gpu is None:
        return "-"
    return amount(bound) + (f" ({over_least(record, bound)} sent)" if bound else "")


def over_least(record: Record, least: float | None) -> str:
    """The payload sent over a lower bound on it in bytes; a dash where either is unknown, or the bound is zero."""
    if not least or record.comm_bytes_per_gpu is None:
        return "-"
    payload = record.comm_bytes_per_gpu - (record.comm_bytes_statistics or 0)
    return f"{payload / least:.2f}x"


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


def _milliseconds(time_ms: float | None, digits: int = 4) -> str:
    return "-" if time_ms is None else f"{number(time_ms, digits)} ms"


def _share(part_ms: float | None, record: Record) -> str:
    if part_ms is None or not record.step_ms_median:
        return _milliseconds(part_ms) if record.alone_ranks else "-"
    return f"{number(part_ms, 4)} ms ({part_ms / record.step_ms_median:.0%})"


def _cores(record: Record) -> str:
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


def _held(record: Record, kind: str) -> str:
    """The memory of a training step that is of one kind."""
    return amount(getattr(record, f"{kind}_bytes") or None)


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


ROWS = (
    Row("layout, variant", lambda r: f"{r.layout}, {variant(r)}", always=True),
    Row(
        "documents", lambda r: f"{r.documents:,}, the longest of {r.longest_document:,} tokens" if r.documents else "-"
    ),
    Row("work of the busiest rank", lambda r: _imbalance(r) if r.documents or r.window else "-"),
    Row(
        "mode",
        lambda r: {"measure": "measured", "alone": "measured, ranks alone", "simulate": "SIMULATED"}[r.mode],
        True,
    ),
    Row("status", lambda r: r.status, always=True),
    Row("validation", _validation, always=True),
    Row("error against fp64", largest_error, always=True),
    Row("  out, dq, dk, dv", _errors),
    Row("  loss, gradient", lambda r: _together(r.err_loss, r.err_gradient) or "-"),
    Row("  of rows of what was timed", _timed_errors),
    Row("step [95% interval]", lambda r: _median(r) if r.measured else "-", always=True),
    Row("step [two of three]", lambda r: "-" if r.measured else _median(r), always=True),
    Row("  forward", lambda r: _milliseconds(r.forward_ms_median, 5)),
    Row("  backward", lambda r: _milliseconds(r.backward_ms_median, 5)),
    Row("  update", lambda r: _milliseconds(r.update_ms_median, 5)),
    Row("alone, with copies", lambda r: _milliseconds(r.alone_ms_median) + _host_bound(r), always=True),
    Row("throughput", lambda r: f"{number(r.tokens_per_s, 4)} tokens/s, {number(r.iters_per_s, 4)} iter/s"),
    Row("model FLOP/s for each GPU", lambda r: f"{number(r.tflops_per_gpu, 4)} TFLOP/s"),
    Row("MFU", lambda r: "- (peak not known)" if r.mfu is None else f"{r.mfu:.1%}"),
    Row("bound", _bound, always=True),
    Row("  step over it", _over_time_bound),
    Row("compute, busiest rank", lambda r: _share(r.compute_ms, r)),
    Row("  kernels", lambda r: _milliseconds(r.kernels_ms)),
    Row("  folds", lambda r: _milliseconds(r.folds_ms)),
    Row("  interpreter", lambda r: _milliseconds(r.interpreter_ms)),
    Row("  blocks alone", lambda r: _share(r.compute_only_ms_median, r)),
    Row("  transfers alone", lambda r: _share(r.communication_only_ms_median, r)),
    Row("cores busy", _cores),
    Row("attention", lambda r: _share(r.attention_ms, r)),
    Row("  waiting for transfers", lambda r: _share(r.attention_exposed_ms, r)),
    Row("matrix products and the rest", lambda r: _share(r.dense_ms, r)),
    Row("head and loss", lambda r: _share(r.loss_ms, r)),
    Row("gradients and parameters moved", lambda r: _share(r.gradient_sync_ms, r)),
    Row("sums over tensor-parallel GPUs", lambda r: _share(r.tensor_sum_ms or None, r)),
    Row("optimizer", lambda r: _share(r.optimizer_ms, r)),
    Row("loss, first and last step", lambda r: f"{r.losses[0]:.6g}, {r.losses[-1]:.6g}" if r.losses else "-"),
    Row("exposed communication", lambda r: _share(r.exposed_comm_ms, r), always=True),
    Row("sent by each GPU", lambda r: amount(r.comm_bytes_per_gpu), always=True),
    Row("  lower bound", _over_bound, always=True),
    Row("    with any split of heads", _over_least),
    Row("  of it lse", lambda r: amount(r.comm_bytes_statistics)),
    Row("  closed form", _expected),
    Row("  by the links' counters", lambda r: amount(r.interface_bytes_per_gpu)),
    Row("peak memory", lambda r: amount(r.peak_mem_bytes_max), always=True),
    Row("  from the plans", lambda r: "-" if r.model else amount(r.peak_mem_bytes_expected)),
    *(Row(f"  {kind}", partial(_held, kind=kind)) for kind in KINDS),
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


def print_points(console: Console, outcomes: Sequence[Outcome], folder: Path, *, every: bool = False) -> None:
    """Print a point and its baseline side by side, with timelines and the best variants; `every` row and variant.

    The timelines are those beside the records in `folder`.
    """
    console.width = min(console.width, SEVERAL if len(outcomes) > 1 else ONE)
    records = [outcome.record for outcome in outcomes]
    console.print(title(records[0]), style="bold")
    columns = _point_columns(records, outcomes, every=every)
    if _width(columns) <= console.width:
        console.print(_table(columns, left=columns))
    else:
        names = columns.pop("")
        for method, cells in columns.items():
            rows = [(name, cell) for name, cell in zip(names, cells, strict=True) if cell != "-"]
            table = Table("", method)
            for row in rows:
                table.add_row(*row)
            table.columns[1].overflow = "fold"
            console.print(table)
    if every:
        for said in dict.fromkeys(f"{r.method}, validation: {r.validation}" for r in records if r.validation):
            console.print(said)
    print_errors(console, records)
    print_notes(console, records, [speed_up(record, outcomes) for record in records])
    for record in records:
        if record.status == "ok" and (timeline := read_timeline(folder / f"{record.run_id}.json")):
            print_timeline(console, record.method, timeline)
    print_candidates(console, records[0], every=every)


def _point_columns(records: Sequence[Record], outcomes: Sequence[Outcome], *, every: bool) -> dict[str, list[str]]:
    """The names of rows and, of each record, its cells; two of one method are numbered."""
    rows = []
    for name, cell, always in ROWS:
        cells = ["-" if name in (NOT_ALONE if r.alone_ranks else ALONE_ONLY) else cell(r) for r in records]
        if (every and set(cells) != {"-"}) or (always and not set(cells) <= NOTHING):
            rows.append((name, *cells))
    if len(records) > 1:
        rows.append((f"speed-up over {records[-1].method}", *(speed_up(record, outcomes) for record in records)))
    methods = [record.method for record in records]
    heads = [m if methods.count(m) == 1 else f"{m} {i + 1}" for i, m in enumerate(methods)]
    return dict(zip(["", *heads], map(list, zip(*rows, strict=True)), strict=True))


def print_errors(console: Console, records: Sequence[Record]) -> None:
    """Print why records are not ok."""
    for record in records:
        if record.status != "ok":
            where = f"{record.method}, {record.gpus} GPUs, seqlen {tokens(record.seqlen)}"
            console.print(f"{where}: {record.status}: {record.error}")


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
    if _not_validated(record, last):
        return f"{ratio(last, record)} (not validated)"
    text, ends, last_ends = ratio(last, record), interval(record).ends, interval(last).ends
    if ends and last_ends:
        text += f" [{last_ends[0] / ends[1]:.3g}, {last_ends[1] / ends[0]:.3g}]"
    return text + " ~" * _overlap(record, last)


def _overlap(one: Record, other: Record) -> bool:
    """Whether two records can't be ranked: their intervals overlap, or the iterations are too few for one."""
    return one is not other and interval(one).overlaps(interval(other))


def print_notes(console: Console, records: Sequence[Record], cells: Sequence[str], *, numbered: bool = False) -> None:
    """Print each note of the records once, what their intervals are, and what marks in `cells` mean.

    A note that only some of a sweep's records have names their rows, if they are `numbered` from 1.
    """
    if any(cell.endswith("~") for cell in cells):
        console.print("~: not told apart, or too close to call: the intervals overlap")
    if any(cell.endswith("?") for cell in cells):
        console.print("?: not validated: no measurements like one of the two say how far its simulation is off")
    if any(not r.measured and r.step_ms_median and interval(r).backed for r in records):
        console.print("[ ] of a simulated step: two of three measurements like it are within")
    with_note: dict[str, list[str]] = {}
    for row, record in enumerate(records, start=1):
        for note in record.notes or ():
            with_note.setdefault(note, []).append(str(row))
    for note, rows in with_note.items():
        named = numbered and len(rows) < len(records)
        of = f" of row{'s' * (len(rows) > 1)} {', '.join(rows)}" if named else ""
        console.print(f"note{of}: {note}")


def print_candidates(console: Console, record: Record, *, every: bool) -> None:
    """Print the variant that was chosen and the next best with their times, or `every` one in the order of search."""
    candidates = record.candidates
    if not candidates or record.status != "ok":
        return
    known = [row for row in candidates if row["step_ms"] is not None]
    shown = candidates if every else sorted(known, key=lambda row: row["step_ms"])
    dealings, cells = len({row.get("layout") for row in candidates}), []
    for row in shown:
        time = f"{number(row['step_ms'], 4)}" if row["step_ms"] is not None else f">= {number(row['bound_ms'], 4)}"
        time = row.get("refused") or time
        here = (row["variant"] or None, row.get("layout", record.layout)) == (record.variant, record.layout)
        names = [row["variant"], row["layout"] if dealings > 1 else ""]
        cells.append(f"{' '.join(filter(None, names))}{'*' * here} {time}")
    head = f"variants: {len(candidates)}, the fastest in ms: "
    if every:
        bounds = " (>=: its bound is above the best)" if len(known) < len(candidates) else ""
        head = f"variants in ms{bounds}: "
    for count in range(len(cells), 0, -1):
        lines = textwrap.wrap(head + ", ".join(cells[:count]), console.width)
        if every or len(lines) <= VARIANT_LINES:
            console.print("\n" + "\n".join(lines))
            return


def print_sweep(console: Console, outcomes: Sequence[Outcome], *, every: bool = False) -> None:
    """Print a sweep as one table with a row for each point; `every` column, if necessary in several tables.

    Values that all points share are printed once, above. Columns for which there is no room are named.
    """
    best = _best(outcomes)
    points = {name: [cell(o.record) for o in outcomes] for name, cell in POINT_COLUMNS}
    shared = {name: cells[0] for name, cells in points.items() if name != "method" and len(set(cells)) == 1}
    figures = {
        "step": [_median(o.record) for o in outcomes],
        "/ best": [_against(o.record, best.get(_problem(o.record))) for o in outcomes],
        **{name: [cell(o.record) for o in outcomes] for name, cell in FIGURE_COLUMNS},
    }
    said = ", ".join(f"{name} {cell}" for name, cell in shared.items() if cell != "-")
    count = "1 point" if len(outcomes) == 1 else f"{len(outcomes)} points, all"
    console.print(f"{count}: {said}" if said else f"{len(outcomes)} points")
    status = [o.record.status + " (reused)" * o.reused for o in outcomes]
    columns = {name: cells for name, cells in points.items() if name not in shared}
    columns |= {name: cells for name, cells in figures.items() if set(cells) != {"-"}}
    columns |= {"status": status} if every or {o.record.status for o in outcomes} != {"ok"} else {}
    less: Sequence[str] = ()
    if not every:
        others = [cells for name, cells in columns.items() if name in points and name != "layout"]
        told_apart = len(set(zip(*others, strict=True))) == len(outcomes)
        less = (*("layout",) * told_apart, *WHERE_THERE_IS_ROOM)
    print_columns(console, columns, less)
    if reused := sum(outcome.reused for outcome in outcomes):
        console.print(f"reused: {reused} of {len(outcomes)} points, whose records were there (reuse=false runs them)")
    print_notes(console, [outcome.record for outcome in outcomes], figures["/ best"], numbered=True)
    print_errors(console, [outcome.record for outcome in outcomes])


POINT_COLUMNS: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("method", lambda r: r.method),
    ("variant", variant),
    ("gpus", lambda r: str(r.gpus)),
    ("seqlen", lambda r: tokens(r.seqlen)),
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
    ("exposed", lambda r: _share(r.exposed_comm_ms, r).partition("(")[2].rstrip(")") or "-"),
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
LEFT = ("method", "variant", "shape", "layout", "workload", "cluster", "mode", "status")
"""Columns that are aligned to the left."""
Columns = Mapping[str, Sequence[str]]
"""The cells of each column, by its name."""


def print_columns(console: Console, columns: Columns, less: Sequence[str] = (), *, bold: Container[int] = ()) -> None:
    """Print columns as one table, its rows `bold` so; `less` are left out, from the last, if it is too wide.

    Those left out are named below. If the others don't fit either, they stand in several tables.
    """
    kept = {name: cells for name, cells in columns.items() if name not in less}
    for name in less:
        if name in columns and _width(kept | {name: columns[name]}) <= console.width:
            kept[name] = columns[name]
    for fitting in _that_fit({name: cells for name, cells in columns.items() if name in kept}, console.width):
        console.print(_table(fitting, bold=bold), crop=False)
    if left_out := [name for name in columns if name not in kept]:
        console.print(f"--all prints these too: {', '.join(left_out)}")


def _that_fit(columns: Columns, width: int) -> Iterator[Columns]:
    """All columns or, if they are wider than `width` characters, groups of columns beside the rows' numbers."""
    if _width(columns) <= width:
        yield columns
        return
    rest = dict(columns)
    rows = {"#": [str(i + 1) for i in range(len(columns["method"]))], "method": rest.pop("method")}
    while rest:
        fitting = dict(rows)
        for name in list(rest):
            if len(fitting) > len(rows) and _width({**fitting, name: rest[name]}) > width:
                break
            fitting[name] = rest.pop(name)
        yield fitting


def _table(columns: Columns, left: Container[str] = LEFT, *, bold: Container[int] = ()) -> Table:
    """A table as wide as its columns, so that no cell is wrapped or cut; `left` are aligned to the left."""
    table = Table(width=_width(columns))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for i, cells in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(*cells, style="bold" if i in bold else None)
    return table


def _width(columns: Columns) -> int:
    """The width of a table in characters, with borders."""
    return 1 + sum(3 + max(map(cell_len, (name, *cells))) for name, cells in columns.items())


def _against(record: Record, fastest: Record | None) -> str:
    """The step divided by the fastest one of its problem."""
    if not (record.step_ms_median and fastest and fastest.step_ms_median):
        return "-"
    if record is not fastest and _not_validated(record, fastest):
        return f"{ratio(record, fastest)} ?"
    return ratio(record, fastest) + " ~" * _overlap(record, fastest)


def _problem(record: Record) -> tuple:
    """Equal for points that can be compared. Modes are never mixed."""
    return record.mode, record.cluster, record.gpus, record.workload_id, record.wire_dtype


def _best(outcomes: Sequence[Outcome]) -> dict[tuple, Record]:
    """The fastest record of each problem."""
    slowest_first = sorted((o.record for o in outcomes), key=lambda r: -(r.step_ms_median or 0))
    return {_problem(record): record for record in slowest_first if record.step_ms_median}
