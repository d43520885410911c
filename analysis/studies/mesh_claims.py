"""What the abstract and the text of the Mesh-Attention paper state, each beside ours."""

from __future__ import annotations

from collections.abc import Iterable

from sp_bench.analysis.mesh_fit import paper_s
from sp_bench.analysis.number import Number
from sp_bench.analysis.paper_tables import rows
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies import mesh_cells as cells
from sp_bench.analysis.studies.mesh_breakdown import waiting
from sp_bench.analysis.studies.mesh_scaling import METHODS, scaling
from sp_bench.analysis.studies.mesh_tables import nine_gpus
from sp_bench.analysis.studies.mesh_volume import POINTS, three_ways
from sp_bench.analysis.table import Column, Table

SHARE = 0.1
"""A time or a ratio counts as reproduced within so much: the median error on held-out cells."""
BOUNDS = {"%": f"{POINTS:g} points", "x": f"{SHARE:.0%}", "s": f"{SHARE:.0%}", "chunks": "exactly"}


def our_claims(runs: Runs) -> dict[str, tuple[str, Number]]:
    """Ours, by the start of a claim; before each, how it was had."""
    ways = three_ways(runs)
    found = _simulated(_speedups(runs) | scaling(runs) | waiting(runs))
    found |= {claim: ("our tiles", number) for claim, number in ways["our tiles"].items()}
    return found | {claim: ("counted", number) for claim, number in nine_gpus().items()}


def _simulated(numbers: dict[str, Number]) -> dict[str, tuple[str, Number]]:
    return {claim: ("fitted cluster", number) for claim, number in numbers.items()}


def _speedups(runs: Runs) -> dict[str, Number]:
    wide = [cell for cell in paper_s() if cell.gpus == 256]
    records = cells.cell_records(runs, wide)
    by_method = {m: [cells.seconds(records[cell]) for cell in wide if cell.method == m] for m in METHODS}
    gains = [ring.over(mesh) for ring, mesh in zip(*by_method.values(), strict=True)]
    return {
        "speedup over ring, 256 GPUs, maximum": cells.most(gains),
        "speedup over ring, 256 GPUs, average": cells.mean(gains),
    }


def reproduced(ours: float, paper: float, unit: str) -> bool:
    """Whether ours is within the bound for its unit."""
    if unit == "%":
        return abs(ours - paper) <= POINTS
    return ours == paper if unit == "chunks" else abs(ours / paper - 1) <= SHARE


def claims(runs: Runs) -> Section:
    """All claims with a unit."""
    ours, other = our_claims(runs), three_ways(runs)
    made, verdicts, sources = [], [], []
    for row in rows("mesh_claims"):
        if not row["unit"]:
            continue
        claim, unit = row["claim"], row["unit"]
        paper = cells.stated(claim)
        how, number = next(found for start, found in ours.items() if _is(claim, start))
        alternatives = [(how, number)]
        alternatives += [
            (name, found[claim_]) for name, found in other.items() for claim_ in found if _is(claim, claim_)
        ][1:]
        for name, value in alternatives:
            good = reproduced(value.known, paper.known, unit)
            verdict = "reproduced" if good else "not reproduced"
            made.append([claim, row["where"], unit, paper, value, value.over(paper), name, BOUNDS[unit], verdict])
            if value is number:
                verdicts.append(good)
                sources += [value, paper]
    every = tuple(dict.fromkeys(source for number in sources for source in number.sources))
    about = text(
        "Claims of the abstract and the text that have a value. A time or a ratio counts as reproduced within 10%,"
        " about the median error on the held-out cells, a percentage within two points, a count if it is equal. Times"
        " are simulated on the fitted cluster (30 cells fitted, 18 held out), volumes and chunks computed. {good:.0f}"
        " of {all:.0f} are reproduced as they are. Volumes are given with our tiles first, and then with those that"
        " table 5's peaks come nearest to, without and with fp32 gradients: with these, {explained:.0f} more are. What"
        " is not reproduced either way: " + "; ".join(_missed(made)) + ". The sections of figures 8 and 9a say by how"
        " much, and what would explain it.",
        explained=Number(_with_other_tiles(made), "computed", every),
        good=Number(sum(verdicts), "simulated", every),
        all=Number(len(verdicts), "simulated", every),
    )
    head = [Column("claim"), Column("where"), Column("unit"), Column("paper"), Column("ours")]
    head += [Column("ours / paper's", "", ".2f"), Column("with"), Column("bound"), Column("verdict")]
    return Section("What the paper states", [about, Table("mesh-claims", "Stated, and ours", head, made)])


def _is(claim: str, start: str) -> bool:
    return claim.startswith(start) or claim.endswith(start)


def _with_other_tiles(made: Iterable[list]) -> int:
    """How many claims are reproduced, but not in their first row."""
    first, good = {}, set()
    for claim, *_, verdict in made:
        first.setdefault(claim, verdict)
        if verdict == "reproduced":
            good.add(claim)
    return sum(first[claim] != "reproduced" for claim in good)


def _missed(made: Iterable[list]) -> list[str]:
    """Claims without any reproduced row."""
    good = {row[0] for row in made if row[-1] == "reproduced"}
    return list(dict.fromkeys(str(row[0]) for row in made if row[0] not in good)) or ["nothing"]
