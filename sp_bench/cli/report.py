"""Print outcomes: a point beside its baseline, or a sweep as one table. What is asked for most fits a terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sp_bench import draw
from sp_bench.cli.columns import ONE, SEVERAL, print_columns, table_of, width_of
from sp_bench.cli.rows import ALONE_ONLY, FIGURE_COLUMNS, NOT_ALONE, NOTHING, POINT_COLUMNS, ROWS, WHERE_THERE_IS_ROOM
from sp_bench.cli.words import against, number, speed_up, step, title, tokens
from sp_bench.point import Outcome
from sp_bench.records import Record
from sp_bench.records.interval import interval
from sp_bench.records.timeline import MeasuredTimeline, SimulatedTimeline, Timeline, read_timeline

VARIANT_LINES = 3
"""The most lines that a point's variants take, unless all are asked for."""


def print_json(records: Sequence[Record]) -> None:
    """Print records to stdout, one JSON object a line."""
    for record in records:
        print(json.dumps(record.to_dict()))


def print_points(console: Console, outcomes: Sequence[Outcome], folder: Path, *, every: bool = False) -> None:
    """Print a point and its baseline side by side, with timelines and the best variants; `every` row and variant.

    The timelines are those beside the records in `folder`.
    """
    console.width = min(console.width, SEVERAL if len(outcomes) > 1 else ONE)
    records = [outcome.record for outcome in outcomes]
    console.print(title(records[0]), style="bold")
    columns = _point_columns(records, outcomes, every=every)
    if width_of(columns) <= console.width:
        console.print(table_of(columns, left=columns))
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
    layouts, cells = len({row.get("layout") for row in candidates}), []
    for row in shown:
        time = f"{number(row['step_ms'], 4)}" if row["step_ms"] is not None else f">= {number(row['bound_ms'], 4)}"
        time = row.get("refused") or time
        is_chosen = (row["variant"] or None, row.get("layout", record.layout)) == (record.variant, record.layout)
        names = [row["variant"], row["layout"] if layouts > 1 else ""]
        cells.append(f"{' '.join(filter(None, names))}{'*' * is_chosen} {time}")
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
        "step": [step(o.record) for o in outcomes],
        "/ best": [against(o.record, best.get(_problem(o.record))) for o in outcomes],
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


def _problem(record: Record) -> tuple:
    """Equal for points that can be compared. Modes are never mixed."""
    return record.mode, record.cluster, record.gpus, record.workload_id, record.wire_dtype


def _best(outcomes: Sequence[Outcome]) -> dict[tuple, Record]:
    """The fastest record of each problem."""
    slowest_first = sorted((o.record for o in outcomes), key=lambda r: -(r.step_ms_median or 0))
    return {_problem(record): record for record in slowest_first if record.step_ms_median}


NAME, FRAME = 12, 5
"""Characters of the name before a bar, and of the frame around both."""


def print_timeline(console: Console, method: str, timeline: Timeline) -> None:
    """Print bars. Simulated: arrivals, blocks and waits of one rank. Measured: each rank's mean step."""
    width = max(1, console.width - NAME - FRAME)
    about, bars = _simulated(timeline, width) if isinstance(timeline, SimulatedTimeline) else _measured(timeline, width)
    console.print(Text.assemble("\n", (method, "bold"), about))
    for name, bar in bars.items():
        console.print(f"  {name:>{NAME}} |{bar}|")


def _simulated(timeline: SimulatedTimeline, width: int) -> tuple[str, dict[str, str]]:
    """(the title, the bars by name)."""
    shown = {f"{lane} in": spans for lane, spans in timeline.lanes.items()}
    shown |= {"blocks": timeline.blocks, "waiting": timeline.waits}
    spans = [(name, start_s, end_s) for name, times in shown.items() for start_s, end_s in times]
    phases = " then ".join(timeline.phases)
    about = f", rank {timeline.rank}, what it waits for, simulated: {phases}, {timeline.end_s * 1e3:.4g} ms"
    return about, draw.timeline(spans, timeline.end_s, width)


def _measured(timeline: MeasuredTimeline, width: int) -> tuple[str, dict[str, str]]:
    """(the title, the bars by rank)."""
    means = enumerate(zip(timeline.blocks_s, timeline.waits_s, strict=True))
    bars = {f"rank {rank}": draw.shares(list(zip("█░", parts, strict=True)), width) for rank, parts in means}
    return ", every rank's mean step, measured: █ blocks and folds, ░ waiting", bars
