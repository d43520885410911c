"""What sp_bench.conform finds of packages and of our own methods: docs/results/conform.md.

python -m benchmarks.conform [TARGET[,key=value] ...]

Without targets it checks all packages and methods. What was found stands in docs/results/conform.csv; with targets only
their rows are found again. Failures that are known, with their reasons, are in benchmarks/conform_known.csv, which
tests hold against the found ones. Needs `pip install "sp-bench[peers]"`.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import yaml

from benchmarks.reports import RESULTS
from sp_bench import markdown
from sp_bench.conform.catalogue import CHECKS
from sp_bench.conform.ranks import Worlds
from sp_bench.conform.report import remark
from sp_bench.conform.run import rows_of
from sp_bench.conform.subjects import Subject, subjects_named
from sp_bench.measure import pool
from sp_bench.peers.registry import PEERS
from sp_bench.records import write_whole

FOUND = RESULTS / "conform.csv"
PAGE = RESULTS / "conform.md"
KNOWN = Path(__file__).with_name("conform_known.csv")
COLUMNS: tuple[str, ...] = ("subject", "check", "status", "cases", "failed", "refused", "remark")
SHRINK_S, TIMEOUT_S = 5.0, 120.0
PRELOADED = ["sp_bench.conform.checks", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"]
"""What ranks would each import: every pool of ranks is started again after a failure."""
PACKAGES = ("torch", "ring-flash-attn", "yunchang", "deepspeed")
SHORT = {"fails": "**fails**", "refused": "refused", "not claimed": "-"}
ABOUT = """# Conformance of packages and of our methods

Made by `python -m benchmarks.conform`, on gloo and CPUs with 1, 2, 3, 4, 6 and 8 ranks, in the short profile.
Versions: {versions}.

- What each check looks for is in [Check a sequence-parallel attention](../how-to/conform.md#what-is-checked).
- Packages built on flash_attn run with a stand-in for its kernel ([Other packages](../how-to/peers.md)), in the dtypes
  that they are made for.
- **fails**: a case is wrong, hangs, or raises what is no refusal. *Refused*: the package does none of the cases, and
  says or documents so. A check with a number *holds* in so many cases and refuses the others. A dash: not claimed.
- The test suite runs the packages' checks on two ranks, and holds their failures against
  `benchmarks/conform_known.csv`: one that is new fails it, and so does one that is gone. It runs ours on all ranks."""


def subject_rows(subject: Subject) -> list[dict[str, str]]:
    """The rows of a subject: what came of every check, with the smallest failing case."""
    with Worlds(TIMEOUT_S) as worlds:
        rows = rows_of(subject, worlds, shrink_s=SHRINK_S)
    values = [
        (subject.title, r.check.name, r.status, r.cases, r.failed, sum(r.refused.values()), remark(r)) for r in rows
    ]
    return [dict(zip(COLUMNS, map(str, each), strict=True)) for each in values]


def found_rows(path: Path = FOUND) -> list[dict[str, str]]:
    """The rows of a file; none if there isn't one."""
    return list(csv.DictReader(path.open())) if path.exists() else []


def subjects() -> list[Subject]:
    """All packages and methods, in the page's order."""
    return [*subjects_named("peers", {}), *subjects_named("methods", {})]


def named(target: str) -> Iterable[Subject]:
    """The subjects of TARGET[,key=value]."""
    name, *options = target.split(",")
    return subjects_named(name, {key: yaml.safe_load(text) for key, _, text in (o.partition("=") for o in options)})


def page(rows: Sequence[Mapping[str, str]]) -> str:
    """The Markdown page."""
    by_subject: dict[str, dict[str, Mapping[str, str]]] = {}
    for row in rows:
        by_subject.setdefault(row["subject"], {})[row["check"]] = row
    packages = {name: found for name, found in by_subject.items() if name.partition(" ")[0] in PEERS}
    methods = {name: found for name, found in by_subject.items() if name not in packages}
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in PACKAGES)
    names = {check.name: None for check in CHECKS}
    missing = [f"`{subject.title}`" for subject in subjects() if subject.title not in by_subject]
    parts = [
        ABOUT.format(versions=versions),
        *([f"Not in these tables, since not run yet: {', '.join(missing)}."] if missing else []),
        "## Packages",
        _matrix(packages, names),
        "## What fails",
        _failures(rows) or "Nothing.",
        "## What they refuse",
        _refusals(packages),
        "## Our methods",
        _matrix(methods, names),
    ]
    return "\n\n".join(parts) + "\n"


def _matrix(found: Mapping[str, Mapping[str, Mapping[str, str]]], names: Iterable[str]) -> str:
    rows = [[f"`{name}`", *(_short(checks[name]) for checks in found.values())] for name in names]
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


def main(targets: Sequence[str]) -> int:
    """Check the targets, and write the file and the page after each."""
    pool.PRELOADED += PRELOADED
    order = [subject.title for subject in subjects()]
    for subject in [each for target in targets for each in named(target)] or subjects():
        new = subject_rows(subject)
        rows = [row for row in found_rows() if row["subject"] != subject.title and row["subject"] in order] + new
        rows.sort(key=lambda row: order.index(row["subject"]))
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(FOUND, text.getvalue())
        PAGE.write_text(page(rows))
        print(subject.title, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
