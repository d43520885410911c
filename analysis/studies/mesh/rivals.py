"""Methods that the Mesh-Attention paper doesn't time, on the cluster that was fitted to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from sp_bench.analysis.figure import VOLUME_BOUNDS, Figure, Panels, log2_ticks, styles
from sp_bench.analysis.number import count, gigabytes, least, most, of_record
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, section, words
from sp_bench.analysis.studies.mesh import cells
from sp_bench.analysis.studies.mesh.paper import Cell, paper_s
from sp_bench.analysis.studies.mesh.scaling import paper_seconds
from sp_bench.analysis.table import Cell as Entry
from sp_bench.records import Record

METHODS = (*cells.METHODS, "ulysses", "usp", "tokenring", "startrail")


def others(runs: Runs) -> Section:
    """Other methods in the settings of table 3."""
    settings = [cell for cell in paper_s() if cell.method == "ring"]
    records = cells.cell_records(runs, [replace(cell, method=method) for cell in settings for method in METHODS])
    paper, rows, rivals = cells.printed(3), [], []
    for ring in settings:
        ours = {method: cells.throughput(records[replace(ring, method=method)]) for method in METHODS}
        printed = [paper[replace(ring, method=method)][0] for method in cells.METHODS]
        rows.append([*cells.key(ring)[:3], *printed, *ours.values()])
        rivals.append(ours["usp"].over(ours["mesh"]))
    long = {(n, m): records[Cell(True, cells.LONG, n, m)] for n, m in product(cells.GPUS, METHODS)}
    usp, mesh = long[256, "usp"], long[256, "mesh"]
    values = {"times": words("mesh.times"), "faster": count(rivals, lambda ratio: ratio > 1), "all": count(rivals)}
    values |= {"low": least(rivals), "high": most(rivals)}
    values |= {"usp": usp.variant or "", "mesh": mesh.variant or ""}
    values |= {"figure": _figure(long), "ours": "; ".join(f"{method} || .1f" for method in METHODS), "rows": rows}
    values |= {"by_gpus": "; ".join(f"{gpus} GPUs | GB | .2f" for gpus in cells.GPUS), "volumes": _volumes(long)}
    return section(
        "mesh.others",
        **values,
        share=of_record(usp, "comm_bytes_per_gpu").over(of_record(mesh, "comm_bytes_per_gpu")),
        rule=(long[64, "ulysses"].error or "").partition(": ")[2].partition(";")[0],
    )


def _volumes(long: dict[tuple[int, str], Record]) -> list[list[Entry]]:
    rows: list[list[Entry]] = []
    for method in METHODS:
        records = [long[gpus, method] for gpus in cells.GPUS]
        variant = next((record.variant for record in reversed(records) if record.variant), "")
        rows.append([method, variant, *(gigabytes(record, "comm_bytes_per_gpu") for record in records)])
    for field, (name, _) in VOLUME_BOUNDS.items():
        rows.append([name, "", *(gigabytes(long[gpus, "mesh"], field) for gpus in cells.GPUS)])
    return rows


def _figure(long: dict[tuple[int, str], Record]) -> Figure:
    panels, looks, paper = Panels(height=3.4), styles(METHODS), paper_seconds()
    for method in METHODS:
        times = {gpus: cells.seconds(long[gpus, method]) for gpus in cells.GPUS}
        panels.line(times, method, linestyle="-" if method in cells.METHODS else "--", **looks[method])
    for method in cells.METHODS:
        theirs = {cell.gpus: paper[cell] for cell in cells.long_cells(method)}
        panels.line(theirs, method, linestyle=":", markerfacecolor="white", **looks[method])
    axis = panels.first
    log2_ticks(axis, cells.GPUS)
    axis.set_yscale("log")
    axis.set_yticks((10, 20, 50), ("10", "20", "50"))
    axis.minorticks_off()
    axis.set(xlabel="GPUs", ylabel="forward + backward, s")
    panels.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return panels.figure("mesh-others", "Other methods at 1M, causal")
