"""Notebooks of studies: `python -m sp_bench.analysis.notebooks NAME ...` writes results/notebooks/NAME.ipynb.

A notebook is a study's page: words are text, or a cell that fills in what they name; each figure is a cell that shows
it, and code is a cell to run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from sp_bench.analysis.studies import SLOT, Study, study_named
from sp_bench.cli.arguments import keys_and_paths, run_command
from sp_bench.resources import ROOT

COMMAND = ("notebooks", "STUDY ...", "a study's page as an executed notebook")

RECORDS = "SP_BENCH_RECORDS"
"""The environment variable with the folder of records; without it, that of the study."""
TIMEOUT_S = 600
FIRST = """\
import os
from pathlib import Path

from IPython.display import Markdown

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import {name}, study_named

study = study_named("{name}")
runs = Runs(Path(os.environ.get("{variable}", "{records}")), options=study.options)"""
_CODE = re.compile(r"^```python\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
_IN_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def notebook(study: Study) -> nbformat.NotebookNode:
    """The study's notebook, without outputs."""
    code, text = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    first = FIRST.format(name=study.name, variable=RECORDS, records=study.records)
    cells = [f"# {study.title}", code(first), *_cells(study)]
    return nbformat.v4.new_notebook(cells=[one if not isinstance(one, str) else text(one) for one in cells])


def _cells(study: Study) -> list[str | nbformat.NotebookNode]:
    """The page's words, figures and code below its title, in order.

    A slot that stands alone is a figure's cell; words with slots inside are shown by a cell that fills them.
    """
    code, cells = nbformat.v4.new_code_cell, []
    for i, part in enumerate(_CODE.split(study.page.partition("\n")[2])):
        if i % 2:
            cells.append(code(part))
            continue
        for block in filter(None, map(str.strip, re.split(r"^(\{\w+\})$", part, flags=re.MULTILINE))):
            slot = SLOT.fullmatch(block)
            if slot and callable(getattr(study.module, slot[1], None)):
                cells.append(code(f"{study.name}.{slot[1]}(runs)"))
            elif any(SLOT.findall(block)):
                cells.append(code(f"Markdown(study.filled({_literal(block)}, runs))"))
            else:
                cells.append(block)
    return cells


def _literal(text: str) -> str:
    """The text as a Python literal of several lines."""
    escaped = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""\\\n{escaped}\n"""'


def execute(name: str, out: Path, records: Path) -> str:
    """Execute a study's notebook and write it with its outputs to <out>/<name>.ipynb; returns a cell's error, or ""."""
    made = notebook(study_named(name))
    environment = {**os.environ, RECORDS: str(records.resolve()), "PYTHONPATH": str(ROOT)}
    client = NotebookClient(made, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    error = ""
    try:
        client.execute(env=environment)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as failure:
        error = _IN_COLOUR.sub("", str(failure).strip().splitlines()[-1])
    write(made, out / f"{name}.ipynb")
    return error


def write(made: nbformat.NotebookNode, path: Path) -> None:
    """Write a notebook to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(made, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_command("analysis.notebooks", __doc__ or "", _write, argv)


def _write(arguments: list[str]) -> int:
    given, names = keys_and_paths(arguments, ["out"])
    for study in map(study_named, names):
        path = Path(given.get("out", "results/notebooks")) / f"{study.name}.ipynb"
        write(notebook(study), path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
