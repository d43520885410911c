"""Methods that the Mesh-Attention paper doesn't time, on the cluster that was fitted to it."""

from __future__ import annotations

from dataclasses import replace

from sp_bench.analysis.figure import Figure, colours, labelled, markers, new_figure, sources
from sp_bench.analysis.mesh_fit import Cell, paper_s
from sp_bench.analysis.number import derived, of_record
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies import mesh_cells as cells
from sp_bench.analysis.table import Column, Table
from sp_bench.records import Record

OTHERS = ("ulysses", "usp", "tokenring", "startrail")
METHODS = ("ring", "mesh", *OTHERS)


def other_records(runs: Runs) -> dict[Cell, Record]:
    """Every setting of table 3 with every method."""
    settings = [cell for cell in paper_s() if cell.method == "ring"]
    return cells.cell_records(runs, [replace(cell, method=method) for cell in settings for method in METHODS])


def others(runs: Runs) -> Section:
    """Our own columns beside table 3."""
    found, paper = other_records(runs), cells.printed(3)
    made, rivals = [], []
    for ring in (cell for cell in paper if cell.method == "ring"):
        same = {method: found[replace(ring, method=method)] for method in METHODS}
        printed = [paper[replace(ring, method=method)][0] for method in ("ring", "mesh")]
        made.append([*cells.key(ring)[:3], *printed, *(cells.throughput(record) for record in same.values())])
        rivals.append(cells.throughput(same["usp"]).over(cells.throughput(same["mesh"])))
    head = [*cells.KEY[:3], *(Column(f"{method}: paper", "", ".1f") for method in ("ring", "mesh"))]
    head += [Column(method, "", ".1f") for method in METHODS]
    last = {method: found[Cell(True, cells.LONG, 256, method)] for method in ("usp", "mesh")}
    sent = {method: of_record(record, "comm_bytes_per_gpu") for method, record in last.items()}
    refused = found[Cell(True, cells.LONG, 64, "ulysses")].error or ""
    about = text(
        f"{cells.ABOUT_TIMES} The paper times Ring alone beside Mesh, not what its section 2.3 names: Ulysses,"
        " StarTrail, and USP, the usual way to more GPUs than heads. No point of theirs was fitted. How fast this"
        " cluster makes them rests on two things that no fitted cell tests: the rate inside nodes, an assumption, and"
        " transfers to many ranks at once. TokenRing is inside nodes, with Ring between them. USP has a higher"
        " throughput than Mesh in {faster:.0f} of {all:.0f} settings, {least:.2f} to {most:.2f} times; on 256 GPUs at"
        " 1M causal it sends {share:.2f} times Mesh's bytes, which is counted and no matter of the fit"
        f" ({last['usp'].variant}, Mesh {last['mesh'].variant}). Where Ulysses has a dash it can't run"
        f" ({_rule(refused)}).",
        faster=cells.count(rivals, lambda ratio: ratio > 1),
        all=cells.count(rivals, lambda ratio: True),
        least=cells.least(rivals),
        most=cells.most(rivals),
        share=sent["usp"].over(sent["mesh"]),
    )
    title = "Throughput of other methods, iterations in 100 s"
    return Section(
        "Beside the paper: other methods on its cluster",
        [about, _figure(found), Table("mesh-others-values", title, head, made, shown_rows=12), _volumes(found)],
    )


def _rule(error: str) -> str:
    """What the request breaks, without the values that would work."""
    return error.partition(": ")[2].partition(";")[0]


def _volumes(found: dict[Cell, Record]) -> Table:
    made = []
    for method in METHODS:
        records = [found[Cell(True, cells.LONG, gpus, method)] for gpus in cells.GPUS]
        variant = next((record.variant for record in reversed(records) if record.variant), "")
        made.append([method, variant, *(of_record(r, "comm_bytes_per_gpu").times(1e-9) for r in records)])
    head = [Column("method"), Column("variant on 256 GPUs")]
    head += [Column(f"{gpus} GPUs", "GB", ".2f") for gpus in cells.GPUS]
    return Table("mesh-others-volume", "Sent by each GPU, 1M causal, forward + backward", head, made)


def _figure(found: dict[Cell, Record]) -> Figure:
    canvas, axes = new_figure(height=3.4)
    axis, palette, marks, numbers = axes[0, 0], colours(METHODS), markers(METHODS), []
    for method in METHODS:
        times = {gpus: cells.seconds(found[Cell(True, cells.LONG, gpus, method)]) for gpus in cells.GPUS}
        times = {gpus: number for gpus, number in times.items() if number.value is not None}
        style = "-" if method in ("ring", "mesh") else "--"
        kind = next(iter(times.values())).kind
        values = [number.known for number in times.values()]
        axis.plot([*times], values, style, marker=marks[method], color=palette[method], label=labelled(method, kind))
        numbers += times.values()
    printed = cells.printed(3)
    for method in ("ring", "mesh"):
        theirs = [derived(lambda v: 100 / v, printed[cell][0]) for cell in cells.long_cells(method)]
        values = [number.known for number in theirs]
        style = {"marker": marks[method], "markerfacecolor": "white", "color": palette[method]}
        axis.plot(cells.GPUS, values, ":", label=labelled(method, "paper"), **style)
        numbers += theirs
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(cells.GPUS, [str(n) for n in cells.GPUS])
    ticks = (10, 20, 50)
    axis.set_yticks(ticks, [str(n) for n in ticks])
    axis.minorticks_off()
    axis.set_xlabel("GPUs")
    axis.set_ylabel("forward + backward, s")
    canvas.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    return Figure("mesh-others", "Other methods at 1M, causal", canvas, sources(numbers))
