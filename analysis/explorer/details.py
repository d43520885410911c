"""The details of a point that the explorer opens: timeline, assignment matrices, bytes by link, provenance, command."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sp_bench.analysis.assignments import matrix, planned
from sp_bench.analysis.frames import PHASES
from sp_bench.analysis.number import record_source
from sp_bench.analysis.timelines import MOST, Span, spans_of
from sp_bench.errors import RequestError
from sp_bench.plan.ops import BLOCKS
from sp_bench.records import Record
from sp_bench.workload import workload_named

MOST_CHUNKS = 64
"""Chunks along a side of a matrix; of larger ones the page has the corner."""
MOST_ITERATIONS = 10
"""Iterations of a measured timeline."""
RANKS = 4
"""Ranks of a simulated timeline."""
RESOLUTION = 1000
"""Spans of a simulated timeline that are closer than this part of it are drawn as one."""
PUBLIC = ("code_version", "git_commit", "git_dirty", "versions", "platform", "measured_at")
"""Parts of the provenance that name no machine, folder or person: those of a file that may be given away."""

Json = dict[str, Any]


def of_point(record: Record, path: Path, *, private: bool, own: Path | None = None) -> Json:
    """The facts of a point beside its row: its command, its provenance, bytes by link and lane, and notes.

    `own` is the folder of --config-dir, by whose files the command is shorter; unless `private`, only its name is said.
    """
    command = record_source(record, own).text if record.config else ""
    if own and not private:
        command = command.replace(f"--config-dir {own} ", f"--config-dir {own.resolve().name} ")
    provenance = {k: v for k, v in (record.provenance or {}).items() if v is not None and (private or k in PUBLIC)}
    facts: Json = {
        "command": command,
        "file": str(path) if private else path.name,
        "provenance": provenance,
        "error": record.error or "",
        "notes": record.notes or [],
        "links": record.comm_bytes_by_link or {},
        "lanes": _lanes(record),
        "candidates": record.candidates or [],
    }
    return facts


def drawn(record: Record, path: Path) -> Json:
    """The timeline and the assignment matrices of a point. Where there is none, `missing` says why."""
    drawings: Json = {"timeline": None, "matrices": [], "missing": []}
    try:
        drawings["timeline"] = timeline(record, path)
    except RequestError as error:
        drawings["missing"].append(f"No timeline: {error}.")
    try:
        drawings["matrices"] = matrices(record)
    except RequestError as error:
        drawings["missing"].append(f"No assignment matrix: {error}.")
    return drawings


def timeline(record: Record, path: Path) -> Json:
    """The spans of some ranks in ms: rows by name, and for each span its row, kind, start and end.

    Raises RequestError where there is no timeline beside the record.
    """
    by_rank, marks = spans_of(record, path)
    if record.mode == "simulate":
        ranks, kinds, end_ms = sorted(by_rank)[:RANKS], (BLOCKS, "transfers"), max(marks.values(), default=0.0)
        shown = [span for rank in ranks for span in _merged(by_rank[rank], end_ms / RESOLUTION)]
    else:
        ranks, kinds = sorted(by_rank)[:MOST], PHASES
        end_ms = sorted(marks.values())[:MOST_ITERATIONS][-1]
        shown = [span for rank in ranks for span in by_rank[rank] if span.end_ms <= end_ms * (1 + 1e-9)]
    rows = list(dict.fromkeys(span.row for span in shown))
    return {
        "rows": rows,
        "kinds": list(kinds),
        "spans": [[rows.index(s.row), kinds.index(s.what), _short(s.start_ms), _short(s.end_ms)] for s in shown],
        "marks": {name: _short(end) for name, end in marks.items() if end <= end_ms * (1 + 1e-9)},
        "ranks": [len(ranks), len(by_rank)],
        "iterations": None if record.mode == "simulate" else [min(len(marks), MOST_ITERATIONS), len(marks)],
    }


def matrices(record: Record) -> list[Json]:
    """The rank and the step of each block, for each phase; -1 where no rank computes it.

    Raises RequestError for a point without a plan.
    """
    if record.status != "ok":
        raise RequestError(f"status={record.status}", "nothing was computed", "a point that is ok would have one")
    if "cluster" not in (record.config or {}):
        raise RequestError("config", "the record has no whole request", "one that this code wrote would have one")
    if record.impl is not None:
        raise RequestError(f"method={record.method}", "another package's attention has no plan", "a method of ours has")
    drawings = []
    for phase in workload_named(record.workload).phase_choices[record.phase]:
        plan, problem, _ = planned(record, phase)
        for by in ("rank", "step"):
            values = np.nan_to_num(matrix(plan, problem, by).values, nan=-1).astype(int)
            corner = values[:MOST_CHUNKS, :MOST_CHUNKS]
            size = {"chunks": len(values), "tokens": problem.queries.largest, "heads": problem.layout.head_parallel}
            drawings.append({"phase": phase, "by": by, **size, "side": len(corner), "values": corner.ravel().tolist()})
    return drawings


def _merged(spans: Iterable[Span], gap_ms: float) -> list[Span]:
    """The spans with those of one row and kind joined that are closer than gap_ms."""
    last: dict[tuple[str, str], Span] = {}
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start_ms):
        key = (span.row, span.what)
        before = last.get(key)
        if before and span.start_ms - before.end_ms < gap_ms:
            last[key] = before._replace(end_ms=max(before.end_ms, span.end_ms))
            continue
        if before:
            merged.append(before)
        last[key] = span
    return sorted([*merged, *last.values()], key=lambda span: (span.row, span.start_ms))


def _lanes(record: Record) -> dict[str, float]:
    """The bytes by phase and lane, over all tensors and fields."""
    sent: dict[str, float] = {}
    for name, size in (record.comm_bytes_by_lane or {}).items():
        lane = ", ".join(name.split("/")[:2])
        sent[lane] = sent.get(lane, 0.0) + size
    return sent


def _short(value: float) -> float:
    """The value with seven digits: a page is half as large."""
    return float(f"{value:.7g}") if math.isfinite(value) else 0.0


def as_text(content: Json) -> str:
    """JSON without spaces; what JSON has no words for is text."""
    return json.dumps(content, separators=(",", ":"), default=str)
