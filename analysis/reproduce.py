"""python -m analysis.reproduce paper=all: run missing points, and make tables, figures, notebooks and the report."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from sp_bench.analysis import report
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section
from sp_bench.analysis.studies import STUDIES
from sp_bench.cli.arguments import flag, only_keys, run_command
from sp_bench.errors import RequestError, unknown

USAGE = """\
python -m analysis.reproduce [paper=NAME,NAME] [out=FOLDER] [notebooks=true|false]

Runs the points that a paper's tables and figures need, and writes FOLDER/report.html with everything in it. Most points
are simulated; a few are measured on this machine's cores. Beside the report are tables/ (Markdown, LaTeX, HTML, CSV),
figures/ (PDF, SVG, PNG), notebooks/ (executed) and records/. Points with a record there are not run again.

  paper=all             all, or some of: {papers}
  out=results/report    the folder
  notebooks=true        execute the notebooks too
"""
KEYS = {"paper": "all", "out": "results/report", "notebooks": "true"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command("analysis.reproduce", USAGE.format(papers=", ".join(STUDIES)), _reproduce, argv)


def _reproduce(arguments: Sequence[str]) -> int:
    given = {**KEYS, **only_keys(arguments, KEYS)}
    papers = list(STUDIES) if given["paper"] == "all" else list(dict.fromkeys(given["paper"].split(",")))
    for paper in papers:
        if paper not in STUDIES:
            raise unknown("paper", paper, [*STUDIES, "all"])
    with_notebooks = flag(given, "notebooks")
    if with_notebooks and not all(map(find_spec, ("ipykernel", "jupytext", "nbclient"))):
        works = 'pip install "sp-bench[analysis]", or notebooks=false, would work'
        raise RequestError("notebooks=true", "needs ipykernel, jupytext and nbclient", works)
    return reproduce(papers, Path(given["out"]), with_notebooks=with_notebooks)


def reproduce(papers: Sequence[str], out: Path, *, with_notebooks: bool) -> int:
    """Write the report and its parts to `out`; returns the exit code, 1 if a notebook has an error."""
    console, started, ran = Console(), time.perf_counter(), []
    runs = Runs(out / "records", progress=ran.append)
    found: dict[str, list[Section]] = {}
    for paper in papers:
        title, study = STUDIES[paper]
        begun, before = time.perf_counter(), len(ran)
        with console.status(title):
            found[title] = [section(runs) for section in study]
        points, seconds = len(ran) - before, time.perf_counter() - begun
        console.print(f"{title}: {len(found[title])} sections, {points} points in {seconds:.0f} s", highlight=False)
    report.write(
        out / "report.html",
        "Sequence-parallel attention: the papers' figures and ours",
        found,
        "Every number links to its source: a record (with the command that makes it again), a formula, or the paper's"
        " table.",
    )
    failed = []
    if with_notebooks:
        from sp_bench.analysis import notebooks

        for paper in papers:
            with console.status(f"notebook {paper}"):
                error = notebooks.execute(paper, out / "notebooks", out / "records")
            if error:
                failed.append(paper)
                console.print(f"notebook {paper}: {error}", highlight=False)
    seconds = time.perf_counter() - started
    console.print(f"{out / 'report.html'}: {len(ran)} points, {seconds:.0f} s", highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
