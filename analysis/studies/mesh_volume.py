"""Figure 9b of the Mesh-Attention paper and its reductions of the communication volume."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from sp_bench import account, methods
from sp_bench.analysis.figure import Figure, colours, labelled, new_figure, sources
from sp_bench.analysis.mesh_fit import Cell
from sp_bench.analysis.number import Number, Source, derived, formula, of_record
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies import mesh_cells as cells
from sp_bench.analysis.studies.mesh_memory import Tile, tiles_of_table5
from sp_bench.analysis.table import Column, Table
from sp_bench.methods.mesh import tiles
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES

POINTS = 2.0
"""Percentage points within which a reduction counts as reproduced."""
DTYPES = ("bfloat16", "float32")
ROUNDED = 0.05
"""The paper prints reductions to 0.1 points."""


MAXIMA = (
    "communication volume reduction, 256 GPUs, maximum",
    "communication volume reduction, seqlen 1M causal, maximum",
)


@dataclass(frozen=True)
class Accounting:
    """What is counted as volume."""

    outputs: str = "bfloat16"
    """The dtype in which partial outputs travel."""
    gradients: str = "bfloat16"
    """The dtype in which dq and dkv travel."""
    statistics: bool = True
    """Whether the lse counts."""
    home: bool = False
    """Whether Ring's dkv makes a last hop home, as where each rank adds to what arrives and passes it on."""

    @property
    def name(self) -> str:
        """In words."""
        lse, home = ("with" if self.statistics else "without"), (", Ring's dkv sent home" if self.home else "")
        return f"partial outputs in {self.outputs}, gradients in {self.gradients}, {lse} lse{home}"

    @property
    def source(self) -> Source:
        """A formula."""
        text = f"bytes that a GPU sends, forward + backward, counted from the plans: {self.name}"
        name = f"mesh-volume-{self.outputs}-{self.gradients}{'-lse' * self.statistics}{'-home' * self.home}"
        return formula(name, text, "sp_bench.account.volume")


PAYLOAD = Accounting(statistics=False)
WIDE = Accounting(gradients="float32", home=True)


@cache
def phase_bytes(cell: Cell, phase: str, tile: Tile | None, accounting: Accounting) -> float:
    """What a GPU sends in a phase, on average. No tile: Ring."""
    wire = accounting.gradients if phase == "backward" else accounting.outputs
    problem = replace(cell.problem, wire_dtype=wire)
    method = methods.build(cell.method, {"tile": list(tile)} if tile else {})
    volume = account.volume(method.plan(problem, phase, COMPUTE_BOUND), problem)
    home = problem.chunk_bytes("dkv", wire=True) if accounting.home and not tile and phase == "backward" else 0
    return (volume.total_bytes if accounting.statistics else volume.payload_bytes) + home


def volume(cell: Cell, tile_of: Mapping[str, Tile], accounting: Accounting) -> Number:
    """Bytes per GPU, forward and backward, each phase with its tile."""
    sent = sum(phase_bytes(cell, phase, tile_of.get(phase), accounting) for phase in PHASES)
    return Number(sent, "computed", (accounting.source,))


def reduced(cell: Cell, tile_of: Mapping[str, Tile], accounting: Accounting) -> Number:
    """How much less a cell of Mesh sends than Ring, in percent."""
    ring = replace(cell, method="ring")
    return cells.reduction(volume(cell, tile_of, accounting), volume(ring, {}, accounting))


def our_tiles(runs: Runs, found: list[Cell]) -> dict[Cell, dict[str, Tile]]:
    """The fastest tile of each cell, as simulated, for both phases."""
    return {
        cell: dict.fromkeys(PHASES, (int(record.tile_a or 1), int(record.tile_b or 1)))
        for cell, record in cells.cell_records(runs, found).items()
    }


def reductions(tile_of: Mapping[Cell, Mapping[str, Tile]], accounting: Accounting) -> dict[str, Number]:
    """The five stated reductions, by the start of their claim."""
    wide = [reduced(cell, tile_of[cell], accounting) for cell in tile_of if cell.gpus == 256]
    long = {cell.gpus: cell for cell in cells.long_cells("mesh")}
    by_gpus = [reduced(cell, tile_of[cell], accounting) for cell in long.values()]
    ends = [volume(long[gpus], tile_of[long[gpus]], accounting) for gpus in (256, 32)]
    return {
        "communication volume reduction, 256 GPUs, maximum": cells.most(wide),
        "communication volume reduction, 256 GPUs, average": cells.mean(wide),
        "communication volume reduction, seqlen 1M causal, maximum": cells.most(by_gpus),
        "communication volume reduction, seqlen 1M causal, average": cells.mean(by_gpus),
        "mesh per-GPU volume at 256 GPUs": cells.reduction(*ends),
    }


def three_ways(runs: Runs) -> dict[str, dict[str, Number]]:
    """The stated reductions with our tiles, with table 5's, and with table 5's and fp32 gradients."""
    printed = tiles_of_table5()
    ours = our_tiles(runs, list(printed))
    return {
        "our tiles": reductions(ours, PAYLOAD),
        "tiles of table 5": reductions(printed, PAYLOAD),
        "tiles of table 5, fp32 gradients": reductions(printed, WIDE),
    }


