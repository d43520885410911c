"""The theoretical maximum speedup of Striped Attention's tables 3 to 5 and appendix A, and what tiles make of it."""

from __future__ import annotations

import numpy as np

from sp_bench.analysis.number import Number, formula, of_paper
from sp_bench.analysis.paper_tables import claims, rows
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.striped_model import (
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
from sp_bench.analysis.table import Column, Table

BOUND = 0.01
"""What counts as the same number: the paper prints two digits, and some look rounded down."""
RESULTS, TABLE_2 = "striped_full_results.csv", "striped_table2_speedup_256k.csv"
PASSES = formula(
    "striped-passes",
    "striped-tms with a for the 5 and r for the 4, held against all cells of the paper",
    f"{PAPER}, tables 3 to 5 and appendix A",
)
RATIOS = np.arange(1.0, 1.5, 0.005)
"""Of attention's passes to the others', to see which fit."""
SHAPE = (
    *(Column("device"), Column("model"), Column("mesh, model x sequence")),
    *(Column("seqlen", "tokens"), Column("block", "tokens")),
)


def paper_tms(cell: Cell) -> Number:
    """As printed."""
    return of_paper(cell.paper_tms, RESULTS)


def paper_measured(cell: Cell) -> Number:
    """As printed."""
    return of_paper(cell.paper_measured, RESULTS)


def our_tms(cell: Cell) -> Number:
    """By formula."""
    return Number(maximum_speedup(cell), "computed", (TMS,))


def our_tiled(cell: Cell) -> Number:
    """By formula, with the paper's tiles."""
    return Number(tiled_speedup(cell), "computed", (TILED,))


def shape(cell: Cell) -> tuple[str, str, str, int, int]:
    """What names a cell in a table: the cells of SHAPE."""
    return DEVICES[cell.device], cell.model, cell.mesh, cell.seqlen, cell.block


def misses(passes: Passes = RECOMPUTED) -> np.ndarray:
    """Ours less the paper's for every cell: (100,)."""
    return np.array([maximum_speedup(cell, passes) - cell.paper_tms for cell in cells()])


def fits(passes: Passes) -> bool:
    """Whether every cell comes out."""
    return bool((abs(misses(passes)) <= BOUND).all())


def maximum() -> Section:
    """Every cell by formula, the assumptions that the paper's words allow, and table 2 beside the appendix."""
    errors = misses()
    within = int((abs(errors) <= BOUND).sum())
    fitting = [ratio for ratio in RATIOS if fits(Passes(ratio, 1, ""))]
    verdict = "Reproduced." if within == len(errors) else "Not reproduced."
    return Section(
        "Theoretical maximum speedup",
        [
            text(
                "Computed: {within:.0f} of the {cells:.0f} cells of tables 3 to 5 and appendix A are within"
                f" {BOUND:g} of the paper's, the farthest {{worst:.4f}} off. {verdict} The paper says what it leaves"
                " out (communication, and all that is no matrix product) and that attention's FLOPs cost twice on A100."
                " How often a training step does the FLOPs of a forward pass it does not say: {fitting:.0f} of the"
                " assumptions below gives every cell. Any ratio from {low:.3f} to {high:.3f} between attention's passes"
                " and the others' would, so that {ratio:.2f} is inferred, not proven. The models' shapes are table"
                " 1's; embeddings and the loss are left out.",
                within=Number(within, "computed", (TMS,)),
                cells=of_paper(len(errors), RESULTS, "(its rows)"),
                worst=Number(float(abs(errors).max()), "computed", (TMS,)),
                fitting=Number(sum(map(fits, ASSUMPTIONS)), "computed", (PASSES,)),
                low=Number(min(fitting), "computed", (PASSES,)),
                high=Number(max(fitting), "computed", (PASSES,)),
                ratio=Number(RECOMPUTED.attention / RECOMPUTED.rest, "computed", (TMS,)),
            ),
            _assumptions(),
            _all_cells(),
            _table_2(),
        ],
    )


def _assumptions() -> Table:
    table = []
    for passes in ASSUMPTIONS:
        errors = abs(misses(passes))
        worst, within = float(errors.max()), int((errors <= BOUND).sum())
        table.append(
            [
                passes.why,
                *(Number(value, "computed", (PASSES,)) for value in (passes.attention, passes.rest, worst, within)),
            ]
        )
    return Table(
        "striped-assumptions",
        "What a training step may compute again, and how the paper's cells come out",
        (
            Column("computed again"),
            *(Column("attention", "forward passes", "g"), Column("the rest", "forward passes", "g")),
            *(Column("farthest cell", "", ".3f"), Column(f"cells within {BOUND:g}", "", ".0f")),
        ),
        table,
        "A forward pass is 1, its backward 2 more, and each time that it is computed again 1 more (0.5 for QK^T).",
    )


def _all_cells() -> Table:
    table = []
    for cell in cells():
        paper, ours, tiled, measured = paper_tms(cell), our_tms(cell), our_tiled(cell), paper_measured(cell)
        table.append([*shape(cell), paper, ours, ours.over(paper), measured, tiled, tiled.over(measured)])
    names = ("maximum, paper", "maximum, ours", "ours over paper")
    names += ("measured, paper", "maximum with tiles, ours", "that over measured")
    return Table(
        "striped-maximum",
        "Speedup of Striped over Ring Attention in training: every cell of tables 3 to 5 and appendix A",
        (*SHAPE, *(Column(name, "", ".3f") for name in names)),
        table,
        "Maximum with tiles: what is left of the maximum where only whole tiles of the paper's size are left out.",
        shown_rows=14,
    )


def table_2_gaps() -> list[tuple[str, str, Number, Number]]:
    """(device, model, table 2's speedup, the appendix's of the same configuration)."""
    longer = {(c.device, c.model, c.mesh, c.seqlen): paper_measured(c) for c in cells()}
    found = []
    for row in rows("striped_table2_speedup_256k"):
        for (device, name), mesh in zip(DEVICES.items(), row["mesh"].split(" / "), strict=True):
            short = of_paper(float(row[f"{device}_speedup"]), TABLE_2)
            found.append((name, row["model"], short, longer[device, row["model"], mesh, int(row["seqlen"])]))
    return found


def _table_2() -> Table:
    gaps = table_2_gaps()
    differing = [f"{name} {model}" for name, model, a, b in gaps if a.known != b.known]
    by_name = {(DEVICES[c.device], c.model, c.n): our_tms(c) for c in cells() if c.seqlen == 2**18}
    table = [
        [name, model, short, long, limit := by_name[name, model, 4 if name == "A100" else 8], limit.over(short)]
        for name, model, short, long in gaps
    ]
    names = ("table 2, paper", "tables 3 and 4, paper", "maximum, ours", "ours over table 2")
    differ = ", ".join(differing) or "none"
    return Table(
        "striped-table2",
        "Measured speedup at 256k tokens, and the maximum",
        (Column("device"), Column("model"), *(Column(name, "", ".3f") for name in names)),
        table,
        f"The paper states these twice. Where the two differ: {differ}.",
    )


def tiles() -> Section:
    """How much of the gap between the maximum and what the paper measured is the size of its tiles."""
    by_device = {device: [cell for cell in cells() if cell.device == device] for device in DEVICES}
    reached, tiled, above = {}, {}, 0
    for device, of_device in by_device.items():
        gains = [
            (c.paper_measured - 1, maximum_speedup(c) - 1, tiled_speedup(c) - 1) for c in of_device if c.block > 4096
        ]
        reached[device] = float(np.median([gain / most for gain, most, _ in gains]))
        tiled[device] = float(np.median([gain / most for gain, _, most in gains]))
        above += sum(c.paper_measured > tiled_speedup(c) for c in of_device)
    smallest = [c for c in by_device["a100"] if c.block == 4096]
    return Section(
        "What tiles leave of it",
        [
            text(
                "Computed. The paper's code leaves out whole tiles only, so that a masked block costs more than half."
                " Its own examples come out as below. In the smallest blocks on A100 nothing can be left out: the"
                " maximum with tiles is {none:.2f} there, and the paper measured {least:.2f} to {most:.2f}. In larger"
                " blocks the paper's speedups have, in the median, {a100:.0%} of the gain that the maximum promises on"
                " A100 and {tpu:.0%} on TPUv4; of what tiles allow they have {a100_tiled:.0%} and {tpu_tiled:.0%}."
                " {above:.0f} of {cells:.0f} cells were measured above what tiles allow. What remains below it the"
                " paper ascribes to communication that is not hidden and to what is not attention; nothing here"
                " tells these apart.",
                none=Number(max(map(tiled_speedup, smallest)), "computed", (TILED,)),
                least=of_paper(min(c.paper_measured for c in smallest), RESULTS),
                most=of_paper(max(c.paper_measured for c in smallest), RESULTS),
                a100=_share(reached["a100"], TMS),
                tpu=_share(reached["tpuv4"], TMS),
                a100_tiled=_share(tiled["a100"], TILED),
                tpu_tiled=_share(tiled["tpuv4"], TILED),
                above=Number(above, "computed", (TILED, paper_measured(smallest[0]).sources[0])),
                cells=of_paper(len(cells()), RESULTS, "(its rows)"),
            ),
            _claims(),
        ],
    )


def _share(value: float, source: object) -> Number:
    return Number(value, "computed", (source, paper_measured(cells()[0]).sources[0]))  # type: ignore[arg-type]


def left_out(block: int, queries: int, keys: int) -> Number:
    """The share of a causal block's tiles that need not be computed, in percent."""
    return Number(100 * (1 - tiles_computed(block, queries, keys)), "computed", (TILE_SHARE,))


def _claims() -> Table:
    stated = claims("striped_claims")
    largest = {
        device: max((c for c in cells() if c.device == device), key=lambda c: c.paper_measured) for device in DEVICES
    }
    pairs = [
        ("work left out, block of 1536 in tiles of 512 x 512", left_out(1536, 512, 512), "%"),
        ("work left out, block of 4096 in tiles of 2048 x 2048", left_out(4096, *tile("tpuv4")), "%"),
        ("work left out, block of 4096 in tiles of 2048 x 4096", left_out(4096, *tile("a100")), "%"),
    ]
    table: list[list[Number | str | int]] = [[name, unit, stated[name], ours] for name, ours, unit in pairs]
    for device, at in (("a100", "A100, 256k"), ("tpuv4", "TPUv4, 786k")):
        name = f"largest speedup, {at}"
        table.append([f"{name} (ours: the most that its tiles allow)", "x", stated[name], our_tiled(largest[device])])
    columns = (Column("claim"), Column("unit"), Column("paper", "", ".3g"), Column("ours", "", ".4g"))
    return Table("striped-claims", "What the text states", columns, table)
