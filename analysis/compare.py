"""python -m analysis.compare A B: what became faster or slower from one set of records to another."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from sp_bench.analysis import frames
from sp_bench.analysis.number import RECORD_KINDS
from sp_bench.analysis.pairs import Paired, Point, differences, in_turn, machines, paired
from sp_bench.analysis.verdict import OF_AMOUNTS, ROUNDING, SLOWER, Ratio, exact, of_medians
from sp_bench.cli.arguments import keys_and_paths, run_command
from sp_bench.cli.report import amount, make_console, number
from sp_bench.errors import RequestError

USAGE = """\
python -m analysis.compare A B [same=0.02] [csv=FILE] [fail_slower=true|false]

A and B are records (results/<run_id>.json) or folders of them. Points of two folders are paired by everything that was
asked for; two single records may differ in all but the attention itself. Ratios are B / A.

  SAME        the 95% interval of the ratio is within [1 / (1 + same), 1 + same]
  FASTER      it is below 1, and the ratio below 1 / (1 + same)      SLOWER: the mirror image
  AMBIGUOUS   anything else: more iterations, or both in one sweep, could tell

  same=0.02          the difference that counts as none; without it 0.02 for measured times, none for simulated ones
  csv=FILE           every number, with its records, in seconds and bytes
  fail_slower=false  exit with 1 if a step is SLOWER, or a point that was ok in A is not in B

