"""python -m analysis.pictures RECORD.json ...: timelines, assignment matrices and bounds of records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sp_bench import records
from sp_bench.analysis import assignments
from sp_bench.analysis.assignments import assignment
from sp_bench.analysis.figure import WIDTH, Figure, colours, labelled, new_figure, sources
from sp_bench.analysis.frames import named
from sp_bench.analysis.number import of_record
from sp_bench.analysis.timelines import timeline
from sp_bench.cli.arguments import keys_and_paths, run_command
from sp_bench.cli.words import lengths, shape
from sp_bench.errors import RequestError
from sp_bench.plan.method import PHASES
from sp_bench.records import Record
from sp_bench.workload import workload_named

COMMAND = ("pictures", "RECORD ...", "a record's timeline, assignment matrix and bound")

__all__ = ["assignment", "bound_bars", "timeline"]

USAGE = """\
python -m analysis.pictures RECORD.json ... [out=FOLDER] [ranks=0,1]

Draws for each record its timeline, by stream if simulated (with trace= set) or by phase and iteration if measured, and
its assignment matrix by rank, by step and by cost. One more picture shows the steps of all records beside their bounds.
Each picture is written as PDF, SVG and PNG.

  out=results/pictures   the folder
  ranks=0,1              ranks of the timeline
"""
DEFAULTS = {"out": "results/pictures", "ranks": ""}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command("analysis.pictures", USAGE, _draw, argv)


def _draw(arguments: list[str]) -> int:
    out, ranks, paths = _parsed(arguments)
    records = [(path, _read(path)) for path in paths]
    figures = [figure for path, record in records for figure in _of(path, record, ranks)]
    if bounded := [record for _, record in records if record.bound_ms]:
        figures.append(bound_bars(bounded))
    if not figures:
        raise RequestError(" ".join(map(str, paths)), "have nothing to draw", "a record that is ok would work")
    for figure in figures:
        figure.save(out)
        print(f"{out / figure.name}.{{pdf,svg,png}}: {figure.title}. {figure.note}".rstrip())
    return 0


def _parsed(arguments: Sequence[str]) -> tuple[Path, list[int] | None, list[Path]]:
    given, paths = keys_and_paths(arguments, DEFAULTS)
    given = {**DEFAULTS, **given}
    if not paths:
        raise RequestError("no records", "there is nothing to draw", "results/<run_id>.json would work")
    ranks = given["ranks"].split(",") if given["ranks"] else []
    if not all(rank.isdecimal() for rank in ranks):
        raise RequestError(f"ranks={given['ranks']}", "must be numbers", "ranks=0,1 would work")
    return Path(given["out"]), [int(rank) for rank in ranks] or None, [Path(path) for path in paths]


def _read(path: Path) -> Record:
    try:
        return records.read(path)
    except (OSError, ValueError) as error:
        raise RequestError(str(path), f"is not a record ({error})", "results/<run_id>.json would work") from None


def _of(path: Path, record: Record, ranks: Sequence[int] | None) -> list[Figure]:
    """The pictures of one record: none for a failed point, no assignment matrix for a peer's implementation."""
    timed = record.mode != "alone" and {"trace", "samples"} & set(records.beside(path))
    figures = [timeline(record, path, ranks)] if timed else []
    if record.status == "ok" and record.impl is None:
        kind = workload_named(record.workload)
        phases = [phase for phase in kind.phases_of(record.phase) if phase in PHASES]
        figures += [assignments.of_record(record, phase) for phase in phases]
    return figures


def bound_bars(found: Sequence[Record], name: str = "bounds", title: str = "Steps and their bounds") -> Figure:
    """A bar for each record: the step in ms, split into its bound and the rest, with the share of the bound.

    Raises ValueError for a record without a bound.
    """
    steps, bounds = ([of_record(record, field) for record in found] for field in ("step_ms_median", "bound_ms"))
    canvas, axes = new_figure(width=WIDTH, height=1.1 + 0.34 * len(found))
    ax, (dark, light) = axes[0, 0], colours(["first", "second"]).values()
    kind = " or ".join(sorted({number.kind for number in steps}))
    at, bound_ms = range(len(found)), [number.known for number in bounds]
    rest_ms = [number.known - bound for number, bound in zip(steps, bound_ms, strict=True)]
    ax.barh(at, bound_ms, color=dark, label=labelled("bound", bounds[0].kind))
    style = {"color": light, "hatch": "///", "edgecolor": "white", "linewidth": 0}
    ax.barh(at, rest_ms, left=bound_ms, label=labelled("rest of the step", kind), **style)
    for y, (record, step, bound) in enumerate(zip(found, steps, bounds, strict=True)):
        text = f" bound {bound.over(step).known:.0%} of it, by {record.bound_by}"
        ax.text(step.known, y, text, va="center", size=7)
    ax.set_yticks(at, map(_label, found))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.6 * max(number.known for number in steps))
    ax.set_xlabel("step (ms)")
    ax.grid(visible=False, axis="y")
    ax.legend(loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=2, frameon=False)
    return Figure(name, title, canvas, sources([*steps, *bounds]))


def _label(record: Record) -> str:
    """The point in two lines: method and variant, then GPUs, cluster, tokens and shape."""
    about = f"{record.gpus} x {record.cluster}, {lengths(record)}, {shape(record)}"
    return f"{named(record)}\n{about}"


if __name__ == "__main__":
    sys.exit(main())
