"""Findings of sp_bench.conform on packages and on our own methods.

targets= names some of them, each as TARGET or TARGET,key=value with spaces between; without it, all are checked. The
findings stand in conform.csv beside the page; with targets only their rows are made again. Known failures, with their
reasons, are in conform_known.csv here, which tests compare with the found ones. Needs
`pip install "sp-bench[peers]"`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import yaml

from sp_bench import markdown
from sp_bench.analysis.runs import Runs
from sp_bench.conform.catalogue import CHECKS
from sp_bench.conform.ranks import Worlds
from sp_bench.conform.report import remark
from sp_bench.conform.run import rows_of
from sp_bench.conform.subjects import Subject, subjects_named
from sp_bench.peers.registry import PEERS
from sp_bench.records import write_whole

OPTIONS = {"targets": ""}
KNOWN = Path(__file__).with_name("conform_known.csv")
COLUMNS: tuple[str, ...] = ("subject", "check", "status", "cases", "failed", "refused", "remark")
SHRINK_S, TIMEOUT_S = 5.0, 120.0
PACKAGES = ("torch", "ring-flash-attn", "yunchang", "deepspeed")
SHORT = {"fails": "**fails**", "refused": "refused", "not claimed": "-", "not run": "not run"}


def subject_rows(subject: Subject) -> list[dict[str, str]]:
    """The rows of a subject: what came of every check, with the smallest failing case."""
    with Worlds(TIMEOUT_S) as worlds:
        rows = rows_of(subject, worlds, shrink_s=SHRINK_S)
    values = [
        (subject.title, r.check.name, r.status, r.cases, r.failed, sum(r.refused.values()), remark(r)) for r in rows
    ]
    return [dict(zip(COLUMNS, map(str, each), strict=True)) for each in values]


def found_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file; none if there isn't one."""
    return list(csv.DictReader(path.open())) if path.exists() else []


def subjects() -> list[Subject]:
    """All packages and methods, in the page's order."""
    return [*subjects_named("peers", {}), *subjects_named("methods", {})]


def named(target: str) -> Iterable[Subject]:
    """The subjects of TARGET[,key=value]."""
    name, *options = target.split(",")
    return subjects_named(name, {key: yaml.safe_load(text) for key, _, text in (o.partition("=") for o in options)})


@cache
def found(runs: Runs) -> list[dict[str, str]]:
    """All rows; those of the targets are found again, and kept in conform.csv after each."""
    order, path = [subject.title for subject in subjects()], runs.pages / "conform.csv"
    targets = runs.options["targets"].split()
    for subject in [each for target in targets for each in named(target)] or subjects():
        new = subject_rows(subject)
        rows = [row for row in found_rows(path) if row["subject"] != subject.title and row["subject"] in order] + new
        rows.sort(key=lambda row: order.index(row["subject"]))
        write_whole(path, pd.DataFrame(rows, columns=[*COLUMNS]).to_csv(index=False, lineterminator="\n"))
        print(subject.title, flush=True)
    return found_rows(path)


def _by_subject(runs: Runs, *, peers: bool) -> dict[str, dict[str, Mapping[str, str]]]:
    """The rows of packages, or of our methods, by subject and check."""
    made: dict[str, dict[str, Mapping[str, str]]] = {}
    for row in found(runs):
        if (row["subject"].partition(" ")[0] in PEERS) == peers:
            made.setdefault(row["subject"], {})[row["check"]] = row
    return made


def versions(_: Runs) -> str:
    """The versions of the packages."""
    return ", ".join(f"{name} {version(name).partition('+')[0]}" for name in PACKAGES)


def packages(runs: Runs) -> str:
    """The outcome of each check, by package."""
    installed = {row["subject"] for row in found(runs)}
    missing = [f"`{subject.title}`" for subject in subjects() if subject.title not in installed]
    said = f"Not in these tables, since not run yet: {', '.join(missing)}.\n\n" if missing else ""
    return said + _matrix(_by_subject(runs, peers=True))


def methods(runs: Runs) -> str:
    """The outcome of each check, by method of ours."""
    return _matrix(_by_subject(runs, peers=False))


def _matrix(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    rows = [
        [f"`{name}`", *(_short(checks[name]) if name in checks else "not run yet" for checks in found.values())]
        for name in dict.fromkeys(check.name for check in CHECKS)
    ]
    return markdown.table(["check", *(title.replace(" algorithm=", " ") for title in found)], rows)


def _short(row: Mapping[str, str]) -> str:
    held = f"holds, {row['cases']} of {int(row['cases']) + int(row['refused'])}" if int(row["refused"]) else "holds"
    return SHORT.get(row["status"], held)


def failures(runs: Runs) -> str:
    """The failing checks, and why they fail."""
    why, lines = {(known["subject"], known["check"]): known for known in found_rows(KNOWN)}, []
    for row in found(runs):
        if row["status"] == "fails":
            known = why.get((row["subject"], row["check"]), {"why": "not known", "thread": ""})
            repository, _, number = known["thread"].partition("#")
            address = f"https://github.com/{repository}/issues/{number}"
            link = f" ([{known['thread']}]({address}))" if known["thread"] else ""
            lines.append([row["subject"], f"`{row['check']}`", row["remark"], known["why"] + link])
    return markdown.table(["of", "check", "smallest failing case", "why"], lines) if lines else "Nothing."


def refusals(runs: Runs) -> str:
    """The cases that packages refuse, by check."""
    lines = []
    for title, checks in _by_subject(runs, peers=True).items():
        for row in (row for row in checks.values() if int(row["refused"])):
            count = f"{row['refused']} of {int(row['refused']) + int(row['cases'])}"
            lines.append([title, f"`{row['check']}`", count, row["remark"].partition("refused: ")[2]])
    return markdown.table(["package", "check", "refused", "most often because"], lines)
