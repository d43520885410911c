"""How far a sweep is: its points by state, what runs, what failed, and the time that is left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sp_bench.records import Record
from sp_bench.slurm import queue
from sp_bench.slurm.folder import FINISHED, Sweep
from sp_bench.slurm.points import Task

STATES = ("done", "running", "pending", "failed", "unsupported")
RECENT = 10
"""The finished tasks whose rate tells the time that is left."""


@dataclass(frozen=True)
class Progress:
    """The state of a sweep at one time."""

    by_gpus: dict[int, Counter[str]]
    """The number of points in each state, by the number of GPUs; a point that SLURM ended is failed."""
    running: Sequence[Task]
    left_s: float | None
    """The seconds that are left at the rate of the last tasks; None before two tasks have finished."""
    in_slurm: Mapping[int, queue.TaskState]
    """The states of tasks, as SLURM reports them, by number; it forgets those that have ended."""

    @property
    def counts(self) -> Counter[str]:
        """The number of points in each state."""
        return sum(self.by_gpus.values(), Counter())

    @property
    def over(self) -> bool:
        """Whether no job is left."""
        return not self.counts["running"] and not self.counts["pending"]

    @property
    def line(self) -> str:
        """One line with the number of points in each state."""
        counts = self.counts
        return f"{counts.total()} points: {', '.join(f'{counts[state]} {state}' for state in STATES)}"


def progress(sweep: Sweep, now_s: float | None = None) -> Progress:
    """The progress of a sweep, at `now_s` seconds since the epoch. Raises SlurmError if SLURM does not answer."""
    in_slurm = queue.tasks(sweep.settings, list(sweep.jobs))
    running = {number for number, said in in_slurm.items() if said.runs}
    by_gpus: dict[int, Counter[str]] = {}
    for point in sweep.refused:
        record = sweep.record(point)
        by_gpus.setdefault(record.gpus if record else 0, Counter())["unsupported"] += 1
    for task in sweep.tasks:
        said = in_slurm.get(task.number)
        state = "pending" if said and said.waits else "running" if said and said.runs else "failed"
        counts = by_gpus.setdefault(task.gpus, Counter())
        for point in task.points:
            record = sweep.record(point)
            counts[FINISHED.get(record.status, state) if record else state] += 1
    to_do = sum(counts["running"] + counts["pending"] for counts in by_gpus.values())
    left_s = _left_s(_finishes(sweep), to_do, time.time() if now_s is None else now_s)
    at_work = [task for task in sweep.tasks if task.number in running]
    return Progress(dict(sorted(by_gpus.items())), at_work, left_s, in_slurm)


def failures(sweep: Sweep) -> Iterator[Record]:
    """The records of points that failed. A point that SLURM ended has a log and no record."""
    for task in sweep.tasks:
        for point in sweep.missing(task):
            if record := sweep.record(point):
                yield record


def _finishes(sweep: Sweep) -> list[tuple[float, int]]:
    """When each task's points were finished, since the last submission, and how many. Seconds since the epoch."""
    submitted = sweep.folder / "jobs.json"
    since = submitted.stat().st_mtime if submitted.exists() else 0.0
    finishes = []
    for task in sweep.tasks:
        files = [sweep.folder / "points" / f"{point.id}.json" for point in task.points]
        times = [file.stat().st_mtime for file in files if file.exists()]
        if times and max(times) >= since:
            finishes.append((max(times), len(times)))
    return sorted(finishes)


def _left_s(finishes: Sequence[tuple[float, int]], to_do: int, now_s: float) -> float | None:
    """The seconds for `to_do` points at the rate of points since the first of the recent finishes.

    The rate falls while nothing finishes. None for fewer than two finishes.
    """
    recent = finishes[-RECENT:]
    if len(recent) < 2 or now_s <= recent[0][0]:
        return None
    return to_do * (now_s - recent[0][0]) / sum(count for _, count in recent[1:])
