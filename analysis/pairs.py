"""Pairs of points to compare, from two sets of records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sp_bench import records
from sp_bench.analysis.frames import named
from sp_bench.analysis.number import RECORD_KINDS
from sp_bench.cli.words import lengths, shape
from sp_bench.errors import RequestError
from sp_bench.point.given import NOT_IN_THE_RESULT, SHAPE
from sp_bench.records import Record
from sp_bench.records.gather import gather
from sp_bench.records.provenance import git
from sp_bench.resources import ROOT

HOW_OFTEN = ("iters", "warmup")
"""Keys that change the precision of a result, not its value."""
ATTENTION = (*SHAPE, "causal", "phase")
"""Fields that two single records must share to be comparable."""


@dataclass(frozen=True)
class Point:
    """A record and the path of its file."""

    record: Record
    path: Path
    runs: tuple[Point, ...] = ()
    """It and the other records of its request with its status, by the same code on the same machine."""

    @property
    def label(self) -> str:
        """A short description of the point: method, GPUs, cluster, tokens and shape."""
        record = self.record
        return f"{named(record)}, {record.gpus}x {record.cluster}, {lengths(record)}, {shape(record)}"

    @property
    def asked(self) -> dict[str, Any]:
        """The part of the request that changes the result, by dotted key. Resolved values replace `auto`."""
        record, config = self.record, self.record.config or {}
        kept = {key: value for key, value in config.items() if key not in (*NOT_IN_THE_RESULT, *HOW_OFTEN)}
        resolved = {key: getattr(record, key) for key in (*ATTENTION, "gpus", "dtype", "wire_dtype", "mode", "impl")}
        return dict(_flat(kept | resolved))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class Paired:
    """The points that both sets have, those that only one has, and notes on the choice."""

    pairs: list[tuple[Point, Point]]
    only_a: list[Point]
    only_b: list[Point]
    notes: list[str]


def read(argument: str, notes: list[str]) -> list[Point]:
    """The record of a file, or all records below a folder; of FOLDER@COMMIT, those by that commit.

    Raises RequestError where there is none.
    """
    path, would_work = Path(argument), "results, or results/<run_id>.json, would work"
    if not path.exists() and "@" in argument:
        folder, _, commit = argument.rpartition("@")
        by_commit: dict[str, list[Point]] = {}
        for point in read(folder, notes):
            by_commit.setdefault(provenance_of(point.record).get("git_commit") or "unknown", []).append(point)
        named = git(ROOT, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
        points = [point for made_by, own in by_commit.items() if made_by.startswith(named or commit) for point in own]
        if not points:
            commits = sorted(made_by[:7] for made_by in by_commit)
            raise RequestError(argument, "has no records", f"{folder}@{commits[0]} would work; commits: {commits}")
        return points
    if path.is_dir():
        gathered = gather([path])
        if others := [*gathered.unread.values(), *(why for _, why in gathered.broken.values())]:
            notes.append(f"{argument} has {len(others)} files that this code can't read as records: {others[0]}")
        if not gathered.records:
            raise RequestError(argument, "has no records", would_work)
        return [Point(record, file) for file, record in gathered.records.items()]
    try:
        return [Point(records.read(path), path)]
    except (OSError, ValueError) as error:
        raise RequestError(argument, f"is neither a folder nor a record ({error})", would_work) from None


def provenance_of(record: Record) -> Mapping[str, Any]:
    """The provenance of a record, empty where it has none."""
    return record.provenance or {}


def paired(name_a: str, name_b: str) -> Paired:
    """Pair the records of two files, or of two folders by their whole request.

    Two files are a pair if their attention is the same; method, variant, cluster and GPUs may differ. Raises
    RequestError for different attention, for measured beside simulated, and where no point is in both folders.
    """
    notes: list[str] = []
    a, b = read(name_a, notes), read(name_b, notes)
    if Path(name_a).is_file() and Path(name_b).is_file():
        return Paired([_two(name_a, a[0], name_b, b[0])], [], [], [])
    by_key = [_newest(name, points, notes) for name, points in ((name_a, a), (name_b, b))]
    both = [key for key in by_key[0] if key in by_key[1]]
    if not both:
        kinds = [{RECORD_KINDS[point.record.mode] for point in points} for points in (a, b)]
        if kinds[0].isdisjoint(kinds[1]):
            raise _mixed(name_a, min(kinds[0]), name_b, min(kinds[1]))
        raise RequestError(
            f"{name_a} and {name_b}", "no point is in both", "the same sweep into two folders would work"
        )
    only = [[point for key, point in own.items() if key not in both] for own in by_key]
    return Paired([(by_key[0][key], by_key[1][key]) for key in both], only[0], only[1], notes)


def _two(name_a: str, a: Point, name_b: str, b: Point) -> tuple[Point, Point]:
    if a.record.mode != b.record.mode:
        raise _mixed(name_a, RECORD_KINDS[a.record.mode], name_b, RECORD_KINDS[b.record.mode])
    for key in ATTENTION:
        if getattr(a.record, key) != getattr(b.record, key):
            given = f"{key}={getattr(a.record, key)} and {getattr(b.record, key)}"
            raise RequestError(
                given, "two records must be of the same attention", "one with the same values would work"
            )
    return a, b


def _mixed(name_a: str, kind_a: str, name_b: str, kind_b: str) -> RequestError:
    return RequestError(
        f"{name_a} and {name_b}",
        f"the first is {kind_a} and the second {kind_b}, which are not compared",
        "python -m sp_bench.validate, or two of one mode, would work",
    )


def _newest(name: str, points: Sequence[Point], notes: list[str]) -> dict[str, Point]:
    """The points by their request as JSON: of several the newest with its runs. Others are left out, with a note."""
    of_key: dict[str, list[Point]] = {}
    for point in sorted(points, key=_written):
        of_key.setdefault(json.dumps(point.asked, sort_keys=True, default=str), []).append(point)
    by_request = {}
    for key, several in of_key.items():
        newest = several[-1]
        by_request[key] = replace(newest, runs=tuple(point for point in several if _is_run_of(newest, point)))
    if older := len(points) - sum(len(point.runs) for point in by_request.values()):
        notes.append(f"{name} has {older} older records of these points, by other code or machines: left out")
    return {key: by_request[key] for key in sorted(by_request, key=lambda key: by_request[key].label)}


def _is_run_of(newest: Point, other: Point) -> bool:
    alike = _machine(newest.record) == _machine(other.record)
    return alike and newest.record.status == other.record.status


def _written(point: Point) -> tuple[float, str]:
    return point.path.stat().st_mtime, point.record.run_id


def in_turn(a: Record, b: Record) -> bool:
    """Whether two measured points were timed in one run, with their iterations in turn."""
    at = [(provenance_of(record).get("host"), provenance_of(record).get("measured_at")) for record in (a, b)]
    return at[0] == at[1] and at[0][1] is not None


def differences(a: Point, b: Point) -> list[str]:
    """The differences in the requests and variants, as `key: value of A, value of B`."""
    asked_a, asked_b = a.asked, b.asked
    keys = [key for key in {**asked_a, **asked_b} if asked_a.get(key) != asked_b.get(key)]
    lines = [f"{key}: {asked_a.get(key, '-')}, {asked_b.get(key, '-')}" for key in keys]
    if a.record.variant != b.record.variant:
        lines.append(f"variant: {a.record.variant}, {b.record.variant}")
    return lines


def machines(pairs: Sequence[tuple[Point, Point]]) -> list[str]:
    """The differences in the machines and the code behind the pairs, a line for each."""
    lines: dict[str, None] = {}
    for a, b in pairs:
        there_a, there_b = (_machine(point.record) for point in (a, b))
        for key in there_a:
            if there_a[key] != there_b[key]:
                lines[f"{key} is {there_a[key]} in A and {there_b[key]} in B"] = None
    return list(lines)


def _machine(record: Record) -> dict[str, Any]:
    """The machine and the code of a point; for a simulated point only the code."""
    known = provenance_of(record)
    about = {"code version": known.get("code_version")}
    if record.measured:
        about |= {key: known.get(key) for key in ("host", "platform", "environment")}
        about |= {"torch": (known.get("versions") or {}).get("torch"), "kernel": record.kernel}
    return about
