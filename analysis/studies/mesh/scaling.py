"""Figure 8 of the Mesh-Attention paper: strong and weak scaling."""

from __future__ import annotations

from sp_bench.analysis.figure import Figure, Panels, log2_ticks, styles
from sp_bench.analysis.number import Number, derived
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, section, words
from sp_bench.analysis.studies.mesh import cells
from sp_bench.analysis.studies.mesh.cells import METHODS
from sp_bench.analysis.studies.mesh.paper import TOKENS, Cell
from sp_bench.analysis.table import Cell as Entry

MULTIPLE = 256
"""Sequence lengths of figure 8b are rounded to a multiple of this many tokens, so that all GPUs get the same share."""
Times = dict[Cell, Number]
"""Seconds of an iteration by cell, from the fewest GPUs to the most."""
Lines = dict[str, Times]
"""The times of each method."""


def weak_cells(method: str) -> list[Cell]:
    """The cells of figure 8b: 512k tokens on 32 GPUs, and sqrt(2) times as many for each doubling of the GPUs."""
    lengths = [round(TOKENS["512k"] * 2 ** (i / 2) / MULTIPLE) * MULTIPLE for i in range(len(cells.GPUS))]
    return [Cell(True, length, gpus, method) for length, gpus in zip(lengths, cells.GPUS, strict=True)]


def paper_seconds() -> Times:
    """Table 3 in seconds of an iteration."""
    return {cell: derived(lambda value: 100 / value, value) for cell, (value,) in cells.printed(3).items()}


def figure8(runs: Runs) -> Section:
    """Both panels of figure 8, as a figure and as tables."""
    strong = {method: _seconds(runs, cells.long_cells(method)) for method in METHODS}
    weak = {method: _seconds(runs, weak_cells(method)) for method in METHODS}
    paper = paper_seconds()
    of_strong = {method: {cell: paper[cell] for cell in strong[method]} for method in METHODS}
    of_weak = {method: _stated_weak(method, paper, list(weak[method])) for method in METHODS}
    (ring, ring_at), (mesh, mesh_at) = (best(strong[method]) for method in METHODS)
    paper_ring, paper_mesh = (cells.stated(f"{method} best time") for method in METHODS)
    at_128 = next(number for cell, number in strong["mesh"].items() if cell.gpus == 128)
    first, *_, last = weak["ring"].values()
    start = paper[next(iter(weak["ring"]))]
    values = {"times": words("mesh.times"), "paper_ring": paper_ring, "ring": ring, "ring_at": ring_at}
    values |= {"paper_mesh": paper_mesh, "mesh": mesh, "mesh_at": mesh_at, "paper_gain": paper_ring.over(paper_mesh)}
    values |= {"gain": ring.over(mesh), "late": at_128.over(paper_mesh)}
    values |= {"figure": _figure(strong, of_strong, weak, of_weak), "strong_rows": _rows(strong, of_strong)}
    values |= {"start": first.over(start), "mixed": last.over(start), "weak_rows": _rows(weak, of_weak)}
    return section(
        "mesh.figure8",
        **values,
        **{f"{method}_grows": growth(weak[method]) for method in METHODS},
        **{f"paper_{method}_grows": cells.stated(f"weak scaling, {method}") for method in METHODS},
    )


def _seconds(runs: Runs, found: list[Cell]) -> Times:
    return {cell: cells.seconds(record) for cell, record in cells.cell_records(runs, found).items()}


def best(times: Times) -> tuple[Number, int]:
    """The shortest time, and on how many GPUs."""
    cell = min(times, key=lambda cell: times[cell].known)
    return times[cell], cell.gpus


def growth(times: Times) -> Number:
    """The last time over the first."""
    first, *_, last = times.values()
    return last.over(first)


def scaling(runs: Runs) -> dict[str, Number]:
    """Our values of the claims of section 4.3, by the start of the claim."""
    values: dict[str, Number] = {}
    for method in METHODS:
        values[f"{method} best time"] = best(_seconds(runs, cells.long_cells(method)))[0]
        values[f"weak scaling, {method}"] = growth(_seconds(runs, weak_cells(method)))
    return values


def _stated_weak(method: str, paper: Times, lengths: list[Cell]) -> Times:
    """The paper's weak scaling: two of four times are in table 3, the last is the stated ratio times the first."""
    known = {cell: paper[cell] for cell in lengths if cell in paper}
    ratio = cells.stated(f"weak scaling, {method}")
    return {**known, lengths[-1]: derived(lambda first, times: first * times, paper[lengths[0]], ratio)}


def _figure(strong: Lines, of_strong: Lines, weak: Lines, of_weak: Lines) -> Figure:
    panels = Panels(2, height=3.4)
    shown = [("(a) strong, 1M tokens", strong, of_strong), ("(b) weak, from 512k tokens", weak, of_weak)]
    for axis, (title, ours, paper) in zip(panels.axes[0], shown, strict=True):
        for method, style in styles(METHODS).items():
            by_gpus = [{cell.gpus: number for cell, number in line[method].items()} for line in (ours, paper)]
            panels.line(by_gpus[0], method, axis=axis, linestyle="-", **style)
            panels.line(by_gpus[1], method, axis=axis, linestyle=":", markerfacecolor="white", **style)
        log2_ticks(axis, cells.GPUS)
        axis.set_ylim(0, None)
        axis.set_xlabel("GPUs")
        axis.set_title(title, fontsize=9)
    panels.first.set_ylabel("forward + backward, s")
    panels.legend_below(4, fontsize=8)
    return panels.figure("mesh-figure8", "Strong and weak scaling, causal")


def _rows(ours: Lines, paper: Lines) -> list[list[Entry]]:
    rows: list[list[Entry]] = []
    for method in METHODS:
        for cell, number in ours[method].items():
            theirs = paper[method].get(cell)
            which = cells.which(cell) if cell.seqlen in TOKENS.values() else "not in it"
            compared = [theirs, number, number.over(theirs)] if theirs else ["-", number, "-"]
            rows.append([method, cell.gpus, cell.seqlen, which, *compared])
    return rows
