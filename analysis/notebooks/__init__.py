"""Notebooks as text, in jupytext's percent format. Their outputs are made on demand.

Open one with `jupytext --to ipynb analysis/notebooks/mesh.py`, or in an editor that knows `# %%` cells.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from sp_bench.resources import ROOT

HERE = Path(__file__).parent
RECORDS = "SP_BENCH_RECORDS"
"""The environment variable with the folder of records; notebooks use results/report/records without it."""
TIMEOUT_S = 600
_IN_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def execute(name: str, out: Path, records: Path) -> str:
    """Execute a notebook and write it with its outputs to <out>/<name>.ipynb; returns a cell's error, or ""."""
    notebook = jupytext.read(HERE / f"{name}.py")
    environment = {**os.environ, RECORDS: str(records.resolve()), "PYTHONPATH": str(ROOT)}
    client = NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}
    )
    error = ""
    try:
        client.execute(env=environment)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as failure:
        error = _IN_COLOUR.sub("", str(failure).strip().splitlines()[-1])
    out.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, out / f"{name}.ipynb")
    return error
