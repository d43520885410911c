"""Figure 9b of the Mesh-Attention paper, and its stated reductions of the communication volume."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from sp_bench import account, methods
from sp_bench.analysis.figure import VOLUME_BOUNDS, Figure, Panels, colours, labelled
from sp_bench.analysis.number import Number, Source, computed, count, derived, formula, gigabytes, mean, most, of_record
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, section
from sp_bench.analysis.studies.mesh import cells
from sp_bench.analysis.studies.mesh.memory import Tile, tiles_of_table5
from sp_bench.analysis.studies.mesh.paper import Cell
from sp_bench.analysis.table import Cell as Entry
from sp_bench.methods.mesh import tiles
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.tensors import DKV

POINTS = 2.0
"""Percentage points within which a reduction counts as reproduced."""
DTYPES = ("bfloat16", "float32")
ROUNDED = 0.05
"""The paper prints reductions to 0.1 points."""

STATED = (
    "communication volume reduction, 256 GPUs, maximum",
    "communication volume reduction, 256 GPUs, average",
    "communication volume reduction, seqlen 1M causal, maximum",
    "communication volume reduction, seqlen 1M causal, average",
    "mesh per-GPU volume at 256 GPUs",
)
"""The claims on volumes: two of the abstract, then three of section 4.5."""


@dataclass(frozen=True)
class Accounting:
    """A way to count the communication volume."""

    outputs: str = "bfloat16"
    """The dtype in which partial outputs travel."""
    gradients: str = "bfloat16"
    """The dtype in which dq and dkv travel."""
    statistics: bool = True
    """Whether the lse counts."""
    home: bool = False
    """Whether Ring's dkv makes a last hop home, as it does if each rank adds to what arrives and passes it on."""

    @property
    def name(self) -> str:
        """The way in words."""
        lse, home = ("with" if self.statistics else "without"), (", Ring's dkv sent home" if self.home else "")
        return f"partial outputs in {self.outputs}, gradients in {self.gradients}, {lse} lse{home}"

    @property
    def source(self) -> Source:
        """The way as a source."""
        text = f"bytes that a GPU sends, forward + backward, counted from the plans: {self.name}"
        name = f"mesh-volume-{self.outputs}-{self.gradients}{'-lse' * self.statistics}{'-home' * self.home}"
        return formula(name, text, "sp_bench.account.volume")


PAYLOAD = Accounting(statistics=False)
WIDE = Accounting(gradients="float32", home=True)


@cache
def phase_bytes(cell: Cell, phase: str, tile: Tile | None, accounting: Accounting) -> float:
    """Bytes that a GPU sends in a phase, on average. Ring has no tile."""
    wire = accounting.gradients if phase == "backward" else accounting.outputs
    problem = replace(cell.problem, wire_dtype=wire)
    method = methods.build(cell.method, {"tile": list(tile)} if tile else {})
    volume = account.volume(method.plan(problem, phase, COMPUTE_BOUND), problem)
    home = problem.chunk_bytes(DKV, wire=True) if accounting.home and not tile and phase == "backward" else 0
    return (volume.total_bytes if accounting.statistics else volume.payload_bytes) + home


def volume(cell: Cell, tile_of: Mapping[str, Tile], accounting: Accounting) -> Number:
    """Bytes that a GPU sends forward and backward, each phase with its tile."""
    sent = sum(phase_bytes(cell, phase, tile_of.get(phase), accounting) for phase in PHASES)
    return computed(sent, accounting.source)


def reduced(cell: Cell, tile_of: Mapping[str, Tile], accounting: Accounting) -> Number:
    """By how much a cell of Mesh sends less than Ring, in percent."""
    ring = replace(cell, method="ring")
    return cells.reduction(volume(cell, tile_of, accounting), volume(ring, {}, accounting))


def our_tiles(runs: Runs, found: list[Cell]) -> dict[Cell, dict[str, Tile]]:
    """The fastest simulated tile of each cell, the same for both phases."""
    return {
        cell: dict.fromkeys(PHASES, (int(record.tile_a or 1), int(record.tile_b or 1)))
        for cell, record in cells.cell_records(runs, found).items()
    }


def reductions(tile_of: Mapping[Cell, Mapping[str, Tile]], accounting: Accounting) -> dict[str, Number]:
    """Our values of the STATED reductions, in percent."""
    wide = [reduced(cell, tile_of[cell], accounting) for cell in tile_of if cell.gpus == 256]
    long = {cell.gpus: cell for cell in cells.long_cells("mesh")}
    by_gpus = [reduced(cell, tile_of[cell], accounting) for cell in long.values()]
    last, first = (volume(long[gpus], tile_of[long[gpus]], accounting) for gpus in (256, 32))
    numbers = most(wide), mean(wide), most(by_gpus), mean(by_gpus), cells.reduction(last, first)
    return dict(zip(STATED, numbers, strict=True))


