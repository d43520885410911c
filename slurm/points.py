"""The points of a sweep: composed from conf/sweep/*.yaml, resolved, and grouped into array tasks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sp_bench import records
from sp_bench.cli.arguments import in_group
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError, unknown
from sp_bench.launch import Launch
from sp_bench.point import resolve
from sp_bench.point.given import NOT_IN_THE_RESULT
from sp_bench.point.request import setting_of, unsupported
from sp_bench.reading import Count, read
from sp_bench.records import Record
from sp_bench.resources import conf_files


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of a sweep."""

    id: str
    """A hash of the config and the code. Unlike a run_id it doesn't depend on the machine."""
    config: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Point:
        """The point of a composed config."""
        kept = {key: value for key, value in config.items() if key not in NOT_IN_THE_RESULT}
        return cls(id=records.digest({"config": kept, "code": records.code_version()}), config=config)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Points that differ only in their method, measured in turn in one array task."""

    number: int
    """The task's number in the sweep, and in its job array."""
    gpus: int
    points: tuple[Point, ...]


Refused = tuple[Point, Record]
"""A point that can't be served, and its record with the error."""


def planned(name: str, changes: Sequence[str], own: Path | None = None) -> tuple[list[Task], list[Refused]]:
    """The tasks and the refused points of conf/sweep/<name>.yaml, with changes key=value or key=value,value.

    `own` is a folder of the form of conf/. A point is refused for what its values say, never for what this machine has
    or lacks: its jobs run on others. Raises RequestError for an unknown sweep or key, or a mode that takes no jobs.
    """
    groups: dict[str, list[Point]] = {}
    refused = []
    for point in _composed(name, changes, own):
        if error := _refusal(point):
            refused.append((point, unsupported(point.config, error)))
        else:
            groups.setdefault(setting_of(point.config), []).append(point)
    return numbered((_gpus(points[0]), points) for points in groups.values()), refused


def numbered(groups: Iterable[tuple[int, Iterable[Point]]]) -> list[Task]:
    """Tasks in order, from the gpus and points of each."""
    return [Task(number=i, gpus=gpus, points=tuple(points)) for i, (gpus, points) in enumerate(groups)]


def by_gpus(tasks: Iterable[Task]) -> dict[int, list[Task]]:
    """Tasks by the number of GPUs, fewest first. Those of one number are one job array."""
    ordered = sorted(tasks, key=lambda task: (task.gpus, task.number))
    return {gpus: list(group) for gpus, group in itertools.groupby(ordered, key=lambda task: task.gpus)}


def _refusal(point: Point) -> RequestError | None:
    """Why no nodes can serve a point; None if some can.

    device=auto on cluster=local is what the nodes have, so that both are tried: the first refusal is the one that is
    said.
    """
    config, errors = point.config, []
    either = config["device"] == "auto" and config["cluster"].get("this_machine") is True
    for device in ("cuda", "cpu") if either else (config["device"],):
        try:
            resolve({**config, "device": device}, Launch.planned(_gpus(point)))
        except RequestError as error:
            errors.append(error)
        else:
            return None
    return errors[0]


def _composed(name: str, changes: Sequence[str], own: Path | None) -> list[Point]:
    """The points of a sweep, each once."""
    known = conf_files("sweep", own)
    if name not in known:
        raise unknown("sweep", name, known)
    content = yaml.safe_load(known[name].read_text())
    values = {key: [value] for key, value in content["fixed"].items()} | content["axes"]
    arguments = {key: f"{key}={','.join(map(_text, choices))}" for key, choices in values.items()}
    arguments |= {change.partition("=")[0]: change for change in changes}
    with Composer(own, gpus=1) as composer:  # nodes may have some, whatever this machine has
        configs = [composer.compose(point) for point in composer.points(list(arguments.values()), sweep=True)]
    if any(config["mode"] == "alone" for config in configs):
        raise RequestError("mode=alone", "takes one process, whatever gpus is", "python -m sp_bench -m mode=alone ...")
    if any(config["mode"] == "simulate" for config in configs):
        raise RequestError("mode=simulate", "needs no jobs", "python -m sp_bench -m mode=simulate ... would work")
    points = [Point.of({**in_group(config, name), "mode": "measure"}) for config in configs]
    return list({point.id: point for point in points}.values())


def _gpus(point: Point) -> int:
    return read(Count, point.config["gpus"], "gpus")


def _text(value: Any) -> str:
    """A value as the text of an override."""
    return json.dumps(value) if isinstance(value, bool | list | dict) or value is None else str(value)
