"""Table 5 of the Mesh-Attention paper: peak memory by our plans, and by the buffers its code seems to hold."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sp_bench import account, methods
from sp_bench.analysis.number import Number, computed, count, derived, median
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, section, source
from sp_bench.analysis.studies.mesh import cells
from sp_bench.analysis.studies.mesh.paper import Cell, load_cluster
from sp_bench.analysis.table import Cell as Entry
from sp_bench.methods.mesh import tiles
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import DTYPE_BYTES, Problem
from sp_bench.plan.tensors import Q, named

Tile = tuple[int, int]
Printed = dict[Cell, tuple[Number, ...]]
"""Printed peaks in GB by cell, forward and backward."""
BUFFERS = tuple(csv.DictReader((Path(__file__).parent / "mesh_buffers.csv").read_text().splitlines()))
"""The buffers that are held at the end of a phase. `held` says by which method and how often, `dtype` whether in the
dtype of the wire (bf16) or of accumulators (fp32). Folds are tensor operations, neither fused nor in place."""
HELD = tuple(dict.fromkeys(row["held"] for row in BUFFERS))
RING, ROW, COLUMN, ONCE = HELD
DOUBTFUL = {
    (Cell(False, cells.LONG, 32, "mesh"), "forward"): "less than Ring holds",
    (Cell(True, cells.LONG // 2, 64, "mesh"), "forward"): "the backward's peak",
    (Cell(True, cells.LONG // 4, 128, "mesh"), "forward"): "the backward's peak",
}
"""Printed peaks that are probably wrong; README.md here says why."""
ROUNDING_GB = 0.05
"""Half of the last digit that is printed."""
NEAR, WITHIN = 0.05, 0.15
"""Relative errors up to which a peak counts as near its tile's, and as explained."""
KEPT = source("mesh.memory-kept")
EXECUTOR = source("mesh.memory-executor")


def kept_bytes(problem: Problem, phase: str, tile: Tile | None) -> int:
    """Bytes held at the end of a phase if nothing that was received or accumulated is released. Ring has no tile."""
    if tile is None:
        return _bytes(problem, phase, RING)
    rows, of_columns, once = (_bytes(problem, phase, held) for held in (ROW, COLUMN, ONCE))
    return tile[0] * rows + tile[1] * of_columns + once


def _bytes(problem: Problem, phase: str, held: str) -> int:
    rows = [row for row in BUFFERS if (row["phase"], row["held"]) == (phase, held)]
    return sum(problem.chunk_bytes(named(row["tensor"]), wire=row["dtype"] == "wire") for row in rows)


def nearest_tile(cell: Cell, phase: str, gigabytes: float) -> Tile:
    """The tile whose buffers come nearest to a printed peak."""
    off = {tile: math.log(kept_bytes(cell.problem, phase, tile) / (gigabytes * 1e9)) for tile in tiles(cell.gpus)}
    return min(off, key=lambda tile: abs(off[tile]))


@cache
def tiles_of_table5() -> dict[Cell, dict[str, Tile]]:
    """The tile that comes nearest to each printed peak of Mesh, by cell and phase."""
    return {
        cell: {phase: nearest_tile(cell, phase, value.known) for phase, value in zip(PHASES, values, strict=True)}
        for cell, values in cells.printed(5).items()
        if cell.method == "mesh"
    }


def kept(cell: Cell, phase: str) -> Number:
    """Bytes held in a phase with the tile of `tiles_of_table5`."""
    tile = tiles_of_table5()[cell][phase] if cell.method == "mesh" else None
    return computed(kept_bytes(cell.problem, phase, tile), KEPT)


def by_chance(cell: Cell, phase: str) -> float:
    """The probability that a random size, between the smallest and the largest tile's, is NEAR some tile's."""
    kept = np.array([kept_bytes(cell.problem, phase, tile) for tile in tiles(cell.gpus)], float)
    sizes = np.geomspace(kept.min(), kept.max(), 2001)
    return float(np.mean(np.abs(kept[:, None] / sizes - 1).min(axis=0) <= NEAR))


def table5(runs: Runs) -> Section:
    """Peak memory in GB."""
    paper = cells.printed(5)
    values = {"buffers": _buffers(next(iter(paper)).problem), "element": DTYPE_BYTES["bfloat16"]}
    return section(
        "mesh.table5",
        **values,
        phases="; ".join(f"{p}: paper | GB | .1f; {p}: ours | GB | .2f; {p}: ours / paper's || .2f" for p in PHASES),
        **_executors(runs, paper),
        **_kept(paper),
        **_units(paper),
    )


