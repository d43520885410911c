"""A sweep's folder. It stands alone: the points, the submitted jobs and the records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from sp_bench import records
from sp_bench.errors import RequestError
from sp_bench.reading import read
from sp_bench.records import Record
from sp_bench.slurm.points import Point, Refused, Task, numbered
from sp_bench.slurm.settings import Settings, changed

FINISHED = {"ok": "done", "unsupported": "unsupported"}
"""The statuses of points that are not run again, and the states that a sweep shows for them."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep, in a folder with these files:

    sweep.json      the resolved points, in tasks; written once
    jobs.json       the submitted jobs, with their tasks
    scripts/        an sbatch script for each number of GPUs
    logs/           the output of array tasks
    points/         the run_id of each point's record, in a file named by the point's id
    records/        the records, as `python -m sp_bench` writes them
    """

    folder: Path
    name: str
    settings: Settings
    tasks: Sequence[Task]
    refused: Sequence[Point] = ()
    """The points that were refused when the sweep was made."""
    code_version: str

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """The sweep in a folder. Raises RequestError if there is none."""
        try:
            content = json.loads((folder / "sweep.json").read_text())
        except (OSError, ValueError):
            would_work = "python -m slurm.sweep sweep=NAME makes one"
            raise RequestError(str(folder), "is not the folder of a sweep", would_work) from None
        groups = ((task["gpus"], [Point(**point) for point in task["points"]]) for task in content["tasks"])
        return cls(
            folder=folder.resolve(),
            name=content["name"],
            settings=read(Settings, content["settings"], "slurm"),
            tasks=numbered(groups),
            refused=[Point(**point) for point in content["refused"]],
            code_version=content["code_version"],
        )

    def write(self, refused: Sequence[Refused]) -> None:
        """Make the folder, with the records of refused points.

        Raises RequestError if the folder has a sweep already, or can't be made.
        """
        if (self.folder / "sweep.json").exists():
            would_work = f"python -m slurm.sweep resume {self.folder}, or another folder=, would work"
            raise RequestError(f"folder={self.folder}", "has a sweep already", would_work)
        content = {
            "name": self.name,
            "code_version": self.code_version,
            "settings": msgspec.to_builtins(self.settings),
            "tasks": [{"gpus": task.gpus, "points": list(map(vars, task.points))} for task in self.tasks],
            "refused": list(map(vars, self.refused)),
        }
        try:
            for name in ("scripts", "logs", "points", "records"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            for each in refused:
                self.refuse(*each)
            _write(self.folder / "sweep.json", content)
        except OSError as error:
            rule = f"can't be made ({error.strerror})"
            raise RequestError(f"folder={self.folder}", rule, "folder=results/NAME would work") from None

    def with_settings(self, changes: Sequence[str]) -> Sweep:
        """The sweep with changed settings, such as time=04:00:00, which its folder keeps. Raises RequestError."""
        settings = changed(msgspec.to_builtins(self.settings), changes)
        content = json.loads((self.folder / "sweep.json").read_text())
        _write(self.folder / "sweep.json", content | {"settings": msgspec.to_builtins(settings)})
        return replace(self, settings=settings)

    @property
    def records(self) -> Path:
        """The folder of the records."""
        return self.folder / "records"

    @property
    def points(self) -> list[Point]:
        """All points, including refused ones."""
        return [*(point for task in self.tasks for point in task.points), *self.refused]

    def record(self, point: Point) -> Record | None:
        """The record of a point; None if it has none."""
        try:
            run_id = json.loads((self.folder / "points" / f"{point.id}.json").read_text())["run_id"]
            return records.read(self.records / f"{run_id}.json")
        except (OSError, ValueError):
            return None

    def keep(self, point: Point, record: Record) -> None:
        """Remember that a record, which is in `records` already, is that of this point."""
        _write(self.folder / "points" / f"{point.id}.json", {"run_id": record.run_id})

    def refuse(self, point: Point, record: Record) -> None:
        """Write the record of a point that can't be served."""
        records.write(self.records, record)
        self.keep(point, record)

    def missing(self, task: Task) -> list[Point]:
        """The points of a task that still have to run."""
        return [
            point for point in task.points if (record := self.record(point)) is None or record.status not in FINISHED
        ]

    @property
    def jobs(self) -> dict[int, list[int]]:
        """The numbers of each submitted job's tasks, by the job's id."""
        path = self.folder / "jobs.json"
        return {int(job): tasks for job, tasks in json.loads(path.read_text()).items()} if path.exists() else {}

    def add_job(self, job: int, tasks: Sequence[Task]) -> None:
        """Remember a submitted job."""
        _write(self.folder / "jobs.json", self.jobs | {job: [task.number for task in tasks]})


def _write(path: Path, content: Mapping[Any, Any]) -> None:
    records.write_whole(path, json.dumps(content, indent=1) + "\n")
