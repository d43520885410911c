"""Figures of the page on the Mesh-Attention paper's cluster. The paper's tables are those of the study `mesh`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sp_bench import markdown
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies.mesh.cells import cell_records, seconds
from sp_bench.analysis.studies.mesh.paper import errors, fitted, held_out, paper_s
from sp_bench.analysis.studies.mesh_paper.fit import FITS, PARAMETERS


def summary(runs: Runs) -> str:
    """Errors on the fitted and on the held-out cells."""
    paper, rows = paper_s(), []
    ours = {c: seconds(record).known for c, record in cell_records(runs, paper).items()}
    sets = {"fitted: Ring, and Mesh on 32 GPUs": fitted(), "held out: Mesh on 64, 128, 256 GPUs": held_out()}
    sets |= {f"held out, {n} GPUs": [cell for cell in held_out() if cell.gpus == n] for n in (64, 128, 256)}
    for name, cells in sets.items():
        ratios = [ours[cell] / paper[cell] for cell in cells]
        median, most = errors(ratios)
        rows.append([name, len(cells), f"{median:.1%}", f"{most:.1%}", f"{math.exp(np.mean(np.log(ratios))):.2f}"])
    head = ["cells", "number", "median error", "max error", "geometric mean of ours / paper's time"]
    pairs = [(cell, replace(cell, method="mesh")) for cell in paper if cell.method == "ring"]
    right = sum((ours[ring] > ours[mesh]) == (paper[ring] > paper[mesh]) for ring, mesh in pairs)
    return f"{markdown.table(head, rows)}\n\nThe faster method is the paper's in {right} of {len(pairs)} pairs."


def _fits() -> Mapping[str, Any]:
    """All fits, and which was chosen, as `fit` writes them."""
    return json.loads(FITS.read_text())


def parameters(_: Runs) -> str:
    """The fitted parameters and their errors."""
    fits, rows = _fits(), []
    chosen = next(row for row in fits["fits"] if row["name"] == fits["chosen"])
    for name, value in chosen["values"].items():
        spread = chosen["spread"][name]
        known = "not determined" if spread is None else f"{spread:.0%}"
        rows.append([f"`{name}`", f"{value:.3g}", known, PARAMETERS[name].meaning])
    text = markdown.table(["parameter", "value", "standard error", "what it is"], rows)
    names, correlation = list(chosen["values"]), np.array(chosen["correlation"])
    _, i, j = max((abs(correlation[i, j]), i, j) for i in range(len(names)) for j in range(i))
    return markdown.filled(
        f"{text}\n\nNodes have {chosen['gpus_per_node']} GPUs (chosen among 4, 8, 16 and 32). Standard errors are"
        f" relative, from the slopes at the minimum. The most correlated two are `{names[i]}` and `{names[j]}`:"
        f" {correlation[i, j]:.2f}."
    )


def fits(_: Runs) -> list[dict[str, str]]:
    """All that was fitted, the best first."""
    written, rows = _fits(), []
    for row in sorted(written["fits"], key=lambda row: row["aicc"]):
        extra = ", ".join(f"{name} {value:.3g}" for name, value in row["values"].items())
        share = "a GPU" if row["own_nics"] else "a transfer"
        (median, most), (unseen, worst) = row["fitted"], row["held_out"]
        left_out = f"{row['left_out_rms']:.1%}" if row["left_out_rms"] < 1 else "one cell alone sets a parameter"
        numbers = [f"{row['squares']:.3f}", f"{row['aicc']:.1f}", left_out]
        shown = [f"{median:.1%}, {most:.0%}", f"{unseen:.1%}, {worst:.0%}"]
        mark = " (chosen)" if row["name"] == written["chosen"] else ""
        rows.append([f"{row['gpus_per_node']}{mark}", share, extra, *numbers, *shown])
    head = ["GPUs of a node", "flow rate is of", "parameters", "sum of squares", "AICc", "left-out rms"]
    head += ["fitted: median, max", "held out: median, max"]
    return [dict(zip(head, row, strict=True)) for row in rows]
