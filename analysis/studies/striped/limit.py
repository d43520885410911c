"""The theoretical maximum speedup of Striped Attention (tables 3 to 5, appendix A), and how tiles lower it."""

from __future__ import annotations

import numpy as np

from sp_bench.analysis.number import Number, computed, formula
from sp_bench.analysis.paper_tables import claims, of_paper, rows
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.striped.model import (
    ASSUMPTIONS,
    DEVICES,
    PAPER,
    RECOMPUTED,
    TILE_SHARE,
    TILED,
    TMS,
    Cell,
    Passes,
    cells,
    maximum_speedup,
    tile,
    tiled_speedup,
    tiles_computed,
)
from sp_bench.analysis.table import Table, columns

BOUND = 0.01
"""Speedups within this of each other count as equal: the paper prints two digits, some of them rounded down."""
RESULTS, TABLE_2 = "striped_full_results", "striped_table2_speedup_256k"
PASSES = formula(
    "striped-passes",
    "striped-tms with a for the 5 and r for the 4, held against all cells of the paper",
    f"{PAPER}, tables 3 to 5 and appendix A",
)
RATIOS = np.arange(1.0, 1.5, 0.005)
"""Candidate ratios of attention's passes to the passes of the rest."""
SHAPE = "device; model; mesh, model x sequence; seqlen | tokens; block | tokens"
"""The columns that `shape` fills."""


def paper_tms(cell: Cell) -> Number:
    """The theoretical maximum speedup that the paper prints."""
    return of_paper(cell.paper_tms, RESULTS)


def paper_measured(cell: Cell) -> Number:
    """The measured speedup that the paper prints."""
    return of_paper(cell.paper_measured, RESULTS)


def our_tms(cell: Cell) -> Number:
    """The theoretical maximum speedup by formula."""
    return computed(maximum_speedup(cell), TMS)


def our_tiled(cell: Cell) -> Number:
    """The maximum speedup by formula with the paper's tiles."""
    return computed(tiled_speedup(cell), TILED)


def shape(cell: Cell) -> tuple[str, str, str, int, int]:
    """The entries of a cell's row in the columns of SHAPE."""
    return DEVICES[cell.device], cell.model, cell.mesh, cell.seqlen, cell.block


def misses(passes: Passes = RECOMPUTED) -> np.ndarray:
    """Our maximum speedup minus the paper's for every cell: (100,)."""
    return np.array([maximum_speedup(cell, passes) - cell.paper_tms for cell in cells()])


def fits(passes: Passes) -> bool:
    """Whether every cell comes out as printed."""
    return bool((abs(misses(passes)) <= BOUND).all())


def maximum(_: Runs | None = None) -> Section:
    """Every cell by formula, the assumptions that the paper's words allow, and table 2 beside the appendix."""
    errors = abs(misses())
    within = int((errors <= BOUND).sum())
    fitting = [ratio for ratio in RATIOS if fits(Passes(ratio, 1, ""))]
    return Section(
        "Theoretical maximum speedup",
        text(
            "Computed: {within:.0f} of the {cells:.0f} cells of tables 3 to 5 and appendix A are within {bound:g} of"
            " the paper's; the largest difference is {worst:.4f}. {verdict} The paper says what it leaves out"
            " (communication, and all that is no matrix product), and that a FLOP of attention costs twice as much on"
            " A100. It does not say how often a training step repeats the FLOPs of a forward pass. Of the assumptions"
            " below, {fitting:.0f} gives every cell. Any ratio of attention's passes to the others' from {low:.3f} to"
            " {high:.3f} would, so {ratio:.2f} is inferred, not proven. The models' shapes are those of table 1;"
            " embeddings and the loss are left out.",
            within=computed(within, TMS),
            cells=of_paper(len(errors), RESULTS, "(its rows)"),
            bound=BOUND,
            worst=computed(errors.max(), TMS),
            verdict="Reproduced." if within == len(errors) else "Not reproduced.",
            fitting=computed(sum(map(fits, ASSUMPTIONS)), PASSES),
            low=computed(min(fitting), PASSES),
            high=computed(max(fitting), PASSES),
            ratio=computed(RECOMPUTED.attention / RECOMPUTED.rest, TMS),
        ),
        _assumptions(),
        _all_cells(),
        _table_2(),
    )


def _assumptions() -> Table:
    table = []
    for passes in ASSUMPTIONS:
        errors = abs(misses(passes))
        values = (passes.attention, passes.rest, errors.max(), (errors <= BOUND).sum())
        table.append([passes.why, *(computed(float(value), PASSES) for value in values)])
    return Table(
        "striped-assumptions",
        "What a training step may compute again, and how the paper's cells come out",
        columns(
            "computed again; attention | forward passes | g; the rest | forward passes | g;"
            f" largest difference || .3f; cells within {BOUND:g} || .0f"
        ),
        table,
        "A forward pass counts 1, its backward 2, and each repetition 1 more (0.5 for QK^T alone).",
    )