def three_ways(runs: Runs) -> dict[str, dict[str, Number]]:
    """The reductions with our tiles, with table 5's, and with table 5's and fp32 gradients."""
    printed = tiles_of_table5()
    ours = our_tiles(runs, list(printed))
    return {
        "our tiles": reductions(ours, PAYLOAD),
        "tiles of table 5": reductions(printed, PAYLOAD),
        "tiles of table 5, fp32 gradients": reductions(printed, WIDE),
    }


def figure9b(runs: Runs) -> Section:
    """The volume of a GPU, and the stated reductions."""
    payload, fp32 = (_reduction_of_tiles(way) for way in (PAYLOAD, WIDE))
    rounded = [cells.stated(claim).known for claim in STATED if claim.endswith("maximum")]
    alone = [name for name, x in fp32.items() if any(abs(x.known - stated) <= ROUNDED for stated in rounded)]
    matching, choices = choices_that_match()
    values = {"by_gpus": _by_gpus(runs), "matching": computed(matching, WIDE.source)}
    values |= {"choices": computed(choices, WIDE.source), "alone": " and ".join(alone) or "no tile"}
    values |= {"by_dtype": _by_dtype(), "payload": PAYLOAD.name, "fp32": WIDE.name}
    return section(
        "mesh.figure9b",
        **values,
        figure=_figure(runs),
        bounds="; ".join(f"{name}, bfloat16 | GB | .2f" for name, _ in VOLUME_BOUNDS.values()),
        by_tile=[[name, payload[name], fp32[name]] for name in payload],
        **_claims(three_ways(runs)),
    )


def _claims(ways: dict[str, dict[str, Number]]) -> dict[str, Any]:
    """The rows of the stated reductions, and how near each way comes to them."""
    paper = {claim: cells.stated(claim) for claim in STATED}
    offs = {
        name: [values_of[claim].minus(stated) for claim, stated in paper.items()] for name, values_of in ways.items()
    }
    rows: list[list[Entry]] = []
    for i, (claim, stated) in enumerate(paper.items()):
        both = ((values_of[claim], offs[name][i]) for name, values_of in ways.items())
        rows.append([claim, stated, *(number for pair in both for number in pair)])
    ours, theirs, wide = (count(of_way, lambda off: abs(off) <= POINTS) for of_way in offs.values())
    *_, wide_offs = offs.values()
    return {
        "ways": "; ".join(f"{name} | % | .2f; difference | points | +.2f" for name in ways),
        "claims": rows,
        "ours": ours,
        "theirs": theirs,
        "wide": wide,
        "all": count(offs["our tiles"]),
        "section": count(wide_offs[2:]),
        "farthest": _farthest(wide_offs[2:]),
        "abstract": _farthest(wide_offs[:2]),
    }


def _farthest(offs: Iterable[Number]) -> Number:
    """The largest absolute value."""
    return derived(lambda *values: max(map(abs, values)), *offs)


@cache
def choices_that_match() -> tuple[int, int]:
    """The number of choices of tiles that give section 4.5's reductions at 1M causal to the printed digit, and of all.

    A choice is a tile for each phase and number of GPUs.
    """
    units, rings = [], []
    for cell in cells.long_cells("mesh"):
        of_phase = [[phase_bytes(cell, phase, tile, WIDE) for tile in tiles(cell.gpus)] for phase in PHASES]
        units.append(np.array([sum(pair) for pair in product(*of_phase)]))
        rings.append(volume(replace(cell, method="ring"), {}, WIDE).known)
    maximum, average, ends = (cells.stated(claim).known for claim in STATED[2:])
    first, last = units[0][:, None], units[3][None, :]
    agreed = np.argwhere(np.abs(100 * (1 - last / first) - ends) <= ROUNDED)
    middle = [100 * (1 - units[i] / rings[i]) for i in (1, 2)]
    matching = 0
    for i, j in agreed:
        outer = [100 * (1 - units[0][i] / rings[0]), 100 * (1 - units[3][j] / rings[3])]
        both = np.stack(np.broadcast_arrays(middle[0][:, None], middle[1][None, :]))
        top = np.maximum(both.max(axis=0), max(outer))
        mean = (both.sum(axis=0) + sum(outer)) / 4
        matching += int(((np.abs(top - maximum) <= ROUNDED) & (np.abs(mean - average) <= ROUNDED)).sum())
    return matching, math.prod(size.size for size in units)