def figure9b(runs: Runs) -> Section:
    """Volume per GPU."""
    return Section(
        "Figure 9b: communication volume per GPU",
        [_figure(runs), _by_gpus(runs), *_claims(runs), _all_ways(), _all_tiles()],
    )


def _claims(runs: Runs) -> list:
    ways, made, offs = three_ways(runs), [], {}
    for claim in ways["our tiles"]:
        paper = cells.stated(claim)
        row: list = [claim, paper]
        for name, found in ways.items():
            off = derived(lambda ours, theirs: ours - theirs, found[claim], paper)
            offs.setdefault(name, []).append(off)
            row += [found[claim], off]
        made.append(row)
    head = [Column("stated"), Column("paper", "%", ".1f")]
    for name in ways:
        head += [Column(name, "%", ".2f"), Column("off", "points", "+.2f")]
    near = {name: cells.count(found, lambda off: abs(off) <= POINTS) for name, found in offs.items()}
    last = [row[-1] for row in made[2:]]
    matching, choices = choices_that_match()
    rounded = [cells.stated(claim) for claim in MAXIMA]
    alone = [name for name, sent in _reduction_of_tiles(WIDE).items() if _rounds_to(sent, rounded)]
    about = text(
        "Computed, all of it: no time is in it but in which tile of ours is fastest. With our tiles {ours:.0f} of"
        " {all:.0f} stated reductions are within two points. With the tiles that table 5's peaks are nearest to, a"
        " reading that knows nothing of volumes, {theirs:.0f} are. If gradients travel in fp32 too, as in the public"
        " ring-flash-attention, and Ring's dkv makes its last hop home, {wide:.0f} are, and section 4.5's"
        " {section:.0f} are off by {most:.2f} points at most. Of {choices:.3g} choices of tiles, one for each phase"
        " and number of GPUs, {matching:.0f} give these three to the printed digit. The abstract's two, over the six"
        " cells on 256 GPUs, are off by up to {abstract:.2f} points, and stay unexplained by so much. With one tile for"
        f" both phases, the stated maxima are what {' and '.join(alone) or 'no tile'} gives on 256 GPUs.",
        ours=near["our tiles"],
        theirs=near["tiles of table 5"],
        wide=near["tiles of table 5, fp32 gradients"],
        all=cells.count(offs["our tiles"], lambda off: True),
        section=cells.count(last, lambda off: True),
        most=derived(lambda *v: max(map(abs, v)), *last),
        abstract=derived(lambda *v: max(map(abs, v)), *(row[-1] for row in made[:2])),
        matching=Number(matching, "computed", (WIDE.source,)),
        choices=Number(choices, "computed", (WIDE.source,)),
    )
    return [about, Table("mesh-reductions", "Stated reductions of the volume", head, made)]


@cache
def choices_that_match() -> tuple[int, int]:
    """How many choices of tiles at 1M causal give section 4.5's three reductions to the printed digit, and of how many.

    A tile for each phase and number of GPUs.
    """
    units, rings = [], []
    for cell in cells.long_cells("mesh"):
        of_phase = [[phase_bytes(cell, phase, tile, WIDE) for tile in tiles(cell.gpus)] for phase in PHASES]
        units.append(np.array([sum(pair) for pair in product(*of_phase)]))
        rings.append(volume(replace(cell, method="ring"), {}, WIDE).known)
    maximum, average, ends = (
        cells.stated(claim).known
        for claim in (
            "communication volume reduction, seqlen 1M causal, maximum",
            "communication volume reduction, seqlen 1M causal, average",
            "mesh per-GPU volume at 256 GPUs",
        )
    )
    first, last = units[0][:, None], units[3][None, :]
    agreed = np.argwhere(np.abs(100 * (1 - last / first) - ends) <= ROUNDED)
    middle = [100 * (1 - units[i] / rings[i]) for i in (1, 2)]
    found = 0
    for i, j in agreed:
        outer = [100 * (1 - units[0][i] / rings[0]), 100 * (1 - units[3][j] / rings[3])]
        both = np.stack(np.broadcast_arrays(middle[0][:, None], middle[1][None, :]))
        top = np.maximum(both.max(axis=0), max(outer))
        mean = (both.sum(axis=0) + sum(outer)) / 4
        found += int(((np.abs(top - maximum) <= ROUNDED) & (np.abs(mean - average) <= ROUNDED)).sum())
    return found, math.prod(size.size for size in units)


