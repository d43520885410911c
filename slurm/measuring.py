"""Measure one task of a sweep."""

from __future__ import annotations

from slurm.folder import Sweep
from slurm.points import Point, Task
from sp_bench.bench import Outcome, Request, resolve, run_points
from sp_bench.bench.request import unsupported
from sp_bench.errors import RequestError
from sp_bench.loggers import open_logger
from sp_bench.measure.ranks import launched


def measure(sweep: Sweep, task: Task) -> int:
    """Measure a task's missing points in turn, and keep each; returns the exit code, 1 if one has failed."""
    points: dict[str, list[Point]] = {}
    """By run_id: points that differ in what their method has no use for are one."""
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
            logger.log(record.to_dict(), outcome.samples)
            print(f"{record.method}: {record.status}{f', {record.error}' if record.error else ''}", flush=True)

        outcomes = run_points(list(requests.values()), folder=sweep.records, reuse=False, finished=finished)
    return 0 if all(outcome.record.status == "ok" for outcome in outcomes) else 1
