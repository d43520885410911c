"""Cells of the Mesh-Attention paper's tables as points, records and numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from sp_bench.analysis.number import Number, derived, of_record, step_ms
from sp_bench.analysis.paper_tables import claims, of_paper
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.studies.mesh.paper import NAMES, TOKENS, Cell, errors, load_cluster, table
from sp_bench.analysis.table import Cell as Entry
from sp_bench.plan.method import PHASES
from sp_bench.records import Record

CLUSTER = "mesh_paper"
FILES = {3: "throughput", 4: "mfu", 5: "peak_memory"}
GPUS = (32, 64, 128, 256)
LONG = TOKENS["1M"]
METHODS = ("ring", "mesh")


def cell_point(cell: Cell, **more: object) -> Point:
    """The point that simulates a cell. The cell's method may be one that the paper doesn't time."""
    # Its authors run TokenRing inside nodes and Ring between them.
    nodes = {"nodes": load_cluster().nodes(cell.gpus)} if cell.method == "tokenring" else {}
    keys = {"method": cell.method, "gpus": cell.gpus, "causal": cell.causal, "cluster": CLUSTER}
    return point(seqlen=NAMES.get(cell.seqlen, cell.seqlen), **keys, **nodes, **more)


def cell_records(runs: Runs, cells: Iterable[Cell]) -> dict[Cell, Record]:
    """The record of each cell."""
    return runs.by_key({cell: cell_point(cell) for cell in cells})


def long_cells(*methods: str) -> list[Cell]:
    """The cells of figures 8a and 9: 1M tokens, causal, on each number of GPUs."""
    return [Cell(True, LONG, gpus, method) for method in methods for gpus in GPUS]


def printed(number: int) -> dict[Cell, tuple[Number, ...]]:
    """A table of the paper: the numbers of each cell as printed."""
    rows = table(number, FILES[number])
    name = f"mesh_table{number}_{FILES[number]}"
    return {cell: tuple(of_paper(value, name) for value in values) for cell, values in rows.items()}


def stated(claim: str) -> Number:
    """A value that the paper's text states. `claim` is the start of its row in mesh_claims.csv."""
    (value_of_claim,) = (value for name, value in claims("mesh_claims").items() if name.startswith(claim))
    return value_of_claim


def key(cell: Cell) -> tuple[Entry, ...]:
    """The entries of a cell's row: causal, seqlen, GPUs, method."""
    return ("yes" if cell.causal else "no"), NAMES[cell.seqlen], cell.gpus, cell.method


def which(cell: Cell) -> str:
    """Whether the cell is fitted or held out, in words."""
    return "fitted" if cell.fitted else "held out"


def seconds(record: Record) -> Number:
    """The seconds of an iteration, forward and backward."""
    return step_ms(record).times(1e-3)


def throughput(record: Record) -> Number:
    """Iterations in 100 s, the unit of table 3."""
    return derived(lambda s: 100 / s, seconds(record))


def compute_and_wait(record: Record, folder: Path) -> dict[str, tuple[Number, Number]]:
    """Seconds that a rank computes and waits in each phase, the mean over the ranks."""
    ranks, parts = json.loads((folder / f"{record.run_id}.ranks.json").read_text()), {}
    for phase in PHASES:
        whole = of_record(record, f"{phase}_ms_median").times(1e-3)
        busy = Number(float(np.mean(ranks[f"{phase}_busy_ms"])) / 1e3, whole.kind, whole.sources)
        parts[phase] = busy, whole.minus(busy)
    return parts


def median_error(ratios: Sequence[Number]) -> Number:
    """The median of |ratio - 1|, in percent."""
    return derived(lambda *values: 100 * errors(values)[0], *ratios)


def largest_error(ratios: Sequence[Number]) -> Number:
    """The largest |ratio - 1|, in percent."""
    return derived(lambda *values: 100 * errors(values)[1], *ratios)


def reduction(less: Number, more: Number) -> Number:
    """By how much `less` is below `more`, in percent."""
    return derived(lambda a, b: 100 * (1 - a / b), less, more)
