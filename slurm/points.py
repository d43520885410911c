"""The points of a sweep: composed from conf/sweep/*.yaml, resolved, and put into the array tasks that measure them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sp_bench import records
from sp_bench.bench import resolve
from sp_bench.bench.request import NOT_IN_THE_RESULT, unsupported
from sp_bench.cli.arguments import in_group
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError, unknown
from sp_bench.measure.launch import Launch
from sp_bench.reading import Count, read
from sp_bench.records import Record
from sp_bench.resources import conf_files


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point. A record's run_id says which machine it is from, too; a point's id does not."""

    id: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Point:
        """The point of a composed config."""
        kept = {key: value for key, value in config.items() if key not in NOT_IN_THE_RESULT}
        return cls(id=records.digest({"config": kept, "code": records.code_version()}), config=config)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Points that differ in their method only, measured in turn in one array task."""

    number: int
    """In the whole sweep, and in its array."""
    gpus: int
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A point that can't be served, and its record, which says why."""

    point: Point
    record: Record


def planned(name: str, changes: Sequence[str]) -> tuple[list[Task], list[Refused]]:
    """The points of conf/sweep/<name>.yaml with changes (key=value, which may be lists), resolved.

    Raises RequestError for what is no point at all.
    """
    groups: dict[str, list[Point]] = {}
    refused = []
    for point in _composed(name, changes):
        try:
            resolve(point.config, Launch.planned(_gpus(point)))
        except RequestError as error:
            refused.append(Refused(point=point, record=unsupported(point.config, error)))
        else:
            groups.setdefault(_apart(point), []).append(point)
    return numbered((_gpus(points[0]), points) for points in groups.values()), refused


def numbered(groups: Iterable[tuple[int, Iterable[Point]]]) -> list[Task]:
    """Tasks, from their gpus and points."""
    return [Task(number=i, gpus=gpus, points=tuple(points)) for i, (gpus, points) in enumerate(groups)]


def by_gpus(tasks: Iterable[Task]) -> dict[int, list[Task]]:
    """Tasks by the number of GPUs, fewest first: each is one array."""
    ordered = sorted(tasks, key=lambda task: (task.gpus, task.number))
    return {gpus: list(group) for gpus, group in itertools.groupby(ordered, key=lambda task: task.gpus)}


def _composed(name: str, changes: Sequence[str]) -> list[Point]:
    """Each point once."""
    known = conf_files("sweep")
    if name not in known:
        raise unknown("sweep", name, known)
    content = yaml.safe_load(known[name].read_text())
    values = {key: [value] for key, value in content["fixed"].items()} | content["axes"]
    arguments = {key: f"{key}={','.join(map(_text, choices))}" for key, choices in values.items()}
    arguments |= {change.partition("=")[0]: change for change in changes}
    with Composer() as composer:
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
    """As an override has it."""
    return json.dumps(value) if isinstance(value, bool | list | dict) or value is None else str(value)


def _apart(point: Point) -> str:
    """Equal for points that are measured in one task."""
    return json.dumps({key: value for key, value in point.config.items() if key not in ("method", "impl")}, default=str)
