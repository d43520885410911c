"""python -m analysis.compare A B: which points became faster or slower from one set of records to another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from sp_bench.analysis import frames
from sp_bench.analysis.number import RECORD_KINDS
from sp_bench.analysis.pairs import Paired, Point, differences, in_turn, machines, paired
from sp_bench.analysis.pull_request import markdown, summary
from sp_bench.analysis.verdict import (
    ENOUGH_RUNS,
    OF_AMOUNTS,
    ROUNDING,
    SLOWER,
    Ratio,
    Row,
    exact,
    of_medians,
    over_runs,
)
from sp_bench.cli.arguments import flag, keys_and_paths, run_command
from sp_bench.cli.columns import make_console
from sp_bench.cli.words import amount, number
from sp_bench.errors import RequestError

COMMAND = ("compare", "A B same=0.02", "SAME, FASTER, SLOWER or AMBIGUOUS, point by point")

USAGE = """\
python -m analysis.compare A B [same=0.02] [csv=FILE] [fail_slower=true|false] [--markdown]

A and B are records (results/<run_id>.json), folders of them, or the records in a folder by one commit, such as
results@1a2b3c4. Points of two folders are paired by their whole request; two single records only need the same
attention. Ratios are B / A.

  SAME        the 95% interval of the ratio is within [1 / (1 + same), 1 + same]
  FASTER      it is below 1, and the ratio below 1 / (1 + same)      SLOWER: the mirror image
  AMBIGUOUS   anything else: more iterations, or both in one sweep, could tell

With three or more runs of a point on either side, which stand in folders of their own below A and B, the interval is
that of all ratios of a run of B and one of A, so that it has the machine's drift between runs too.

  same=0.02          a smaller difference counts as none; by default 0.02 for measured times, 0 for simulated ones
  csv=FILE           every number, with its records, in seconds and bytes
  fail_slower=false  exit with 1 if a step is SLOWER, or a point that was ok in A is not in B
  --markdown         the table that reviewers of a change ask for, to be pasted into a pull request

