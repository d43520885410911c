"""Benchmark points: resolve, check, run or simulate, account, record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sp_bench import records
from sp_bench.bench.choose import Choice, DeviceMemoryError
from sp_bench.bench.measured import Samples, measure_points
from sp_bench.bench.request import Request, resolve
from sp_bench.bench.simulated import simulate_point, time_by_rank, trace_of
from sp_bench.errors import RequestError
from sp_bench.records import Record

__all__ = ["Outcome", "Request", "resolve", "run_points", "work_of"]


@dataclass(frozen=True)
class Outcome:
    """A finished point: its record, and what tables and timelines can draw from this run."""

    record: Record
    choice: Choice | None = None
    samples: Samples | None = None
    trace: dict[str, Any] | None = None
    """The simulated timeline, for Perfetto."""
    ranks: dict[str, list[float]] | None = None
    """What each simulated rank's time went to, in milliseconds."""
    reused: bool = False


def work_of(requests: Sequence[Request]) -> int:
    """Steps that `progress` will be told of, for a bar."""
    return sum(1 if r.mode == "simulate" else r.verify + r.warmup + r.iters for r in requests)


def run_points(
    requests: Sequence[Request],
    *,
    folder: Path,
    reuse: bool,
    progress: Callable[[int], None] = lambda steps: None,
    finished: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run all points; returns their outcomes in the order given. Each is written to `folder` as soon as it is finished.

    Measured points with equally many ranks that follow one another share one allocation and are timed in turn.
    `reuse` takes a point that the folder has as ok already from there. A point that fails is an outcome, not an error.
    Raises OSError where the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}

    def finish(outcome: Outcome) -> None:
        if not outcome.reused:
            records.write(folder, outcome.record, samples=outcome.samples, trace=outcome.trace, ranks=outcome.ranks)
        outcomes[outcome.record.run_id] = outcome
        finished(outcome)

    for (mode, *_), group in itertools.groupby(requests, key=_together):
        todo = []
        for request in group:
            if reuse and (kept := _kept(folder, request)):
                finish(Outcome(kept, reused=True))
                progress(work_of([request]))
            else:
                todo.append(request)
        if mode == "measure" and todo:
            for outcome in _measure(todo, progress):
                finish(outcome)
        elif todo:
            for request in todo:
                finish(_simulate(request))
                progress(1)
    # Within a group, those that are reused are finished first.
    return [outcomes[request.run_id] for request in requests]


def _together(request: Request) -> tuple:
    """Points that are equal in this run together."""
    cluster = request.cluster
    return (request.mode, request.problem.n, request.iters, request.warmup, cluster.name, cluster.hosts)


def _measure(requests: Sequence[Request], progress: Callable[[int], None]) -> list[Outcome]:
    try:
        return [Outcome(*point) for point in measure_points(requests, progress)]
    except Exception as error:
        if len(requests) > 1:
            return [outcome for request in requests for outcome in _measure([request], progress)]
        return [_failed(requests[0], error)]


def _simulate(request: Request) -> Outcome:
    try:
        record, choice = simulate_point(request)
        return Outcome(record, choice, trace=trace_of(choice, request.trace), ranks=time_by_rank(choice))
    except Exception as error:
        return _failed(request, error)


def _failed(request: Request, error: Exception) -> Outcome:
    """The row of a point that could not be done, and whose fault that is."""
    if isinstance(error, DeviceMemoryError | MemoryError):
        return Outcome(request.record("oom", str(error) or "this machine's memory is too small for the point"))
    if isinstance(error, RequestError):
        return Outcome(request.record("unsupported", str(error)))
    return Outcome(request.record("failed", f"{type(error).__name__}: {error}"))


def _kept(folder: Path, request: Request) -> Record | None:
    path = folder / f"{request.run_id}.json"
    if not path.exists():
        return None
    try:
        record = records.read(path)
    except ValueError:
        return None
    wants_trace = request.mode == "simulate" and request.trace and not path.with_suffix(".trace.json").exists()
    return record if record.status == "ok" and not wants_trace else None
