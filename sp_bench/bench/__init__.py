"""Benchmark points: resolve, check, run or simulate, account, record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from sp_bench import records
from sp_bench.bench.choose import DeviceMemoryError
from sp_bench.bench.measured import measure_points
from sp_bench.bench.outcome import Outcome
from sp_bench.bench.request import Request, resolve
from sp_bench.bench.simulated import simulate_point, time_by_rank, trace_of
from sp_bench.errors import RequestError
from sp_bench.measure.termination import raise_if_terminated
from sp_bench.records import Record

__all__ = ["NotWritten", "Outcome", "Request", "resolve", "run_points", "work_of"]


def work_of(requests: Sequence[Request | Record]) -> int:
    """Steps that `progress` will be told of, for a bar."""
    to_run = [r for r in requests if isinstance(r, Request)]
    return sum(1 if r.mode == "simulate" else r.verify + r.warmup + r.iters for r in to_run)


class NotWritten(OSError):
    """Records that can't be written, which ends a run: the disk is full, or the folder gone."""

    def __init__(self, path: Path, why: OSError, outcomes: list[Outcome], lost: list[Record], points: int) -> None:
        """`outcomes` are all that there are of `points`, and `lost` those without a record. `path` is the first's."""
        super().__init__(why.errno, why.strerror or str(why), str(path))
        self.outcomes, self.lost, self.points = outcomes, lost, points

    def __str__(self) -> str:
        lost = "; ".join(f"{r.method} gpus={r.gpus} seqlen={r.seqlen}" for r in self.lost)
        kept, missing = len(self.outcomes) - len(self.lost), self.points - len(self.outcomes)
        return (
            f"{self.filename}: can't be written ({self.strerror}), so the run has ended. In no record: {lost}. Of "
            f"{self.points} points {kept} are kept and {missing} not run; with room the same command completes them"
        )


def run_points(
    requests: Sequence[Request | Record],
    *,
    folder: Path,
    reuse: bool,
    progress: Callable[[int], None] = lambda steps: None,
    finished: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run all points; returns their outcomes in the order given. Each is written to `folder` as soon as it is finished.

    Measured points of one problem that follow one another share one allocation and are timed in turn. `reuse` takes a
    point that the folder has as ok already from there. A point that fails is an outcome, not an error; one that has
    been refused is given as its record, and written first.
    Only `finished` gets what stands beside a record: that of a whole sweep would fill the memory.
    Raises NotWritten where records can't be written, or `finished` raises OSError.
    """
    outcomes: dict[str, Outcome] = {}

    def step(steps: int) -> None:
        raise_if_terminated()
        progress(steps)

    def finish(*found: Outcome) -> None:
        """Keep what has been run together, as much as can be."""
        errors: list[tuple[Record, OSError]] = []
        for outcome in found:
            record = outcome.record
            outcomes[record.run_id] = Outcome(record, reused=outcome.reused)
            try:
                if not outcome.reused:
                    _write(folder, outcome)
                finished(outcome)
            except OSError as error:
                errors.append((record, error))
        if errors:
            (first, why), *_ = errors
            path, there = folder / f"{first.run_id}.json", [r.run_id for r in requests if r.run_id in outcomes]
            lost = [record for record, _ in errors]
            raise NotWritten(path, why, [outcomes[run_id] for run_id in there], lost, len(requests)) from why

    finish(*(Outcome(refused) for refused in requests if isinstance(refused, Record)))
    to_run = [request for request in requests if isinstance(request, Request)]
    for (mode, *_), group in itertools.groupby(to_run, key=_together):
        todo = []
        for request in group:
            if reuse and (kept := _kept(folder, request)):
                finish(Outcome(kept, reused=True))
                step(work_of([request]))
            else:
                todo.append(request)
        if mode != "simulate" and todo:
            finish(*_measure(todo, step))
        elif todo:
            for request in todo:
                finish(_simulate(request))
                step(1)
    # Within a group, those that are reused are finished first.
    return [outcomes[request.run_id] for request in requests]


def _together(request: Request) -> tuple:
    """Points that are equal in this run together: those that tables compare. Each such group is kept when it ends."""
    p, cluster = request.problem, request.cluster
    problem = (p.n, p.seqlen, p.batch, p.heads, p.kv_heads, p.head_dim, p.mask, p.dtype, p.wire_dtype)
    asked = (request.workload.name, request.phase)
    settings = (
        request.iters,
        request.warmup,
        request.devices.kind,
        *request.devices.nccl.items(),
    )
    return (request.mode, problem, cluster.name, cluster.hosts, request.alone, asked, settings)


def _measure(requests: Sequence[Request], progress: Callable[[int], None]) -> list[Outcome]:
    try:
        return measure_points(requests, progress)
    except Exception as error:
        raise_if_terminated()
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


def _write(folder: Path, outcome: Outcome) -> None:
    samples = outcome.samples.columns() if outcome.samples else None
    records.write(folder, outcome.record, samples=samples, trace=outcome.trace, ranks=outcome.ranks, hang=outcome.hang)


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