def _by_gpus(runs: Runs) -> list[list[Entry]]:
    rows, printed, long = [], tiles_of_table5(), cells.long_cells("mesh")
    ours, records = our_tiles(runs, long), cells.cell_records(runs, long)
    for cell in long:
        row: list[Entry] = [cell.gpus]
        for tile_of, accounting in ((ours[cell], PAYLOAD), (printed[cell], WIDE)):
            names = dict.fromkeys("x".join(map(str, tile_of[phase])) for phase in PHASES)
            ring, mesh = volume(replace(cell, method="ring"), {}, accounting), volume(cell, tile_of, accounting)
            row += [", ".join(names), ring.times(1e-9), mesh.times(1e-9), cells.reduction(mesh, ring)]
        rows.append([*row, *(gigabytes(records[cell], field) for field in VOLUME_BOUNDS)])
    return rows


def _by_dtype() -> list[list[Entry]]:
    """Section 4.5's reductions for each dtype on the wire, with and without Ring's last hop."""
    rows: list[list[Entry]] = []
    for outputs, gradients, home in product(DTYPES, DTYPES, (False, True)):
        reduced = dict(list(reductions(tiles_of_table5(), Accounting(outputs, gradients, home=home)).items())[2:])
        offs = [number.minus(cells.stated(claim)) for claim, number in reduced.items()]
        rows.append([outputs, gradients, "yes" if home else "no", *reduced.values(), _farthest(offs)])
    return rows


def _reduction_of_tiles(accounting: Accounting) -> dict[str, Number]:
    """The reduction of every tile of 256 GPUs, the same tile in both phases."""
    cell = next(cell for cell in cells.long_cells("mesh") if cell.gpus == 256)
    shapes = [(a, b) for a, b in tiles(cell.gpus) if a > 1]
    return {f"{a}x{b}": reduced(cell, dict.fromkeys(PHASES, (a, b)), accounting) for a, b in shapes}


KINDS = {"q and odoq": ("q", "odoq"), "kv": ("kv",), "o and dq": ("o", "dq"), "dkv": ("dkv",)}


def _figure(runs: Runs) -> Figure:
    """Bars of what is sent with our tiles, and marks of the volumes with table 5's tiles."""
    long = [*cells.long_cells("ring"), *cells.long_cells("mesh")]
    records, printed = cells.cell_records(runs, long), tiles_of_table5()
    panels, width, palette = Panels(), 0.36, colours(list(KINDS))
    axis = panels.first
    for i, cell in enumerate(long):
        x = cells.GPUS.index(cell.gpus) + (-width / 2 - 0.02 if cell.method == "ring" else width / 2 + 0.02)
        base, sent, by_lane = (
            0.0,
            of_record(records[cell], "comm_bytes_per_gpu"),
            records[cell].comm_bytes_by_lane or {},
        )
        for (name, tensors), hatch in zip(KINDS.items(), ("", "//", "..", "xx"), strict=True):
            part = sum(lane_bytes for lane, lane_bytes in by_lane.items() if lane.split("/")[2] in tensors) / 1e9
            style = {"color": palette[name], "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
            axis.bar(x, part, width, bottom=base, label=labelled(name, sent.kind) if i == 0 else None, **style)
            base += part
        wide = volume(cell, printed.get(cell, {}), WIDE).times(1e-9)
        name = "table 5's tiles, fp32 gradients" if i == 0 else ""
        panels.line({x: wide}, name, marker="D", linestyle="none", color="black", markersize=4)
        panels.numbers.append(sent)
        axis.annotate(cell.method, (x, max(base, wide.known)), (0, 5), textcoords="offset points", ha="center", size=7)
    for field, (name, dashes) in VOLUME_BOUNDS.items():
        for i, gpus in enumerate(cells.GPUS):
            bound = gigabytes(records[next(c for c in cells.long_cells("mesh") if c.gpus == gpus)], field)
            style = {"color": "black", "linestyle": dashes, "linewidth": 1.2}
            panels.line({i - 0.42: bound, i + 0.42: bound}, "" if i else name, **style)
    axis.set_xticks(range(len(cells.GPUS)), [str(n) for n in cells.GPUS])
    axis.set(xlabel="GPUs", ylabel="sent by each GPU, GB")
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.1)
    panels.legend_below(3, fontsize=7)
    note = "Bars are with our tiles and bf16 gradients. The paper's bars have no printed values."
    return panels.figure("mesh-figure9b", "Volume per GPU at 1M, causal, forward + backward", note)