def _by_gpus(runs: Runs) -> Table:
    made, printed = [], tiles_of_table5()
    long = cells.long_cells("mesh")
    ours = our_tiles(runs, long)
    for cell in long:
        row: list = [cell.gpus]
        for tile_of, accounting in ((ours[cell], PAYLOAD), (printed[cell], WIDE)):
            names = list(dict.fromkeys("x".join(map(str, tile_of[phase])) for phase in PHASES))
            ring = volume(replace(cell, method="ring"), {}, accounting).times(1e-9)
            row += [", ".join(names), ring, volume(cell, tile_of, accounting).times(1e-9)]
            row.append(reduced(cell, tile_of, accounting))
        made.append(row)
    head = [Column("GPUs")]
    for name, accounting in (("our tile", PAYLOAD), ("table 5's tiles", WIDE)):
        head += [Column(name), Column(f"Ring, {accounting.gradients} gradients", "GB", ".2f")]
        head += [Column(f"Mesh, {accounting.gradients} gradients", "GB", ".2f"), Column("reduction", "%", ".2f")]
    return Table("mesh-figure9b-values", "Volume per GPU at 1M, causal, forward + backward", head, made)


def _all_ways() -> Table:
    """What was tried: dtypes on the wire, and the last hop."""
    made = []
    for outputs, gradients, home in product(DTYPES, DTYPES, (False, True)):
        way = Accounting(outputs, gradients, home=home)
        found = list(reductions(tiles_of_table5(), way).items())[2:]
        offs = [derived(lambda a, b: abs(a - b), number, cells.stated(claim)) for claim, number in found]
        made.append([outputs, gradients, "yes" if home else "no", *(number for _, number in found), cells.most(offs)])
    head = [Column("partial outputs"), Column("gradients"), Column("Ring's dkv sent home")]
    head += [Column(name, "%", ".2f") for name in ("maximum", "average", "256 below 32 GPUs")]
    head.append(Column("farthest off", "points", ".2f"))
    return Table(
        "mesh-reduction-by-dtype", "Section 4.5's reductions by what travels, with table 5's tiles", head, made
    )


def _reduction_of_tiles(accounting: Accounting) -> dict[str, Number]:
    """Of every tile of 256 GPUs, the same in both phases."""
    cell = next(cell for cell in cells.long_cells("mesh") if cell.gpus == 256)
    shapes = [(a, b) for a, b in tiles(cell.gpus) if a > 1]
    return {f"{a}x{b}": reduced(cell, dict.fromkeys(PHASES, (a, b)), accounting) for a, b in shapes}


def _rounds_to(number: Number, stated: Iterable[Number]) -> bool:
    return any(abs(number.known - value.known) <= ROUNDED for value in stated)


def _all_tiles() -> Table:
    by_accounting = [_reduction_of_tiles(how) for how in (PAYLOAD, WIDE)]
    made = [[name, *(found[name] for found in by_accounting)] for name in by_accounting[0]]
    head = [Column("tile"), Column(PAYLOAD.name, "%", ".2f"), Column(WIDE.name, "%", ".2f")]
    return Table("mesh-reduction-by-tile", "Reduction of each tile of 256 GPUs", head, made)


KINDS = {"q and odoq": ("q", "odoq"), "kv": ("kv",), "o and dq": ("o", "dq"), "dkv": ("dkv",)}


def _figure(runs: Runs) -> Figure:
    """Bars of what travels, and marks of the volumes with table 5's tiles."""
    long = [*cells.long_cells("ring"), *cells.long_cells("mesh")]
    found, printed = cells.cell_records(runs, long), tiles_of_table5()
    canvas, axes = new_figure()
    axis, width, numbers = axes[0, 0], 0.36, []
    palette = colours(list(KINDS))
    for i, cell in enumerate(long):
        x = cells.GPUS.index(cell.gpus) + (-width / 2 - 0.02 if cell.method == "ring" else width / 2 + 0.02)
        base = 0.0
        sent = of_record(found[cell], "comm_bytes_per_gpu")
        numbers.append(sent)
        for (name, tensors), hatch in zip(KINDS.items(), ("", "//", "..", "xx"), strict=True):
            part = _lanes_gb(found[cell].comm_bytes_by_lane or {}, tensors)
            label = labelled(name, sent.kind) if i == 0 else None
            style = {"color": palette[name], "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
            axis.bar(x, part, width, bottom=base, label=label, **style)
            base += part
        wide = volume(cell, printed.get(cell, {}), WIDE).times(1e-9)
        numbers.append(wide)
        label = labelled("table 5's tiles, fp32 gradients", wide.kind) if i == 0 else None
        axis.plot(x, wide.known, "D", color="black", markersize=4, label=label)
        axis.annotate(cell.method, (x, max(base, wide.known)), (0, 5), textcoords="offset points", ha="center", size=7)
    axis.set_xticks(range(len(cells.GPUS)), [str(n) for n in cells.GPUS])
    axis.set_xlabel("GPUs")
    axis.set_ylabel("sent by each GPU, GB")
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.1)
    canvas.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    note = "Bars are with our tiles and bf16 gradients. The paper's bars have no printed values."
    return Figure("mesh-figure9b", "Volume per GPU at 1M, causal, forward + backward", canvas, sources(numbers), note)


def _lanes_gb(by_lane: dict[str, float], tensors: tuple[str, ...]) -> float:
    return sum(sent for lane, sent in by_lane.items() if lane.split("/")[2] in tensors) / 1e9
