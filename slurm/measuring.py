"""Measure one task of a sweep."""

from __future__ import annotations

import sys

from sp_bench.errors import RequestError
from sp_bench.launch import launched
from sp_bench.loggers import open_logger
from sp_bench.point import NotWritten, Outcome, Request, resolve, run_points
from sp_bench.point.request import unsupported
from sp_bench.slurm.folder import Sweep
from sp_bench.slurm.points import Point, Task


def measure(sweep: Sweep, task: Task) -> int:
    """Measure a task's missing points in turn; return the exit code, 1 if one fails or can't be written."""
    points: dict[str, list[Point]] = {}
    """The points of each run_id. Points that differ only in keys their method doesn't use have the same."""
    requests: dict[str, Request] = {}
    for point in sweep.missing(task):
        try:
            request = resolve(point.config, launched())
        except RequestError as error:
            sweep.refuse(point, unsupported(point.config, error))
        else:
            points.setdefault(request.run_id, []).append(point)
            requests[request.run_id] = request
    if not requests:
        return 0
    first, *_ = requests.values()
    with open_logger({"dir": str(sweep.folder), **first.config["logger"]}) as logger:

        def finished(outcome: Outcome) -> None:
            record = outcome.record
            for point in points[record.run_id]:
                sweep.keep(point, record)
            logger.log(sweep.records / f"{record.run_id}.json")
            print(f"{record.method}: {record.status}{f', {record.error}' if record.error else ''}", flush=True)

        try:
            outcomes = run_points(list(requests.values()), folder=sweep.records, reuse=False, finished=finished)
        except NotWritten as error:
            for lost in error.lost:
                print(f"{lost.method}: {lost.status}, step {lost.step_ms_median} ms, in no record", flush=True)
            print(f"slurm.task: {error}", file=sys.stderr)
            return 1
    return 0 if all(outcome.record.status == "ok" for outcome in outcomes) else 1
