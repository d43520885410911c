"""What sp_bench.conform finds of packages and of our own methods.

targets= names some of them, each as TARGET or TARGET,key=value with spaces between; without it, all are checked. What
was found stands in conform.csv beside the page; with targets only their rows are found again. Failures that are known,
with their reasons, are in conform_known.csv here, which tests hold against the found ones. Needs
`pip install "sp-bench[peers]"`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

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
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(path, text.getvalue())
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
    """What came of each check, by package."""
    there = {row["subject"] for row in found(runs)}
    missing = [f"`{subject.title}`" for subject in subjects() if subject.title not in there]
    said = f"Not in these tables, since not run yet: {', '.join(missing)}.\n\n" if missing else ""
    return said + _matrix(_by_subject(runs, peers=True))


def failures(runs: Runs) -> str:
    """What fails, and why."""
    return _failures(found(runs)) or "Nothing."


def refusals(runs: Runs) -> str:
    """What packages refuse."""
    return _refusals(_by_subject(runs, peers=True))


def methods(runs: Runs) -> str:
    """What came of each check, by method of ours."""
    return _matrix(_by_subject(runs, peers=False))


def _matrix(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    names = dict.fromkeys(check.name for check in CHECKS)
    rows = [
        [f"`{name}`", *(_short(checks[name]) if name in checks else "not run yet" for checks in found.values())]
        for name in names
    ]
    return markdown.table(["check", *(title.replace(" algorithm=", " ") for title in found)], rows)


def _short(row: Mapping[str, str]) -> str:
    held = f"holds, {row['cases']} of {int(row['cases']) + int(row['refused'])}" if int(row["refused"]) else "holds"
    return SHORT.get(row["status"], held)


def _failures(rows: Iterable[Mapping[str, str]]) -> str:
    why = {(known["subject"], known["check"]): known for known in found_rows(KNOWN)}
    lines = []
    for row in rows:
        if row["status"] == "fails":
            known = why.get((row["subject"], row["check"]), {"why": "not known", "thread": ""})
            link = f" ([{known['thread']}]({_address(known['thread'])}))" if known["thread"] else ""
            lines.append([row["subject"], f"`{row['check']}`", _escaped(row["remark"]), known["why"] + link])
    return markdown.table(["of", "check", "smallest failing case", "why"], lines) if lines else ""


def _refusals(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    lines = [
        [title, f"`{row['check']}`", f"{row['refused']} of {int(row['refused']) + int(row['cases'])}", _reason(row)]
        for title, checks in found.items()
        for row in checks.values()
        if int(row["refused"])
    ]
    return markdown.table(["package", "check", "refused", "most often because"], lines)


def _reason(row: Mapping[str, str]) -> str:
    return _escaped(row["remark"].partition("refused: ")[2])


def _address(thread: str) -> str:
    repository, _, number = thread.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