def _all_cells() -> Table:
    table = []
    for cell in cells():
        paper, ours, tiled, measured = paper_tms(cell), our_tms(cell), our_tiled(cell), paper_measured(cell)
        table.append([*shape(cell), paper, ours, ours.over(paper), measured, tiled, tiled.over(measured)])
    return Table(
        "striped-maximum",
        "Speedup of Striped over Ring Attention in training: every cell of tables 3 to 5 and appendix A",
        columns(
            f"{SHAPE}; maximum, paper || .3f; maximum, ours || .3f; maximum, ours / paper || .3f;"
            " measured, paper || .3f; maximum with tiles, ours || .3f; maximum with tiles / measured || .3f"
        ),
        table,
        "Maximum with tiles: the maximum if a masked block leaves out only whole tiles of the paper's size.",
        shown_rows=14,
    )


def table_2_gaps() -> list[tuple[str, str, Number, Number]]:
    """(device, model, table 2's speedup, the appendix's for the same configuration)."""
    longer = {(c.device, c.model, c.mesh, c.seqlen): paper_measured(c) for c in cells()}
    found = []
    for row in rows("striped_table2_speedup_256k"):
        for (device, name), mesh in zip(DEVICES.items(), row["mesh"].split(" / "), strict=True):
            short = of_paper(float(row[f"{device}_speedup"]), TABLE_2)
            found.append((name, row["model"], short, longer[device, row["model"], mesh, int(row["seqlen"])]))
    return found


def _table_2() -> Table:
    gaps = table_2_gaps()
    differ = ", ".join(f"{name} {model}" for name, model, a, b in gaps if a.known != b.known) or "none"
    by_name = {(DEVICES[c.device], c.model, c.n): our_tms(c) for c in cells() if c.seqlen == 2**18}
    table = []
    for name, model, short, long in gaps:
        limit = by_name[name, model, 4 if name == "A100" else 8]
        table.append([name, model, short, long, limit, limit.over(short)])
    return Table(
        "striped-table2",
        "Measured speedup at 256k tokens, and the maximum",
        columns(
            "device; model; table 2, paper || .3f; tables 3 and 4, paper || .3f; maximum, ours || .3f;"
            " maximum / table 2 || .3f"
        ),
        table,
        f"The paper states these speedups twice. Where the two differ: {differ}.",
    )


def tiles(_: Runs | None = None) -> Section:
    """How much of the gap between the maximum and the paper's measurements is due to its tile size."""
    by_device = {device: [cell for cell in cells() if cell.device == device] for device in DEVICES}
    source, gained = paper_measured(cells()[0]).sources[0], {}
    for device, of_device in by_device.items():
        for name, limit, formula_of in (("", maximum_speedup, TMS), ("_tiled", tiled_speedup, TILED)):
            shares = [(c.paper_measured - 1) / (limit(c) - 1) for c in of_device if c.block > 4096]
            gained[device + name] = computed(float(np.median(shares)), formula_of, source)
    smallest = [c for c in by_device["a100"] if c.block == 4096]
    return Section(
        "The maximum with tiles",
        text(
            "Computed. The paper's code leaves out whole tiles only, so a masked block costs more than half of a full"
            " one. Its own examples are in the table. In the smallest blocks on A100 nothing can be left out: the"
            " maximum with tiles is {none:.2f} there, and the paper measured {least:.2f} to {most:.2f}. In larger"
            " blocks, the paper's speedups reach in the median {a100:.0%} of the maximum's gain on A100 and"
            " {tpuv4:.0%} on TPUv4, and {a100_tiled:.0%} and {tpuv4_tiled:.0%} of the gain that tiles allow."
            " {above:.0f} of {cells:.0f} cells were measured above what tiles allow. The paper ascribes the rest to"
            " communication that is not hidden and to work that is not attention; nothing here tells these apart.",
            none=computed(max(map(tiled_speedup, smallest)), TILED),
            least=of_paper(min(c.paper_measured for c in smallest), RESULTS),
            most=of_paper(max(c.paper_measured for c in smallest), RESULTS),
            above=computed(sum(c.paper_measured > tiled_speedup(c) for c in cells()), TILED, source),
            cells=of_paper(len(cells()), RESULTS, "(its rows)"),
            **gained,
        ),
        _claims(),
    )


def left_out(block: int, queries: int, keys: int) -> Number:
    """The share of a causal block's tiles that need not be computed, in percent."""
    return computed(100 * (1 - tiles_computed(block, queries, keys)), TILE_SHARE)


def _claims() -> Table:
    stated = claims("striped_claims")
    table: list[list[Number | str | int]] = []
    for block, queries, keys in ((1536, 512, 512), (4096, *tile("tpuv4")), (4096, *tile("a100"))):
        name = f"work left out, block of {block} in tiles of {queries} x {keys}"
        table.append([name, "%", stated[name], left_out(block, queries, keys)])
    for device, at in (("a100", "A100, 256k"), ("tpuv4", "TPUv4, 786k")):
        name = f"largest speedup, {at}"
        largest = max((c for c in cells() if c.device == device), key=lambda c: c.paper_measured)
        table.append([f"{name} (ours: the maximum with tiles)", "x", stated[name], our_tiled(largest)])
    return Table("striped-claims", "What the text states", columns("claim; unit; paper || .3g; ours"), table)
