"""python -m analysis.reproduce: write the report of the papers, or the page of a study. Missing points are run."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from sp_bench.analysis import report
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section
from sp_bench.analysis.studies import Study, papers, studies, study_named
from sp_bench.cli.arguments import flag, only_keys, run_command, writable_folder
from sp_bench.errors import RequestError, unknown
from sp_bench.resources import ROOT

COMMAND = ("reproduce", "paper=all | study=NAME", "the papers' tables and figures beside ours")

USAGE = """\
python -m analysis.reproduce [paper=NAME,NAME] [out=FOLDER] [notebooks=true|false]

Runs the points that a paper's tables and figures need, and writes FOLDER/report.html with everything in it. Most points
are simulated; a few are measured on this machine's cores. Beside the report are tables/ (Markdown, LaTeX, HTML, CSV),
figures/ (PDF, SVG, PNG), notebooks/ (executed) and records/. Points with a record there are not run again.

  paper=all             all, or some of: {papers}
                        (of another study, its page: as study=NAME)
  out=results/report    the folder
  notebooks=true        execute the notebooks too

python -m analysis.reproduce study=NAME [records=FOLDER] [pages=FOLDER] [key=value]

Writes the page of one study, NAME.md, with its pictures.

  study=NAME            one of: {studies}
  records=FOLDER        its records; points with a record there are not run again
  pages=docs/results    the folder of the page
  key=value             what the study can be asked for; `study=NAME --help` lists it
"""
KEYS = {"paper": "all", "out": "results/report", "notebooks": "true"}
PAGES = ROOT / "docs" / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    usage = USAGE.format(papers=_listed(papers()), studies=_listed(studies()))
    # A study that is no part of the report has a page of its own, by whichever of both names it is asked for.
    arguments = [f"study={one[6:]}" if one[:6] == "paper=" and one[6:] in _pages() else one for one in arguments]
    name = next((text.removeprefix("study=") for text in arguments if text.startswith("study=")), None)
    if name in studies():
        study = study_named(name)
        usage = f"python -m analysis.reproduce study={name}\n\n{study.module.__doc__}"
        return run_command("analysis.reproduce", usage, lambda given: _page(study, given), arguments)
    return run_command("analysis.reproduce", usage, _report, arguments)


def _pages() -> list[str]:
    """The studies that are no part of the report."""
    return [name for name in studies() if name not in papers()]


def _listed(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names), 96).replace("\n", "\n" + 24 * " ")


def _page(study: Study, arguments: Sequence[str]) -> int:
    """Write the page of a study; returns the exit code, 1 if something of it went wrong."""
    pages = PAGES if PAGES.is_dir() else Path("results/pages")
    keys = {"study": study.name, "records": str(study.records), "pages": str(pages)}
    given = {**keys, **study.options, **only_keys(arguments, {**keys, **study.options})}
    runs = Runs(Path(given["records"]), options={name: given[name] for name in study.options})
    print(study.write(runs, writable_folder("pages", given["pages"])))
    print(*runs.failed, sep="\n", end="\n" if runs.failed else "")
    return 1 if runs.failed else 0


def _report(arguments: Sequence[str]) -> int:
    known = {**KEYS, "study": ""}
    given = {**known, **only_keys(arguments, known)}
    if given["study"]:
        study_named(given["study"])
    of_papers = papers()
    chosen = list(of_papers) if given["paper"] == "all" else list(dict.fromkeys(given["paper"].split(",")))
    for paper in chosen:
        if paper not in of_papers:
            raise unknown("paper", paper, [*of_papers, "all"])
    with_notebooks = flag(given, "notebooks")
    if with_notebooks and not all(map(find_spec, ("ipykernel", "nbclient", "nbformat"))):
        works = 'pip install "sp-bench[analysis]", or notebooks=false, would work'
        raise RequestError("notebooks=true", "needs ipykernel, nbclient and nbformat", works)
    return reproduce([of_papers[paper] for paper in chosen], Path(given["out"]), with_notebooks=with_notebooks)


def reproduce(chosen: Sequence[Study], out: Path, *, with_notebooks: bool) -> int:
    """Write the report and its parts to `out`; returns the exit code, 1 if a notebook has an error."""
    console, started, ran = Console(), time.perf_counter(), []
    by_study: dict[str, list[Section]] = {}
    executed: dict[str, Future[str]] = {}
    # Those of earlier studies are executed while points of later ones are simulated, and none while one is measured.
    runs = Runs(out / "records", progress=ran.append, leave_alone=lambda: wait_for(executed.values()))
    with ThreadPoolExecutor(runs.workers) as pool:
        for study in chosen:
            begun, before = time.perf_counter(), len(ran)
            with console.status(study.title):
                sections = by_study[study.title] = study.sections(replace(runs, options=study.options))
            took = f"{len(ran) - before} points in {time.perf_counter() - begun:.0f} s"
            console.print(f"{study.title}: {len(sections)} sections, {took}", highlight=False)
            if with_notebooks:
                from sp_bench.analysis import notebooks

                executed[study.name] = pool.submit(notebooks.execute, study.name, out / "notebooks", runs.folder)
        runs.rest()
        with console.status("report"):
            report.write(
                out / "report.html",
                "Sequence-parallel attention: the papers' figures and ours",
                by_study,
                "Every number links to its source: a record (with the command that makes it again), a formula, or the"
                " paper's table.",
            )
            errors = {name: error for name, notebook in executed.items() if (error := notebook.result())}
    for name, error in errors.items():
        console.print(f"notebook {name}: {error}", highlight=False)
    seconds = time.perf_counter() - started
    console.print(f"{out / 'report.html'}: {len(ran)} points, {seconds:.0f} s", highlight=False)
    return 1 if errors or runs.failed else 0


if __name__ == "__main__":
    sys.exit(main())
