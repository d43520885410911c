"""Benchmark points: resolve, check, run or simulate, account, record."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sp_bench import records
from sp_bench.collection import uncollected
from sp_bench.errors import RequestError
from sp_bench.launch import Launch
from sp_bench.machine import give_back_memory
from sp_bench.plan.problem import Problem
from sp_bench.point import data_parallel, training
from sp_bench.point.at_once import ProcessEndedError, forked
from sp_bench.point.choose import DeviceMemoryError
from sp_bench.point.outcome import Outcome
from sp_bench.point.request import Request
from sp_bench.point.request import resolve as resolve_plain
from sp_bench.point.simulations import simulation_of
from sp_bench.point.unread import is_note
from sp_bench.records import Record
from sp_bench.termination import raise_if_terminated
from sp_bench.workload import workload_named

__all__ = ["NotWritten", "Outcome", "Request", "resolve", "run_points", "work_of"]

REFUSED = ("oom", "unsupported")
"""The statuses of a simulated point that would be the same again: the point's values and the code decide them alone."""


def resolve(config: Mapping[str, Any], launch: Launch | None = None) -> Request:
    """The request of a composed config (request.resolve), with seqlen=max and train.data_parallel=auto worked out.

    Raises RequestError for the first invalid value.
    """
    if data_parallel.is_asked(config):
        config = data_parallel.chosen(config)
    if config["seqlen"] != "max":
        return resolve_plain(config, launch)
    rule = "is the longest sequence whose simulated training step fits the device's memory"
    no_longest = RequestError("seqlen=max", rule, "workload=train model=llama3_8b mode=simulate would work")
    trains = workload_named(str(config["workload"])).simulated_as == "training"
    if not trains or config["mode"] not in ("auto", "simulate"):
        raise no_longest
    first = resolve_plain({**config, "seqlen": 2**20, "mode": "simulate"}, launch)
    if first.workload.simulated_as != "training":  # a step of a kind that trains, and of its forward alone
        raise no_longest
    return resolve_plain({**config, "seqlen": training.longest(first)}, launch)


def work_of(requests: Sequence[Request | Record]) -> int:
    """The number of steps that `progress` will report, for a progress bar."""
    to_run = [r for r in requests if isinstance(r, Request)]
    return sum(1 if r.mode == "simulate" else r.verify + r.warmup + r.iters for r in to_run)


