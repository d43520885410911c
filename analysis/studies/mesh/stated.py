"""The claims of the Mesh-Attention paper's abstract and text, each beside ours."""

from __future__ import annotations

from dataclasses import replace

from sp_bench.analysis.number import Number, mean, most, tally
from sp_bench.analysis.paper_tables import rows
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.mesh import cells
from sp_bench.analysis.studies.mesh.breakdown import waiting
from sp_bench.analysis.studies.mesh.paper import paper_s
from sp_bench.analysis.studies.mesh.scaling import scaling
from sp_bench.analysis.studies.mesh.tables import nine_gpus
from sp_bench.analysis.studies.mesh.volume import POINTS, three_ways
from sp_bench.analysis.table import Table, columns

SHARE = 0.1
"""A time or a ratio counts as reproduced within this share, about the median error on held-out cells."""
BOUNDS = {"%": f"{POINTS:g} points", "x": f"{SHARE:.0%}", "s": f"{SHARE:.0%}", "chunks": "exactly"}


def our_claims(runs: Runs) -> dict[str, tuple[str, Number]]:
    """Our value of each claim and how it was obtained, by the start of the claim."""
    simulated = _speedups(runs) | scaling(runs) | waiting(runs)
    found = {claim: ("fitted cluster", number) for claim, number in simulated.items()}
    found |= {claim: ("our tiles", number) for claim, number in three_ways(runs)["our tiles"].items()}
    return found | {claim: ("counted", number) for claim, number in nine_gpus().items()}


def _speedups(runs: Runs) -> dict[str, Number]:
    records = cells.cell_records(runs, [cell for cell in paper_s() if cell.gpus == 256])
    times = {cell: cells.seconds(record) for cell, record in records.items()}
    gains = [times[replace(cell, method="ring")].over(times[cell]) for cell in times if cell.method == "mesh"]
    return {
        "speedup over ring, 256 GPUs, maximum": most(gains),
        "speedup over ring, 256 GPUs, average": mean(gains),
    }


def reproduced(ours: float, paper: float, unit: str) -> bool:
    """Whether ours is within the bound for its unit."""
    if unit == "%":
        return abs(ours - paper) <= POINTS
    return ours == paper if unit == "chunks" else abs(ours / paper - 1) <= SHARE


def claims(runs: Runs) -> Section:
    """All claims with a unit."""
    ours, (_, *other_tiles) = our_claims(runs), three_ways(runs).items()
    made, numbers = [], []
    first: dict[str, bool] = {}
    any_way: dict[str, bool] = {}
    for row in (row for row in rows("mesh_claims") if row["unit"]):
        claim, unit, paper = row["claim"], row["unit"], cells.stated(row["claim"])
        (start,) = (start for start in ours if claim.startswith(start) or claim.endswith(start))
        ways = [ours[start], *((name, found[start]) for name, found in other_tiles if start in found)]
        verdicts = [reproduced(value.known, paper.known, unit) for _, value in ways]
        first[claim], any_way[claim] = verdicts[0], any(verdicts)
        numbers += [ours[start][1], paper]
        for (name, value), good in zip(ways, verdicts, strict=True):
            made.append([claim, row["where"], unit, paper, value, value.over(paper), name, BOUNDS[unit]])
            made[-1].append("reproduced" if good else "not reproduced")
    about = text(
        "Claims of the abstract and the text that have a value. A time or a ratio counts as reproduced within 10%,"
        " about the median error on the held-out cells, a percentage within two points, a count if it is equal. Times"
        " are simulated on the fitted cluster (30 cells fitted, 18 held out), volumes and chunks computed. {good:.0f}"
        " of {all:.0f} claims are reproduced as they are. Volumes are given with our tiles first, then with the tiles"
        " nearest to table 5's peaks, without and with fp32 gradients: with these, {explained:.0f} more are. Not"
        " reproduced either way: {missed}. The sections of figures 8 and 9a say by how much, and why it may be.",
        good=tally(sum(first.values()), numbers),
        all=tally(len(first), numbers),
        explained=tally(sum(any_way.values()) - sum(first.values()), numbers),
        missed="; ".join(claim for claim, good in any_way.items() if not good) or "nothing",
    )
    heads = columns(
        "claim; place in the paper; unit; paper; ours; ours / paper's || .2f; setting of ours; tolerance; verdict"
    )
    return Section(
        "What the paper states", about, Table("mesh-claims", "Claims of the paper, and our numbers", heads, made)
    )
