"""Writes the report on the fitted cluster of the Mesh-Attention paper, and the file of this cluster."""

from __future__ import annotations

import datetime
import math
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import yaml

from sp_bench import markdown
from sp_bench.analysis.mesh_fit import HERE, PARAMETERS, errors, fitted, held_out, paper_s
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import mesh, mesh_cells

REPORT = HERE.resolve().parent / "docs" / "results" / "mesh_paper.md"
NOTES = HERE / "mesh_paper_notes.md"
"""What the residuals mean, written by hand."""
CLUSTER_HEAD = """\
# The cluster of the Mesh-Attention paper, which names no hardware: fitted by analysis/mesh_paper.py to 30 of
# the 48 cells of its table 3, and tested on the other 18 (docs/results/mesh_paper.md). Rates are in TFLOP/s, the
# same at all sizes (sp_bench/cluster/kernel_table.py).
"""


class _Dumper(yaml.SafeDumper):
    """Writes large and small floats with an exponent."""


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    shown = repr(value) if value == 0 or 1e-2 <= value < 1e4 else f"{value:.3e}"
    return dumper.represent_scalar("tag:yaml.org,2002:float", shown)


_Dumper.add_representer(float, _float)


def cluster_file(config: Mapping[str, Any], on_fitted: tuple[float, float], on_held_out: tuple[float, float]) -> str:
    """The cluster's file. The errors are median and maximum of |ours / paper's - 1|."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    rates = "the rates, transfer_slowdown" if config["device"]["transfer_slowdown"] else "the rates"
    (fit_median, fit_most), (median, most) = on_fitted, on_held_out
    sources = {
        "fitted": f"{today}, by least squares of the log of table 3's times over 30 cells (Ring, and Mesh on 32 GPUs):"
        f" both latency_s, inter.bytes_per_s and flow_bytes_per_s, {rates}; gpus_per_node of 4, 8, 16, 32",
        "errors_fitted": f"median {fit_median:.1%}, max {fit_most:.1%}",
        "errors_held_out": f"median {median:.1%}, max {most:.1%} on the 18 cells of Mesh on 64 GPUs and more",
        "peak_tflops": "what tables 3 and 4 imply together, median of the fitted cells",
        "intra.bytes_per_s, memory_bytes_per_s, launch_s": "an assumption; fast enough not to matter",
    }
    body = yaml.dump({**config, "sources": sources}, Dumper=_Dumper, sort_keys=False, width=110)
    return CLUSTER_HEAD + body


def report(runs: Runs, fits: Mapping[str, Any]) -> str:
    """The whole report as Markdown. Sections on the paper's tables and figures are those of the study."""
    chosen = next(row for row in fits["fits"] if row["name"] == fits["chosen"])
    parts = [
        "# The Mesh-Attention paper's cluster, fitted and tested",
        "Made by `python -m analysis.mesh_paper report` from `conf/cluster/mesh_paper.yaml`, which"
        " `python -m analysis.mesh_paper fit` writes. All times are simulated; the paper's are from its tables 3 to 5"
        " (`analysis/papers`). The figures, and what table 5 says of the tiles, are in the report of"
        " `python -m analysis.reproduce paper=mesh`.",
        _summary(runs),
        "## Parameters",
        _parameters(chosen),
        "## What else was fitted",
        _fits(fits),
        *(section(runs).to_markdown() for section in (mesh.table3, mesh.table4, mesh.figure8, mesh.figure9a)),
        NOTES.read_text().strip(),
    ]
    paragraphs = "\n\n".join(parts).split("\n\n")
    return "\n\n".join(map(_wrapped, paragraphs)) + "\n"


def _wrapped(paragraph: str) -> str:
    """The paragraph in lines of 120 characters; tables, headings and lists as they are."""
    if paragraph.startswith(("|", "#", "- ")):
        return paragraph
    return textwrap.fill(" ".join(paragraph.split()), 120, break_on_hyphens=False, break_long_words=False)


def _summary(runs: Runs) -> str:
    paper, rows = paper_s(), []
    ours = {c: mesh_cells.seconds(record).known for c, record in mesh_cells.cell_records(runs, paper).items()}
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


def _parameters(chosen: Mapping[str, Any]) -> str:
    rows = []
    for name, value in chosen["values"].items():
        spread = chosen["spread"][name]
        known = "not determined" if spread is None else f"{spread:.0%}"
        rows.append([f"`{name}`", f"{value:.3g}", known, PARAMETERS[name].meaning])
    text = markdown.table(["parameter", "value", "standard error", "what it is"], rows)
    names, correlation = list(chosen["values"]), np.array(chosen["correlation"])
    _, i, j = max((abs(correlation[i, j]), i, j) for i in range(len(names)) for j in range(i))
    return (
        f"{text}\n\nNodes have {chosen['gpus_per_node']} GPUs (chosen among 4, 8, 16 and 32). Standard errors are"
        f" relative, from the slopes at the minimum. The most correlated two are `{names[i]}` and `{names[j]}`:"
        f" {correlation[i, j]:.2f}."
    )


def _fits(fits: Mapping[str, Any]) -> str:
    rows = []
    for row in sorted(fits["fits"], key=lambda row: row["aicc"]):
        extra = ", ".join(f"{name} {value:.3g}" for name, value in row["values"].items())
        share = "a GPU" if row["own_nics"] else "a transfer"
        (median, most), (unseen, worst) = row["fitted"], row["held_out"]
        left_out = f"{row['left_out_rms']:.1%}" if row["left_out_rms"] < 1 else "one cell alone sets a parameter"
        numbers = [f"{row['squares']:.3f}", f"{row['aicc']:.1f}", left_out]
        shown = [f"{median:.1%}, {most:.0%}", f"{unseen:.1%}, {worst:.0%}"]
        mark = " (chosen)" if row["name"] == fits["chosen"] else ""
        rows.append([f"{row['gpus_per_node']}{mark}", share, extra, *numbers, *shown])
    head = ["GPUs of a node", "flow rate is of", "parameters", "sum of squares", "AICc", "left-out rms"]
    head += ["fitted: median, max", "held out: median, max"]
    return (
        "Chosen by AICc on the 30 fitted cells alone. Each additional parameter must lower it by 2, since a smaller"
        " difference says little. The last column was not used to choose. The left-out error is that of each cell if"
        " only the others were fitted, to first order.\n\n" + markdown.table(head, rows)
    )
