"""python -m analysis.article [records=FOLDER]: write docs/results/honest.md, the study "Which method, honestly".

Points with a record in the folder are not run again (results/report/records, as analysis.reproduce has it).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sp_bench import markdown
from sp_bench.analysis.figure import Figure
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import STUDIES
from sp_bench.cli.arguments import only_keys, run_command
from sp_bench.resources import ROOT

STUDY = "honest"
PAGES = ROOT / "docs" / "results"
KEYS = {"records": "results/report/records"}
OPENING = """
Made by `python -m analysis.article`. The same study with its sources, each number with the command that makes it again,
is `python -m analysis.reproduce paper=honest`.

Which method of sequence parallelism is the fastest depends on the cluster, the number of GPUs and the grouping of
heads, and often nobody can say: the errors of any prediction are larger than the differences. So every time below has
an interval, measured or assumed, and methods whose intervals overlap the fastest one's are called tied.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_command("analysis.article", __doc__ or "", _write, argv)


def _write(arguments: Sequence[str]) -> int:
    runs = Runs(Path({**KEYS, **only_keys(arguments, KEYS)}["records"]))
    print(write(runs, PAGES))
    return 0


def write(runs: Runs, folder: Path) -> Path:
    """Write the page and its figures (SVG) to `folder`; returns the page's path."""
    title, made = STUDIES[STUDY]
    sections = [section(runs) for section in made]
    for figure in (part for section in sections for part in section.parts if isinstance(part, Figure)):
        figure.save(folder, formats=("svg",))
    pages = [markdown.filled(section.to_markdown(figures=True)) for section in sections]
    page = folder / f"{STUDY}.md"
    page.write_text("\n\n".join([f"# {title}", OPENING.strip(), *pages]) + "\n")
    return page


if __name__ == "__main__":
    sys.exit(main())