class NotWritten(OSError):
    """Records can't be written, so the run ended: the disk is full, or the folder is gone."""

    def __init__(self, path: Path, why: OSError, outcomes: list[Outcome], lost: list[Record], points: int) -> None:
        """`outcomes` are those of the `points` that ran; `lost` are those not written, the first of them to `path`."""
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
    at_once: int = 1,
    progress: Callable[[int], None] = lambda steps: None,
    finished: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run all points; return their outcomes in the order given. Each record is written as soon as its point is done.

    Consecutive measured points of one problem share a pool of ranks and are timed in turn. Simulated points run in
    `at_once` forked processes, in this one if that is 1. With `reuse`, a point with a
    record in `folder` whose status is ok is not run again, nor a simulated one that was refused: it would be again. A
    point that fails is an outcome, not an error. A point that was refused is given as its record, which is written
    first. Only `finished` gets the samples and traces of a point: those of a whole sweep would fill the memory.
    Raises NotWritten if records can't be written, or `finished` raises OSError.
    """
    outcomes: dict[str, Outcome] = {}

    def step(steps: int) -> None:
        raise_if_terminated()
        progress(steps)

    def finish(*found: Outcome) -> None:
        """Write the outcomes of points that ran together, as many as possible."""
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
            path, with_outcome = folder / f"{first.run_id}.json", [r.run_id for r in requests if r.run_id in outcomes]
            lost = [record for record, _ in errors]
            raise NotWritten(path, why, [outcomes[run_id] for run_id in with_outcome], lost, len(requests)) from why

    finish(*(Outcome(refused) for refused in requests if isinstance(refused, Record)))
    to_run = [request for request in requests if isinstance(request, Request)]
    for (mode, *_), group in itertools.groupby(to_run, key=_group):
        todo = []
        for request in group:
            if reuse and (kept := kept_record(folder, request)):
                finish(Outcome(kept, reused=True))
                step(work_of([request]))
            else:
                todo.append(request)
        if mode != "simulate" and todo:
            finish(*_measure(todo, step))
        elif todo:
            different = list({request.run_id: request for request in todo}.values())
            for outcome in _simulated(different, at_once):
                finish(outcome)
                step(1)
            step(len(todo) - len(different))
    # Within a group, reused points finish first.
    return [outcomes[request.run_id] for request in requests]


def _group(request: Request) -> tuple:
    """Equal for points that run together: of measured ones those that tables compare, which are written when all have
    ended.
    """
    if request.mode == "simulate":
        return (request.mode,)
    problem = {each.name: getattr(request.problem, each.name) for each in fields(Problem) if each.name != "layout"}
    cluster, devices = request.cluster, request.devices
    model = request.workload.described(request.problem).model
    timed = (request.workload.name, model, request.phase, request.iters, request.warmup)
    return (request.mode, problem, cluster.name, cluster.hosts, request.alone, timed, devices.kind, devices.nccl)


def _measure(requests: Sequence[Request], progress: Callable[[int], None]) -> list[Outcome]:
    from sp_bench.point.measured import measure_points

    try:
        return measure_points(requests, progress)
    except Exception as error:
        raise_if_terminated()
        if len(requests) > 1:
            return [outcome for request in requests for outcome in _measure([request], progress)]
        return [_failed(requests[0], error)]


def _simulated(requests: Sequence[Request], at_once: int) -> Iterator[Outcome]:
    """The outcomes of simulated points, in the order in which they end."""
    if min(at_once, len(requests)) <= 1:
        yield from map(_simulate, requests)
        return
    records.provenance()  # found once, for all processes
    for request, outcome in forked(_simulate, requests, at_once):
        if isinstance(outcome, ProcessEndedError) and outcome.signal in (signal.SIGTERM, signal.SIGINT):
            time.sleep(1)  # this process may be sent the signal, too
        raise_if_terminated()
        yield _failed(request, outcome) if isinstance(outcome, Exception) else outcome


@uncollected()
def _simulate(request: Request) -> Outcome:
    try:
        return simulation_of(request).outcome(request)
    except Exception as error:
        return _failed(request, error)
    finally:
        give_back_memory()


def _failed(request: Request, error: Exception) -> Outcome:
    """The outcome of a point that raised: oom, unsupported or failed."""
    if isinstance(error, MemoryError):
        status = "failed" if request.mode == "simulate" else "oom"
        return Outcome(request.record(status, str(error) or "this machine's memory is too small for the point"))
    if isinstance(error, DeviceMemoryError):
        return Outcome(request.record("oom", str(error)))
    if isinstance(error, RequestError):
        return Outcome(request.record("unsupported", str(error)))
    return Outcome(request.record("failed", f"{type(error).__name__}: {error}"))


def _write(folder: Path, outcome: Outcome) -> None:
    samples = outcome.samples.columns() if outcome.samples else None
    others = {"trace": outcome.trace, "ranks": outcome.ranks, "hang": outcome.hang, "timeline": outcome.timeline}
    records.write(folder, outcome.record, samples=samples, **others)


def kept_record(folder: Path, request: Request) -> Record | None:
    """The record of a point in a folder if it needn't be run again (`run_points` with `reuse`); None elsewhere."""
    path = folder / f"{request.run_id}.json"
    if not path.exists():
        return None
    try:
        record = records.read(path)
    except ValueError:
        return None
    wants_trace = request.mode == "simulate" and request.trace and not path.with_suffix(".trace.json").exists()
    is_refused = request.mode == "simulate" and record.status in REFUSED
    if not is_refused and (record.status != "ok" or wants_trace):
        return None
    asked = [note for note in request.notes if is_note(note)]
    return replace(record, notes=[*asked, *(note for note in record.notes or () if not is_note(note))] or None)
