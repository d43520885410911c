"""Timelines of records: the streams of some ranks if simulated, the phases of all ranks if measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from sp_bench import records
from sp_bench.analysis import frames
from sp_bench.analysis.figure import WIDTH, Figure, colours, labelled, new_figure
from sp_bench.analysis.frames import named
from sp_bench.analysis.number import RECORD_KINDS, record_source
from sp_bench.errors import RequestError
from sp_bench.plan.ops import BLOCKS
from sp_bench.records import Record

FEW = 2
"""The number of ranks drawn of a simulated record by default."""
MOST = 16
"""The number of ranks drawn of a measured record by default."""
FEW_BARS = 100
"""With more bars in a row, edges are left out: they would cover the bars."""
ALL_RANKS, TRANSFERS = "all ranks", "transfers"


class Span(NamedTuple):
    """A time in which a stream or phase of a rank was busy, in ms from the start of the (first) step."""

    row: str
    what: str
    start_ms: float
    end_ms: float


def timeline(record: Record, path: Path, ranks: Sequence[int] | None = None) -> Figure:
    """The timeline of a record whose file is `path`. Without `ranks`, the first few are drawn.

    Simulated: the spans of each rank's streams, phase after phase. Measured: each rank's own time of each phase of
    each iteration; all ranks start a phase together, and what ran between iterations is left out.
    Raises RequestError where there is no timeline beside the record, or none of these ranks.
    """
    kind = RECORD_KINDS[record.mode]
    by_rank, marks = spans_of(record, path)
    if record.mode == "simulate":
        chosen = _chosen(ranks, by_rank, FEW)
        kinds = {BLOCKS: "blocks and folds", TRANSFERS: "transfers"}
        since, note = "the step's start", "Dashed lines: a phase ends."
    else:
        chosen = _chosen(ranks, by_rank, MOST)
        kinds = {phase: phase for phase in frames.PHASES}
        since = "the first iteration's start, iterations end to end"
        note = "All ranks start each phase together; white is waiting for the slowest. Dashed lines: an iteration ends."
    spans = [span for rank in chosen for span in by_rank[rank]]
    rows = list(dict.fromkeys(span.row for span in spans))
    canvas, axes = new_figure(width=WIDTH, height=1.3 + 0.24 * len(rows))
    draw_spans(axes[0, 0], spans, rows, marks, {what: labelled(text, kind) for what, text in kinds.items()})
    axes[0, 0].set_xlabel(f"ms since {since}")
    title = f"{named(record)} on {record.gpus} x {record.cluster}: timeline, {kind}"
    return Figure(f"{record.run_id}-timeline", title, canvas, (record_source(record),), note)


def spans_of(record: Record, path: Path) -> tuple[dict[int, list[Span]], dict[str, float]]:
    """The spans of each rank in the files beside a record, and the end of each phase or iteration in ms.

    Raises RequestError where there is no timeline beside the record.
    """
    beside = records.beside(path)
    if record.mode == "simulate" and "trace" in beside:
        return _simulated(json.loads(beside["trace"].read_text()))
    if record.mode == "measure" and "samples" in beside:
        return _measured(record, path)
    raise RequestError(str(path), "has no timeline beside it", "a simulated point with trace=8 would have one")


def _chosen(ranks: Sequence[int] | None, there: Iterable[int], most: int) -> list[int]:
    there = sorted(there)
    for rank in ranks or ():
        if rank not in there:
            known = f"{there[0]} to {there[-1]}" if there else "no rank"
            raise RequestError(f"ranks={rank}", f"the timeline beside the record has {known}", "one of them would work")
    return list(ranks) if ranks else there[:most]


def _simulated(trace: Mapping[str, Any]) -> tuple[dict[int, list[Span]], dict[str, float]]:
    """The spans of each rank, and the end of each phase in ms."""
    events = trace["traceEvents"]
    named = {(e["pid"], e["tid"], e["name"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    by_rank: dict[int, list[Span]] = {}
    marks: dict[str, float] = {}
    for event in (e for e in events if e["ph"] == "X"):
        process, stream = (named[event["pid"], event["tid"], f"{kind}_name"] for kind in ("process", "thread"))
        start_ms, end_ms = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
        if process == ALL_RANKS:
            marks[event["name"]] = end_ms
        else:
            what = BLOCKS if stream == BLOCKS else TRANSFERS
            rank = int(process.removeprefix("rank "))
            by_rank.setdefault(rank, []).append(Span(f"{process} {stream}", what, start_ms, end_ms))
    return by_rank, marks


def _measured(record: Record, path: Path) -> tuple[dict[int, list[Span]], dict[str, float]]:
    """The spans of each rank, and the end of each iteration in ms."""
    samples = frames.samples(record, path)
    longest = frames.iterations(samples).drop(columns="step") * 1e3
    ends = np.cumsum(longest.to_numpy().ravel()).reshape(longest.shape)
    starts = dict(zip(longest.columns, (ends - longest.to_numpy()).T, strict=True))
    by_rank: dict[int, list[Span]] = {}
    for sample in samples.sort_values(["rank", "iteration", "phase"]).to_dict("records"):
        start_ms = float(starts[sample["phase"]][sample["iteration"]])
        span = Span(f"rank {sample['rank']}", sample["phase"], start_ms, start_ms + 1e3 * sample["seconds"])
        by_rank.setdefault(sample["rank"], []).append(span)
    return by_rank, {str(i): float(end) for i, end in enumerate(ends[:, -1])}


def draw_spans(
    ax: Axes, spans: Sequence[Span], rows: Sequence[str], marks: Mapping[str, float], legend: Mapping[str, str]
) -> None:
    """Draw the spans of some rows, with a line where a phase ends; `legend` says what each kind of span is."""
    palette = dict(zip(legend, colours(["first", "second"]).values(), strict=True))
    for what in legend:
        for at, row in enumerate(rows):
            bars = [(s.start_ms, s.end_ms - s.start_ms) for s in spans if (s.row, s.what) == (row, what)]
            width = 0.15 if len(bars) < FEW_BARS else 0
            ax.broken_barh(bars, (at - 0.4, 0.8), facecolor=palette[what], edgecolor="white", linewidth=width)
    for name, end_ms in marks.items():
        ax.axvline(end_ms, color="0.2", linestyle="--", linewidth=0.6)
        if not name.isdigit():
            ax.annotate(name, (end_ms, 1), xycoords=("data", "axes fraction"), ha="right", va="bottom", size=7)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, max(marks.values()))
    ax.grid(visible=False, axis="y")
    handles = [Patch(color=palette[what], label=text) for what, text in legend.items()]
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.02), ncols=2, frameon=False)
