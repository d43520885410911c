"""The theoretical maximum speedup of Striped Attention (tables 3 to 5, appendix A), and how tiles lower it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sp_bench.analysis.number import Number, computed, formula
from sp_bench.analysis.paper_tables import claims, of_paper, rows
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, section
from sp_bench.analysis.studies.striped import model
from sp_bench.analysis.table import Cell as Entry

BOUND = 0.01
"""Speedups within this of each other count as equal: the paper prints two digits, some of them rounded down."""
RESULTS, TABLE_2 = "striped_full_results", "striped_table2_speedup_256k"
PASSES = formula(
    "striped-passes",
    "striped-tms with a for the 5 and r for the 4, held against all cells of the paper",
    f"{model.PAPER}, tables 3 to 5 and appendix A",
)
RATIOS = np.arange(1.0, 1.5, 0.005)
"""Candidate ratios of attention's passes to the passes of the rest."""


def paper_tms(cell: model.Cell) -> Number:
    """The theoretical maximum speedup that the paper prints."""
    return of_paper(cell.paper_tms, RESULTS)


def paper_measured(cell: model.Cell) -> Number:
    """The measured speedup that the paper prints."""
    return of_paper(cell.paper_measured, RESULTS)


def our_tms(cell: model.Cell) -> Number:
    """The theoretical maximum speedup by formula."""
    return computed(model.maximum_speedup(cell), model.TMS)


def our_tiled(cell: model.Cell) -> Number:
    """The maximum speedup by formula with the paper's tiles."""
    return computed(model.tiled_speedup(cell), model.TILED)


def shape(cell: model.Cell) -> tuple[str, str, str, int, int]:
    """The entries of a cell's row: device, model, mesh, seqlen, block."""
    return model.DEVICES[cell.device], cell.model, cell.mesh, cell.seqlen, cell.block


def misses(passes: model.Passes = model.RECOMPUTED) -> np.ndarray:
    """Our maximum speedup minus the paper's for every cell: (100,)."""
    return np.array([model.maximum_speedup(cell, passes) - cell.paper_tms for cell in model.cells()])


def fits(passes: model.Passes) -> bool:
    """Whether every cell comes out as printed."""
    return bool((abs(misses(passes)) <= BOUND).all())


def maximum(_: Runs | None = None) -> Section:
    """Every cell by formula, the assumptions that the paper's words allow, and table 2 beside the appendix."""
    errors = abs(misses())
    within = int((errors <= BOUND).sum())
    fitting = [ratio for ratio in RATIOS if fits(model.Passes(ratio, 1, ""))]
    gaps = table_2_gaps()
    values = {
        "within": computed(within, model.TMS),
        "cells": of_paper(len(errors), RESULTS, "(its rows)"),
        "bound": BOUND,
    }
    values |= {"fitting": computed(sum(map(fits, model.ASSUMPTIONS)), PASSES), "low": computed(min(fitting), PASSES)}
    values |= {
        "high": computed(max(fitting), PASSES),
        "ratio": computed(model.RECOMPUTED.attention / model.RECOMPUTED.rest, model.TMS),
    }
    values |= {"rows": [_row(cell) for cell in model.cells()], "table2": _table_2(gaps)}
    return section(
        "striped.maximum",
        **values,
        worst=computed(errors.max(), model.TMS),
        verdict="Reproduced." if within == len(errors) else "Not reproduced.",
        assumptions=[_assumption(passes) for passes in model.ASSUMPTIONS],
        differ=", ".join(f"{name} {model}" for name, model, a, b in gaps if a.known != b.known) or "none",
    )


def _assumption(passes: model.Passes) -> list[Entry]:
    errors = abs(misses(passes))
    values = (passes.attention, passes.rest, errors.max(), (errors <= BOUND).sum())
    return [passes.why, *(computed(float(value), PASSES) for value in values)]


def _row(cell: model.Cell) -> list[Entry]:
    paper, ours, tiled, measured = paper_tms(cell), our_tms(cell), our_tiled(cell), paper_measured(cell)
    return [*shape(cell), paper, ours, ours.over(paper), measured, tiled, tiled.over(measured)]


def table_2_gaps() -> list[tuple[str, str, Number, Number]]:
    """(device, model, table 2's speedup, the appendix's for the same configuration)."""
    longer = {(c.device, c.model, c.mesh, c.seqlen): paper_measured(c) for c in model.cells()}
    gaps = []
    for row in rows("striped_table2_speedup_256k"):
        for (device, name), mesh in zip(model.DEVICES.items(), row["mesh"].split(" / "), strict=True):
            short = of_paper(float(row[f"{device}_speedup"]), TABLE_2)
            gaps.append((name, row["model"], short, longer[device, row["model"], mesh, int(row["seqlen"])]))
    return gaps


def _table_2(gaps: Sequence[tuple[str, str, Number, Number]]) -> list[list[Entry]]:
    by_name = {(model.DEVICES[c.device], c.model, c.n): our_tms(c) for c in model.cells() if c.seqlen == 2**18}
    limits = [by_name[name, model, 4 if name == "A100" else 8] for name, model, *_ in gaps]
    return [[*gap, limit, limit.over(gap[2])] for gap, limit in zip(gaps, limits, strict=True)]


def tiles(_: Runs | None = None) -> Section:
    """The part of the gap between the maximum and the paper's measurements that is due to its tile size."""
    by_device = {device: [cell for cell in model.cells() if cell.device == device] for device in model.DEVICES}
    source, gained = paper_measured(model.cells()[0]).sources[0], {}
    for device, of_device in by_device.items():
        for name, limit, formula_of in (
            ("", model.maximum_speedup, model.TMS),
            ("_tiled", model.tiled_speedup, model.TILED),
        ):
            shares = [(c.paper_measured - 1) / (limit(c) - 1) for c in of_device if c.block > 4096]
            gained[device + name] = computed(float(np.median(shares)), formula_of, source)
    smallest = [c for c in by_device["a100"] if c.block == 4096]
    values = {"cells": of_paper(len(model.cells()), RESULTS, "(its rows)"), "claims": _claims()}
    return section(
        "striped.tiles",
        **values,
        none=computed(max(map(model.tiled_speedup, smallest)), model.TILED),
        least=of_paper(min(c.paper_measured for c in smallest), RESULTS),
        most=of_paper(max(c.paper_measured for c in smallest), RESULTS),
        above=computed(sum(c.paper_measured > model.tiled_speedup(c) for c in model.cells()), model.TILED, source),
        **gained,
    )


def left_out(block: int, queries: int, keys: int) -> Number:
    """The share of a causal block's tiles that need not be computed, in percent."""
    return computed(100 * (1 - model.tiles_computed(block, queries, keys)), model.TILE_SHARE)


def _claims() -> list[list[Entry]]:
    stated, table = claims("striped_claims"), []
    for block, queries, keys in ((1536, 512, 512), (4096, *model.tile("tpuv4")), (4096, *model.tile("a100"))):
        name = f"work left out, block of {block} in tiles of {queries} x {keys}"
        table.append([name, "%", stated[name], left_out(block, queries, keys)])
    for device, at in (("a100", "A100, 256k"), ("tpuv4", "TPUv4, 786k")):
        name = f"largest speedup, {at}"
        largest = max((c for c in model.cells() if c.device == device), key=lambda c: c.paper_measured)
        table.append([f"{name} (ours: the maximum with tiles)", "x", stated[name], our_tiled(largest)])
    return table
