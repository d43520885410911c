"""What the sections of the Mesh-Attention study share: cells of its tables as points, records and numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from sp_bench.analysis.mesh_fit import TOKENS, Cell, errors, load_cluster, table
from sp_bench.analysis.mesh_report import NAMES
from sp_bench.analysis.number import Number, derived, of_paper, of_record
from sp_bench.analysis.paper_tables import claims
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.table import Cell as Entry
from sp_bench.analysis.table import Column
from sp_bench.plan.method import PHASES
from sp_bench.records import Record

CLUSTER = "mesh_paper"
FILES = {3: "throughput", 4: "mfu", 5: "peak_memory"}
GPUS = (32, 64, 128, 256)
LONG = TOKENS["1M"]
KEY = (Column("causal"), Column("seqlen"), Column("GPUs"), Column("method"))
ABOUT_TIMES = (
    "All our times are simulated on cluster=mesh_paper, the paper naming no hardware: four numbers of that cluster were"
    " fitted to 30 cells of table 3 (Ring, and Mesh on 32 GPUs), and the other 18 are held out"
    " (docs/results/mesh_paper.md)."
)


def cell_point(cell: Cell, **more: object) -> Point:
    """The point that simulates a cell, or another method in its place."""
    seqlen = NAMES.get(cell.seqlen, cell.seqlen)
    # TokenRing inside nodes and Ring between them, as its authors have it.
    if cell.method == "tokenring":
        more = {"nodes": load_cluster().nodes(cell.gpus), **more}
    keys = {"method": cell.method, "gpus": cell.gpus, "seqlen": seqlen, "causal": cell.causal, "cluster": CLUSTER}
    return point(**{**keys, **more})


def cell_records(runs: Runs, cells: Iterable[Cell]) -> dict[Cell, Record]:
    """The record of each cell."""
    cells = list(cells)
    return dict(zip(cells, runs.ask(map(cell_point, cells)), strict=True))


def long_cells(*methods: str) -> list[Cell]:
    """Figures 8a and 9: 1M tokens, causal, on all numbers of GPUs."""
    return [Cell(True, LONG, gpus, method) for method in methods for gpus in GPUS]


def printed(number: int) -> dict[Cell, tuple[Number, ...]]:
    """A table of the paper."""
    path = f"mesh_table{number}_{FILES[number]}.csv"
    return {
        cell: tuple(of_paper(value, path) for value in values) for cell, values in table(number, FILES[number]).items()
    }


def stated(claim: str) -> Number:
    """What the paper's text states, by the start of the claim in mesh_claims.csv."""
    (found,) = (value for name, value in claims("mesh_claims").items() if name.startswith(claim))
    return found


def key(cell: Cell) -> tuple[Entry, ...]:
    """The first columns of a cell's row."""
    return ("yes" if cell.causal else "no"), NAMES[cell.seqlen], cell.gpus, cell.method


def which(cell: Cell) -> str:
    """Whether the cluster was fitted to the cell."""
    return "fitted" if cell.fitted else "held out"


def seconds(record: Record) -> Number:
    """Of an iteration, forward and backward."""
    return of_record(record, "step_ms_median").times(1e-3)


def throughput(record: Record) -> Number:
    """Iterations in 100 s, as table 3 has them."""
    return derived(lambda s: 100 / s, seconds(record))


def compute_and_wait(record: Record, folder: Path) -> dict[str, tuple[Number, Number]]:
    """Seconds that the ranks compute, and don't, in each phase: the mean over the ranks."""
    ranks = json.loads((folder / f"{record.run_id}.ranks.json").read_text())
    found = {}
    for phase in PHASES:
        whole, busy_s = of_record(record, f"{phase}_ms_median").times(1e-3), float(np.mean(ranks[f"{phase}_busy_ms"]))
        busy = Number(busy_s / 1e3, whole.kind, whole.sources)
        found[phase] = busy, derived(lambda total, part: total - part, whole, busy)
    return found


def total(numbers: Iterable[Number]) -> Number:
    """The sum."""
    return derived(lambda *values: sum(values), *numbers)


def mean(numbers: Iterable[Number]) -> Number:
    """The arithmetic mean."""
    return derived(lambda *values: np.mean(values), *numbers)


def most(numbers: Iterable[Number]) -> Number:
    """The largest."""
    return derived(lambda *values: max(values), *numbers)


def least(numbers: Iterable[Number]) -> Number:
    """The smallest."""
    return derived(lambda *values: min(values), *numbers)


def count(numbers: Sequence[Number], test: Callable[[float], bool]) -> Number:
    """How many pass a test."""
    return derived(lambda *values: sum(map(test, values)), *numbers)


def median_and_most(ratios: Sequence[Number]) -> tuple[Number, Number]:
    """Median and largest |ratio - 1|, in percent."""
    return (
        derived(lambda *values: 100 * errors(values)[0], *ratios),
        derived(lambda *values: 100 * errors(values)[1], *ratios),
    )


def reduction(less: Number, more: Number) -> Number:
    """How much less, in percent."""
    return derived(lambda a, b: 100 * (1 - a / b), less, more)
