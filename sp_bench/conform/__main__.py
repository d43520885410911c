"""python -m sp_bench.conform TARGET [key=value ...]

Does a sequence-parallel attention hold what attention must hold? It is run on 1 to 8 gloo ranks of this machine and
compared with fp64, called as training code calls it, and each failure is shrunk to the smallest case that fails.

  python -m sp_bench.conform my_module:fn method.layout=zigzag        a function fn(q, k, v, *, causal, group)
  python -m sp_bench.conform ring_flash_attn method.algorithm=zigzag  a package that sp_bench knows
  python -m sp_bench.conform mesh method.tile=[2,2]                   a method of sp_bench
  python -m sp_bench.conform methods | peers                          all of them that run on CPUs

Keys: profile=short|long, sizes=1,2,4 (numbers of ranks), checks=out,dq,... (default: all), markdown=FILE, junit=FILE,
shrink_s=20 (seconds to shrink each failure, and to try other layouts; 0: don't), timeout_s=60 (silent ranks count as
hung).
A function's claims: method.layout, shard, unshard (module:fn each), masks, dtypes, head_parallel, sub_groups, uneven,
documents, window, scale. They may stand beside the function instead (sp_bench.conform.claims). Other keys are options
of the package or method, method.KEY or KEY. Exit codes: 0 all that was run holds, 1 something fails, 2 a request that
can't be served.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from sp_bench.cli.arguments import run_command
from sp_bench.conform.cases import SIZES
from sp_bench.conform.catalogue import CHECKS, PROFILES, Check
from sp_bench.conform.ranks import TIMEOUT_S, Worlds
from sp_bench.conform.report import advice, as_junit, as_markdown, table
from sp_bench.conform.run import SHRINK_S, Row, rows_of
from sp_bench.conform.subjects import Subject, subjects_named
from sp_bench.errors import RequestError, nearest, unknown
from sp_bench.extras import require
from sp_bench.reading import Count, NotNegative, Seconds, read

COMMAND = (
    "conform",
    "my_module:fn sizes=1,2,4 checks=out,dq profile=short",
    "checks your attention against fp64, as training calls it",
)

KEYS = ("profile", "sizes", "checks", "markdown", "junit", "shrink_s", "timeout_s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_command("sp_bench.conform", __doc__ or "", _conform, argv)


def _conform(arguments: Sequence[str]) -> int:
    require("conform", "sp_bench.conform")
    targets = [a for a in arguments if "=" not in a]
    if len(targets) != 1:
        would_work = "my_module:fn, ring, ring_flash_attn, methods or peers would work"
        raise RequestError(" ".join(targets) or "no target", "there is one thing to check", would_work)
    given = {key: value for key, _, value in (a.partition("=") for a in arguments if "=" in a)}
    sys.path.insert(0, os.getcwd()) if os.getcwd() not in sys.path else None
    options = {key: yaml.safe_load(value) for key, value in given.items() if key not in KEYS}
    subjects = subjects_named(targets[0], options)
    profile = given.get("profile", PROFILES[0])
    if profile not in PROFILES:
        raise unknown("profile", profile, PROFILES)
    long, sizes, checks = profile == "long", sizes_named(given.get("sizes", "")), checks_named(given.get("checks", ""))
    shrink_s = read(NotNegative, yaml.safe_load(given.get("shrink_s", str(SHRINK_S))), "shrink_s")
    timeout_s = read(Seconds, yaml.safe_load(given.get("timeout_s", str(TIMEOUT_S))), "timeout_s")
    files = {kind: _writable(kind, given[kind]) for kind in ("markdown", "junit") if kind in given}
    by_subject: dict[str, list[Row]] = {}
    with Worlds(timeout_s) as worlds:
        for subject in subjects:
            by_subject[subject.title] = _watched(
                subject, worlds, long=long, sizes=sizes, checks=checks, shrink_s=shrink_s
            )
            console = Console(width=None if sys.stdout.isatty() else 200)
            console.print(table(subject.title, by_subject[subject.title]))
            if text := advice(subject.title, by_subject[subject.title]):
                console.print(text, markup=False, highlight=False)
    for kind, path in files.items():
        path.write_text(as_markdown(by_subject) if kind == "markdown" else as_junit(by_subject))
    return int(any(row.status == "fails" for rows in by_subject.values() for row in rows))


def _watched(subject: Subject, worlds: Worlds, **how: Any) -> list[Row]:
    """The rows of a subject, with the running check on stderr where that is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(subject.title)
        return rows_of(
            subject,
            worlds,
            done=lambda row: progress.update(task, description=f"{subject.title}: {row.check.name} {row.status}"),
            **how,
        )


def sizes_named(text: str) -> list[int]:
    """Numbers of ranks from "1,2,4"; all if empty. Raises RequestError for another number."""
    sizes = [read(Count, word, "sizes") for word in text.split(",") if word]
    for size in sizes:
        if size not in SIZES:
            raise RequestError(f"sizes={size}", "is not run", f"one of {', '.join(map(str, SIZES))} would work")
    return sizes or list(SIZES)


def checks_named(text: str) -> list[Check]:
    """Checks from "out,dq"; all if empty. Raises RequestError for an unknown one."""
    names, known = [word for word in text.split(",") if word], {check.name: check for check in CHECKS}
    for name in names:
        if name not in known:
            raise RequestError(f"checks={name}", "there is no such check", nearest(name, known))
    return [known[name] for name in names] or list(CHECKS)


def _writable(key: str, name: str) -> Path:
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise RequestError(
            f"{key}={name}", f"can't be written ({error.strerror})", f"{key}=report would work"
        ) from None
    return path


if __name__ == "__main__":
    sys.exit(main())