def _executors(runs: Runs, paper: Printed) -> dict[str, Any]:
    """The rows of what our executor holds, and the medians over the paper's by method and phase."""
    records, cluster, rows = cells.cell_records(runs, paper), load_cluster(), []
    ratios: dict[str, list[Number]] = {}
    for cell, values in paper.items():
        record, problem, row = records[cell], cell.problem, [*cells.key(cell), records[cell].variant or ""]
        method = methods.build(cell.method, {"tile": [record.tile_a, record.tile_b]} if cell.method == "mesh" else {})
        for phase, value in zip(PHASES, values, strict=True):
            plan = method.plan(problem, phase, cluster.profile(problem))
            ours = computed(account.peak_bytes([plan], problem) / 1e9, EXECUTOR)
            ratios.setdefault(f"{cell.method}_{phase}", []).append(ours.over(value))
            row += [value, ours, ours.over(value)]
        rows.append(row)
    return {"executors": rows, **{name: median(of_name) for name, of_name in ratios.items()}}


def _kept(paper: Printed) -> dict[str, Any]:
    """The rows of what is held if nothing is released, and how near they are to what is printed."""
    rows, chance, ring, mesh = [], 0.0, [], {phase: [] for phase in PHASES}
    for cell, values in paper.items():
        notes, names, numbers = [], [], []
        for phase, value in zip(PHASES, values, strict=True):
            ours = kept(cell, phase).times(1e-9)
            numbers += [value, ours, ours.over(value)]
            if why := DOUBTFUL.get((cell, phase)):
                notes.append(f"doubtful: {phase} is {why}")
            if cell.method == "ring":
                ring.append(derived(_off, ours, value))
                continue
            names.append("x".join(map(str, tiles_of_table5()[cell][phase])))
            if not why:
                mesh[phase].append(ours.over(value))
                chance += by_chance(cell, phase)
        rows.append([*cells.key(cell), ", ".join(names), *numbers, "; ".join(notes)])
    both, explained = mesh["forward"] + mesh["backward"], count(ring, lambda off: off <= WITHIN)
    return {
        "kept": rows,
        "word": "explained" if explained.known == len(ring) else "explained in part",
        "ring": explained,
        "rings": count(ring),
        "own": _own_count(paper),
        "near": count(both, lambda ratio: abs(ratio - 1) <= NEAR),
        "all": count(both),
        "random": computed(chance, KEPT),
        "within": count(both, lambda ratio: abs(ratio - 1) <= WITHIN),
        **{phase: cells.median_error(ratios) for phase, ratios in mesh.items()},
        "doubtful": computed(len(DOUBTFUL), KEPT),
        "cells": _tile_pairs(lambda forward, backward: True),
        "mirrored": _tile_pairs(lambda forward, backward: forward == backward[::-1] and forward != backward),
        "same": _tile_pairs(lambda forward, backward: forward == backward),
    }


def _own_count(paper: Printed) -> Number:
    """The two KV chunks and one Q chunk of section 4.6 over Ring's printed forward peak, the median."""
    rings = {cell: values[0] for cell, values in paper.items() if cell.method == "ring"}
    return median(
        computed(5 * cell.problem.chunk_bytes(Q, wire=True) / 1e9, KEPT).over(printed)
        for cell, printed in rings.items()
    )


def _tile_pairs(test: Callable[[Tile, Tile], bool]) -> Number:
    """The number of cells without a doubtful peak whose tiles, forward and backward, pass a test."""
    doubtful = {cell for cell, _ in DOUBTFUL}
    pairs = [tuple(both.values()) for cell, both in tiles_of_table5().items() if cell not in doubtful]
    return computed(sum(test(*both) for both in pairs), KEPT)


def _off(ours: float, paper: float) -> float:
    """The relative error beyond the paper's rounding."""
    return max(abs(ours - paper) - ROUNDING_GB, 0) / paper


def _buffers(problem: Problem) -> list[list[Entry]]:
    """The buffers that are counted, in chunks."""
    unit, rows = problem.chunk_bytes(Q, wire=True), []
    for phase, held in product(PHASES, HELD):
        what = ", ".join(row["what"] for row in BUFFERS if (row["phase"], row["held"]) == (phase, held))
        rows.append([phase, held, what, computed(_bytes(problem, phase, held) / unit, KEPT)])
    return rows


def _units(paper: Printed) -> dict[str, Number]:
    """The median errors if GB are 10^9 bytes and if they are 2^30."""

    def ratios(scale: float) -> Iterator[Number]:
        for cell, values in paper.items():
            for phase, value in zip(PHASES, values, strict=True):
                if cell.method == "mesh" and (cell, phase) not in DOUBTFUL:
                    read = value.times(scale)
                    near = kept_bytes(cell.problem, phase, nearest_tile(cell, phase, read.known)) / 1e9
                    yield computed(near, KEPT).over(read)

    return {name: cells.median_error(list(ratios(x))) for name, x in (("gb", 1.0), ("gib", 2**30 / 1e9))}
