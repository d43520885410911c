"""Methods that the Mesh-Attention paper doesn't time, on the cluster that was fitted to it."""

from __future__ import annotations

from dataclasses import replace

from sp_bench.analysis.figure import VOLUME_BOUNDS, Figure, Panels, log2_ticks, styles
from sp_bench.analysis.number import count, least, most, of_record
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.mesh import cells
from sp_bench.analysis.studies.mesh.paper import Cell, paper_s
from sp_bench.analysis.studies.mesh.scaling import paper_seconds
from sp_bench.analysis.table import Table, columns
from sp_bench.records import Record

METHODS = (*cells.METHODS, "ulysses", "usp", "tokenring", "startrail")


def other_records(runs: Runs) -> dict[Cell, Record]:
    """Records of every setting of table 3 with every method."""
    settings = [cell for cell in paper_s() if cell.method == "ring"]
    return cells.cell_records(runs, [replace(cell, method=method) for cell in settings for method in METHODS])


def others(runs: Runs) -> Section:
    """Other methods in the settings of table 3."""
    found, paper = other_records(runs), cells.printed(3)
    made, rivals = [], []
    for ring in (cell for cell in paper if cell.method == "ring"):
        same = {method: found[replace(ring, method=method)] for method in METHODS}
        printed = [paper[replace(ring, method=method)][0] for method in cells.METHODS]
        made.append([*cells.key(ring)[:3], *printed, *(cells.throughput(record) for record in same.values())])
        rivals.append(cells.throughput(same["usp"]).over(cells.throughput(same["mesh"])))
    ours = "; ".join(f"{method} || .1f" for method in METHODS)
    heads = columns(f"causal; seqlen; GPUs; ring: paper || .1f; mesh: paper || .1f; {ours}")
    usp, mesh = (found[Cell(True, cells.LONG, 256, method)] for method in ("usp", "mesh"))
    refused = found[Cell(True, cells.LONG, 64, "ulysses")].error or ""
    about = text(
        cells.ABOUT_TIMES + " The paper times only Ring beside Mesh, not the methods that its section 2.3 names:"
        " Ulysses, StarTrail, and USP, the usual way to more GPUs than heads. No point of theirs was fitted. Their"
        " speed on this cluster depends on two things that no fitted cell tests: the rate inside nodes, an assumption,"
        " and transfers to many ranks at once. TokenRing runs inside nodes, with Ring between them. USP has a higher"
        " throughput than Mesh in {faster:.0f} of {all:.0f} settings: {low:.2f} to {high:.2f} times Mesh's. On 256 GPUs"
        " at 1M causal it sends {share:.2f} times Mesh's bytes ({usp}, Mesh {mesh}), which is counted and doesn't"
        " depend on the fit. A dash: Ulysses can't run there ({rule}).",
        faster=count(rivals, lambda ratio: ratio > 1),
        all=count(rivals),
        low=least(rivals),
        high=most(rivals),
        share=of_record(usp, "comm_bytes_per_gpu").over(of_record(mesh, "comm_bytes_per_gpu")),
        usp=usp.variant or "",
        mesh=mesh.variant or "",
        # An error reads "value: rule; what would work".
        rule=refused.partition(": ")[2].partition(";")[0],
    )
    return Section(
        "Beside the paper: other methods on its cluster",
        about,
        _figure(found),
        Table("mesh-others-values", "Throughput of other methods, iterations in 100 s", heads, made, shown_rows=12),
        _volumes(found),
    )


def _volumes(found: dict[Cell, Record]) -> Table:
    made = []
    for method in METHODS:
        records = [found[Cell(True, cells.LONG, gpus, method)] for gpus in cells.GPUS]
        variant = next((record.variant for record in reversed(records) if record.variant), "")
        made.append([method, variant, *(of_record(r, "comm_bytes_per_gpu").times(1e-9) for r in records)])
    meshes = [found[Cell(True, cells.LONG, gpus, "mesh")] for gpus in cells.GPUS]
    for field, (name, _) in VOLUME_BOUNDS.items():
        made.append([name, "", *(of_record(record, field).times(1e-9) for record in meshes)])
    heads = columns("; ".join(["method", "variant on 256 GPUs", *(f"{gpus} GPUs | GB | .2f" for gpus in cells.GPUS)]))
    return Table("mesh-others-volume", "Sent by each GPU, 1M causal, forward + backward", heads, made)


def _figure(found: dict[Cell, Record]) -> Figure:
    panels, looks, paper = Panels(height=3.4), styles(METHODS), paper_seconds()
    axis = panels.first
    for method in METHODS:
        times = {gpus: cells.seconds(found[Cell(True, cells.LONG, gpus, method)]) for gpus in cells.GPUS}
        panels.line(times, method, linestyle="-" if method in cells.METHODS else "--", **looks[method])
    for method in cells.METHODS:
        theirs = {cell.gpus: paper[cell] for cell in cells.long_cells(method)}
        panels.line(theirs, method, linestyle=":", markerfacecolor="white", **looks[method])
    log2_ticks(axis, cells.GPUS)
    axis.set_yscale("log")
    axis.set_yticks((10, 20, 50), ("10", "20", "50"))
    axis.minorticks_off()
    axis.set(xlabel="GPUs", ylabel="forward + backward, s")
    panels.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return panels.figure("mesh-others", "Other methods at 1M, causal")