Simulated times and bytes have no noise, so no interval. Measured and simulated points are not compared.
Exit codes: 0 ok, 1 with fail_slower=true, 2 a request that can't be served.
"""
KEYS = ("same", "csv", "fail_slower")
SAME_MEASURED = 0.02
TIMES = frames.PHASES
AMOUNTS = {"sent": "comm_bytes_per_gpu", "peak memory": "peak_mem_bytes_max"}


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    same: float | None = None
    """The difference that counts as none; None: SAME_MEASURED of measured times, and only rounding of simulated."""
    csv: Path | None = None
    fail_slower: bool = False


@dataclass(frozen=True)
class Row:
    """One quantity of one pair, in seconds or bytes. Without ratio where one of them has none."""

    quantity: str
    a: float | None
    b: float | None
    ratio: Ratio | None
    verdict: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command("analysis.compare", USAGE, _compare, argv)


def _compare(arguments: list[str]) -> int:
    names, options = parsed(arguments)
    found = paired(*names)
    rows = [compare(a, b, options.same) for a, b in found.pairs]
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        frame(found, rows).to_csv(options.csv, index=False)
    show(make_console(), names, found, rows)
    return 1 if options.fail_slower and any(map(worse, found.pairs, rows)) else 0


def parsed(arguments: Sequence[str]) -> tuple[tuple[str, str], Options]:
    """A, B and the options. Raises RequestError."""
    given, names = keys_and_paths(arguments, KEYS)
    if len(names) != 2:
        raise RequestError(
            " ".join(names) or "no records", "must be two, A and B", "results/before results/after would"
        )
    same = given.get("same")
    try:
        threshold = None if same is None else float(same)
    except ValueError:
        threshold = -1.0
    if threshold is not None and not 0 <= threshold < 1:
        raise RequestError(f"same={same}", "must be a number from 0 to below 1", "same=0.02 would work")
    if (fail := given.get("fail_slower", "false")) not in ("true", "false"):
        raise RequestError(f"fail_slower={fail}", "must be true or false", "fail_slower=true would work")
    path = Path(given["csv"]) if given.get("csv") else None
    return (names[0], names[1]), Options(threshold, path, fail == "true")


def compare(a: Point, b: Point, same: float | None = None) -> list[Row]:
    """Step, forward, backward, bytes sent and peak memory of a pair of one mode, the step first."""
    if a.record.measured:
        times, limit = _measured(a, b), SAME_MEASURED if same is None else same
    else:
        times, limit = _simulated(a, b), ROUNDING if same is None else same
    found = [Row(name, one, other, r, r.verdict(limit) if r else "-") for name, one, other, r in times]
    for name, field in AMOUNTS.items():
        one, other = getattr(a.record, field), getattr(b.record, field)
        ratio = None if one is None or other is None else exact(one, other)
        found.append(Row(name, one, other, ratio, OF_AMOUNTS[ratio.verdict(ROUNDING)] if ratio else "-"))
    return found


Timed = tuple[str, float | None, float | None, Ratio | None]


def _of_record(point: Point, name: str) -> float | None:
    milliseconds = getattr(point.record, f"{name}_ms_median")
    return None if milliseconds is None else milliseconds / 1e3


def _simulated(a: Point, b: Point) -> list[Timed]:
    found: list[Timed] = []
    for name in ("step", *TIMES):
        one, other = _of_record(a, name), _of_record(b, name)
        found.append((name, one, other, None if one is None or other is None else exact(one, other)))
    return found


def _measured(a: Point, b: Point) -> list[Timed]:
    samples = [frames.iterations(frames.samples(point.record, point.path)) for point in (a, b)]
    together, found = in_turn(a.record, b.record), []
    for name in ("step", *TIMES):
        one, other = _of_record(a, name), _of_record(b, name)
        if one is None or other is None:
            found.append((name, one, other, None))
        elif any(frame.empty for frame in samples):
            found.append((name, one, other, Ratio(other / one, None, None, "no samples beside the record")))
        else:
            of_a, of_b = (np.asarray(frame[name]) for frame in samples)
            found.append((name, one, other, of_medians(of_a, of_b, in_turn=together, seed=a.record.seed or 0)))
    return found


def worse(pair: tuple[Point, Point], rows: Sequence[Row]) -> bool:
    """Whether the step is SLOWER, or B failed where A did not."""
    a, b = pair
    return rows[0].verdict == SLOWER or (a.record.status == "ok" and b.record.status != "ok")


def frame(found: Paired, rows: Sequence[Sequence[Row]]) -> pd.DataFrame:
    """A row for each quantity of each pair: seconds or bytes, ratio with interval, verdict, both records."""
    lines: list[dict[str, Any]] = []
    for (a, b), of_pair in zip(found.pairs, rows, strict=True):
        about = {"point_a": a.label, "point_b": b.label, "mode": RECORD_KINDS[a.record.mode]}
        about |= {"status_a": a.record.status, "status_b": b.record.status}
        ids = {"run_id_a": a.record.run_id, "run_id_b": b.record.run_id}
        for row in of_pair:
            ratio = row.ratio or Ratio(float("nan"), None, None)
            interval = {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}
            what = {
                "quantity": row.quantity,
                "unit": "bytes" if row.quantity in AMOUNTS else "s",
                "a": row.a,
                "b": row.b,
            }
            lines.append(about | what | interval | {"verdict": row.verdict, "why": ratio.why} | ids)
    return pd.DataFrame(lines)


def show(console: Console, names: Sequence[str], found: Paired, rows: Sequence[Sequence[Row]]) -> None:
    """A row for each pair, then what is in one only, notes, and how many steps got which verdict."""
    modes = " and ".join(dict.fromkeys(RECORD_KINDS[a.record.mode] for a, _ in found.pairs))
    table = Table(title=f"{modes}: B / A, A = {names[0]}, B = {names[1]}", title_justify="left", title_style="bold")
    for name in ("point", "mode"):
        table.add_column(name)
    for name in ("step A, ms", "step B, ms", "B / A [95%]"):
        table.add_column(name, justify="right")
    for name in ("step", *TIMES, *AMOUNTS):
        table.add_column(name)
    for (a, b), of_pair in zip(found.pairs, rows, strict=True):
        table.add_row(*_cells(a, b, of_pair))
    console.print(table)
    for name, points in (("A", found.only_a), ("B", found.only_b)):
        for point in points:
            console.print(f"only in {name}: {point.label} ({RECORD_KINDS[point.record.mode]})", highlight=False)
    for note in _notes(found, rows):
        console.print(f"note: {note}", highlight=False, markup=False)
    counts = Counter(of_pair[0].verdict for of_pair in rows)
    failed = counts.pop("-", 0)
    words = [f"{count} {verdict}" for verdict, count in counts.most_common()] + [f"{failed} without step"] * bool(
        failed
    )
    console.print(f"steps: {', '.join(words)}", highlight=False)


def _cells(a: Point, b: Point, of_pair: Sequence[Row]) -> list[str]:
    label = a.label if a.label == b.label else f"{a.label}\n{b.label}"
    step, *others = of_pair
    milliseconds = [
        number(value * 1e3, 5) if value is not None else point.record.status
        for point, value in ((a, step.a), (b, step.b))
    ]
    interval = "-"
    if step.ratio:
        interval = f"{step.ratio.value:.3f}"
        if a.record.mode == "measure":
            low, high = step.ratio.low, step.ratio.high
            interval += f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else " (no interval)"
    shown = [f"{row.ratio.value:.3f} {row.verdict}" if row.ratio else "-" for row in others]
    return [label, RECORD_KINDS[a.record.mode], *milliseconds, interval, step.verdict, *shown]


def _notes(found: Paired, rows: Sequence[Sequence[Row]]) -> list[str]:
    notes = list(found.notes)
    if len(found.pairs) == 1:
        (a, b) = found.pairs[0]
        notes += [f"asked for otherwise: {difference}" for difference in differences(a, b)]
        for point in (a, b):
            notes += [f"{point.label}: {point.record.error}"] if point.record.error else []
        notes += [f"{row.quantity}: {amount(row.a)}, {amount(row.b)}" for row in rows[0] if row.quantity in AMOUNTS]
    notes += machines(found.pairs)
    apart = [(a, b) for a, b in found.pairs if a.record.mode == "measure" and not in_turn(a.record, b.record)]
    if apart:
        notes.append(
            f"pairs measured in separate runs: {len(apart)}. How much the machine drifts from run to run is in no"
            " interval; points of one sweep are timed in turn."
        )
    whys = dict.fromkeys(row.ratio.why for of_pair in rows for row in of_pair if row.ratio and row.ratio.why)
    return notes + list(whys)


if __name__ == "__main__":
    sys.exit(main())