Simulated times and bytes have no noise, so no interval. Measured and simulated points are not compared.
Exit codes: 0 ok, 1 with fail_slower=true, 2 a request that can't be served.
"""
MARKDOWN = "--markdown"
KEYS = ("same", "csv", "fail_slower")
SAME_MEASURED = 0.02
TIMES = frames.PHASES
AMOUNTS = {"sent": "comm_bytes_per_gpu", "peak memory": "peak_mem_bytes_max"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command("analysis.compare", USAGE, _compare, argv, [MARKDOWN])


def _compare(arguments: list[str]) -> int:
    given, names = keys_and_paths([argument for argument in arguments if argument != MARKDOWN], KEYS)
    if len(names) != 2:
        raise RequestError(
            " ".join(names) or "no records", "must be two, A and B", "results/before results/after would"
        )
    same, fail = _threshold(given.get("same")), flag({"fail_slower": False} | given, "fail_slower")
    pairing = paired(*names)
    rows = [compare(a, b, same) for a, b in pairing.pairs]
    if given.get("csv"):
        path = Path(given["csv"])
        path.parent.mkdir(parents=True, exist_ok=True)
        frame(pairing, rows).to_csv(path, index=False)
    if MARKDOWN in arguments:
        print(markdown(names, pairing, rows, _notes(pairing, rows)))
    else:
        show(make_console(), names, pairing, rows)
    return 1 if fail and any(map(worse, pairing.pairs, rows)) else 0


def _threshold(same: str | None) -> float | None:
    """The difference that counts as none; None: SAME_MEASURED for measured times, ROUNDING for simulated ones."""
    try:
        threshold = None if same is None else float(same)
    except ValueError:
        threshold = -1.0
    if threshold is not None and not 0 <= threshold < 1:
        raise RequestError(f"same={same}", "must be a number from 0 to below 1", "same=0.02 would work")
    return threshold


def compare(a: Point, b: Point, same: float | None = None) -> list[Row]:
    """Step, forward, backward, bytes sent and peak memory of a pair of one mode. The step comes first."""
    measured = a.record.measured
    limit = same if same is not None else SAME_MEASURED if measured else ROUNDING
    samples = [frames.iterations(frames.samples(point.record, point.path)) for point in (a, b)] if measured else []
    rows = []
    for name in ("step", *TIMES):
        one, other = _seconds(a, name), _seconds(b, name)
        ratio = None
        if one is not None and other is not None:
            ratio = _measured(name, a, b, samples, other / one) if measured else exact(one, other)
        rows.append(Row(name, one, other, ratio, ratio.verdict(limit) if ratio else "-"))
    for name, field in AMOUNTS.items():
        one, other = getattr(a.record, field), getattr(b.record, field)
        ratio = None if one is None or other is None else exact(one, other)
        rows.append(Row(name, one, other, ratio, OF_AMOUNTS[ratio.verdict(ROUNDING)] if ratio else "-"))
    return rows


def _seconds(point: Point, name: str) -> float | None:
    milliseconds = getattr(point.record, f"{name}_ms_median")
    return None if milliseconds is None else milliseconds / 1e3


def _measured(name: str, a: Point, b: Point, samples: Sequence[pd.DataFrame], ratio: float) -> Ratio:
    """The ratio of measured medians with its interval; without one where a record has no samples beside it."""
    if min(len(a.runs), len(b.runs)) >= ENOUGH_RUNS:
        of_runs = [np.array([getattr(run.record, f"{name}_ms_median") for run in point.runs]) for point in (a, b)]
        return over_runs(*of_runs)
    if any(frame.empty for frame in samples):
        return Ratio(ratio, None, None, "no samples beside the record")
    of_a, of_b = (np.asarray(frame[name]) for frame in samples)
    return of_medians(of_a, of_b, in_turn=in_turn(a.record, b.record), seed=a.record.seed or 0)


def worse(pair: tuple[Point, Point], rows: Sequence[Row]) -> bool:
    """Whether the step of B is SLOWER, or B failed and A did not."""
    a, b = pair
    return rows[0].verdict == SLOWER or (a.record.status == "ok" and b.record.status != "ok")


def frame(found: Paired, rows: Sequence[Sequence[Row]]) -> pd.DataFrame:
    """A row for each quantity of each pair: seconds or bytes, ratio with interval, verdict, and the run_ids."""
    lines: list[dict[str, Any]] = []
    for (a, b), of_pair in zip(found.pairs, rows, strict=True):
        about = {"point_a": a.label, "point_b": b.label, "mode": RECORD_KINDS[a.record.mode]}
        about |= {"status_a": a.record.status, "status_b": b.record.status}
        ids = {"run_id_a": a.record.run_id, "run_id_b": b.record.run_id}
        for row in of_pair:
            ratio = row.ratio or Ratio(float("nan"), None, None)
            interval = {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}
            unit = "bytes" if row.quantity in AMOUNTS else "s"
            what = {"quantity": row.quantity, "unit": unit, "a": row.a, "b": row.b}
            lines.append(about | what | interval | {"verdict": row.verdict, "why": ratio.why} | ids)
    return pd.DataFrame(lines)


def show(console: Console, names: Sequence[str], found: Paired, rows: Sequence[Sequence[Row]]) -> None:
    """Print a row for each pair, then the points of A or B alone, the notes, and the number of steps by verdict."""
    modes = " and ".join(dict.fromkeys(RECORD_KINDS[a.record.mode] for a, _ in found.pairs))
    table = Table(title=f"{modes}: B / A, A = {names[0]}, B = {names[1]}", title_justify="left", title_style="bold")
    right = ("step A, ms", "step B, ms", "B / A [95%]")
    for name in ("point", "mode", *right, "step", *TIMES, *AMOUNTS):
        table.add_column(name, justify="right" if name in right else "left")
    for (a, b), of_pair in zip(found.pairs, rows, strict=True):
        table.add_row(*_cells(a, b, of_pair))
    console.print(table)
    for name, points in (("A", found.only_a), ("B", found.only_b)):
        for point in points:
            console.print(f"only in {name}: {point.label} ({RECORD_KINDS[point.record.mode]})", highlight=False)
    for note in _notes(found, rows):
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(summary(rows), highlight=False)


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
            interval += step.ratio.ends or " (no interval)"
    shown = [f"{row.ratio.value:.3f} {row.verdict}" if row.ratio else "-" for row in others]
    return [label, RECORD_KINDS[a.record.mode], *milliseconds, interval, step.verdict, *shown]


def _notes(found: Paired, rows: Sequence[Sequence[Row]]) -> list[str]:
    notes = list(found.notes)
    if len(found.pairs) == 1:
        (a, b) = found.pairs[0]
        notes += [f"differs: {difference}" for difference in differences(a, b)]
        for point in (a, b):
            notes += [f"{point.label}: {point.record.error}"] if point.record.error else []
        notes += [f"{row.quantity}: {amount(row.a)}, {amount(row.b)}" for row in rows[0] if row.quantity in AMOUNTS]
    notes += machines(found.pairs)
    few = [(a, b) for a, b in found.pairs if min(len(a.runs), len(b.runs)) < ENOUGH_RUNS]
    apart = [(a, b) for a, b in few if a.record.mode == "measure" and not in_turn(a.record, b.record)]
    if apart:
        notes.append(
            f"pairs measured in separate runs: {len(apart)}. Their intervals leave out the drift of the machine"
            " between runs; points of one sweep are timed in turn."
        )
    whys = dict.fromkeys(row.ratio.why for of_pair in rows for row in of_pair if row.ratio and row.ratio.why)
    return notes + list(whys)


if __name__ == "__main__":
    sys.exit(main())
