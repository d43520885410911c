"""Tables 2, 3 and 4 of the Mesh-Attention paper, and the claims of its abstract and text, each beside ours."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from sp_bench import account
from sp_bench.analysis.number import Number, computed, count, derived, formula, mean, most, of_record, tally
from sp_bench.analysis.paper_tables import of_paper, rows
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, Text, section, source, words
from sp_bench.analysis.studies.mesh import cells
from sp_bench.analysis.studies.mesh.breakdown import waiting
from sp_bench.analysis.studies.mesh.paper import Cell, fitted, implied_peak_tflops, paper_s
from sp_bench.analysis.studies.mesh.scaling import paper_seconds, scaling
from sp_bench.analysis.studies.mesh.volume import POINTS, three_ways
from sp_bench.describe import PaperVolume, Volumes, counted_volumes
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Q

TABLE2 = "mesh_table2_comm_volume"
COUNTED = source("mesh.counted-volume")
IMPLIED = source("mesh.implied-peak")
EXACT = 1e-12
"""Volumes in units of N * d that differ by less count as equal."""


def table2(_: Runs | None = None) -> Section:
    """Forward volumes: the formulas as printed, and counted from the plans."""
    made, gaps = [], []
    for row in rows(TABLE2):
        expression = row["per_gpu_forward_volume_in_units_of_N_d"]
        for n in (16, 64, 256):
            counted = _counted(row["method"], expression, n)
            paper = of_paper(counted.paper, TABLE2)
            average, busiest = (computed(value, COUNTED) for value in (counted.mean, counted.busiest))
            gaps.append(busiest.minus(paper))
            made.append([row["method"], expression, n, counted.variant, paper, average, busiest, gaps[-1]])
    exact, stated = count(gaps, lambda gap: abs(gap) < EXACT), [row["claim"] for row in rows("mesh_claims")]
    examples = []
    for claim, ours in nine_gpus().items():
        paper = next(cells.stated(start) for start in stated if start.endswith(claim))
        examples.append([claim, paper, ours, ours.over(paper)])
    verdict = "reproduced" if exact.known == len(gaps) else "not reproduced"
    return section("mesh.table2", exact=exact, all=count(gaps), verdict=verdict, rows=made, nine_gpus=examples)


@cache
def _counted(method: str, expression: str, n: int) -> Volumes:
    return counted_volumes(PaperVolume(method, expression), n)


def nine_gpus() -> dict[str, Number]:
    """Section 1's example by claim: the units that 9 GPUs send in total with Ring, and with 3 x 3 tiles.

    Counted from plans. Without local Q-KV, tiles are counted from the unrotated assignment: a GPU receives the Q (1
    unit) and KV (2 units) chunks of its tile that it doesn't own, and sends the partial outputs of two rows.
    """
    side, n = 3, 9
    foreign = 0
    for gpu in range(n):
        row, column = divmod(gpu, side)
        foreign += sum(side * row + i != gpu for i in range(side))
        foreign += 2 * sum(side * column + i != gpu for i in range(side))
    source = formula("mesh-unrotated-units", "units of the unrotated 3 x 3 assignment, counted", "section 1, figure 1b")
    return {
        "ring total units of communication": _units("ring", n),
        "3x3 tiles without local Q-KV property": computed(foreign + n * (side - 1), source),
        "3x3 tiles with local Q-KV property": _units("mesh", n),
    }


def _units(method: str, n: int) -> Number:
    problem = Problem(n=n, seqlen=2 * n, heads=n, kv_heads=n, head_dim=8, mask=FULL, layout=LAYOUTS["contiguous"])
    options = {"tile": [3, 3]} if method == "mesh" else {}
    plan = build(method, options).plan(problem, "forward", COMPUTE_BOUND)
    return computed(n * account.volume(plan, problem).payload_bytes / problem.chunk_bytes(Q, wire=True), COUNTED)


def table3(runs: Runs) -> Section:
    """Throughput, and Mesh's speedup over Ring."""
    paper = {cell: value for cell, (value,) in cells.printed(3).items()}
    records = cells.cell_records(runs, paper)
    ours = {cell: cells.throughput(record) for cell, record in records.items()}
    speedups = []
    for mesh in (cell for cell in paper if cell.method == "mesh"):
        ring = replace(mesh, method="ring")
        theirs, mine = paper[mesh].over(paper[ring]), ours[mesh].over(ours[ring])
        speedups.append([*cells.key(mesh)[:3], cells.which(mesh), theirs, mine, mine.over(theirs)])
    values = {"pairs": count(row[5] for row in speedups), "speedups": speedups}
    return section(
        "mesh.table3",
        **values,
        times=words("mesh.times"),
        errors=_errors_of_sets({cell: paper[cell].over(ours[cell]) for cell in paper}),
        theirs=count((row[4] for row in speedups), lambda ratio: ratio > 1),
        faster=count((row[5] for row in speedups), lambda ratio: ratio > 1),
        rows=[
            [
                *cells.key(cell),
                records[cell].variant or "",
                cells.which(cell),
                value,
                ours[cell],
                ours[cell].over(value),
            ]
            for cell, value in paper.items()
        ],
    )


def table4(runs: Runs) -> Section:
    """MFU in percent."""
    paper = {cell: value for cell, (value,) in cells.printed(4).items()}
    ours = {cell: of_record(record, "mfu").times(100) for cell, record in cells.cell_records(runs, paper).items()}
    ratios = {cell: ours[cell].over(value) for cell, value in paper.items()}
    seconds, made = paper_seconds(), []
    for cell, value in paper.items():
        peak = derived(lambda s, mfu, flops=cell.flops_per_gpu: flops / s / (mfu / 100) / 1e12, seconds[cell], value)
        made.append([*cells.key(cell), cells.which(cell), value, ours[cell], ratios[cell], peak])
    peak = computed(implied_peak_tflops(fitted()), IMPLIED)
    return section("mesh.table4", peak=peak, errors=_errors_of_sets(ratios), rows=made)


def _errors_of_sets(ratios: dict[Cell, Number]) -> Text:
    """The errors on fitted and on held-out cells."""
    fit, held = ([ratio for cell, ratio in ratios.items() if cell.fitted == chosen] for chosen in (True, False))
    of_fit = {"fit": count(fit), "fit_median": cells.median_error(fit), "fit_most": cells.largest_error(fit)}
    of_held = {"held": count(held), "median": cells.median_error(held), "most": cells.largest_error(held)}
    return words("mesh.errors", **of_fit, **of_held, near=count(held, lambda ratio: abs(ratio - 1) <= 0.1))


SHARE = 0.1
"""A time or a ratio counts as reproduced within this share, about the median error on held-out cells."""
BOUNDS = {"%": f"{POINTS:g} points", "x": f"{SHARE:.0%}", "s": f"{SHARE:.0%}", "chunks": "exactly"}


def our_claims(runs: Runs) -> dict[str, tuple[str, Number]]:
    """Our value of each claim and how it was obtained, by the start of the claim."""
    by_claim = {claim: ("fitted cluster", x) for claim, x in (_speedups(runs) | scaling(runs) | waiting(runs)).items()}
    by_claim |= {claim: ("our tiles", number) for claim, number in three_ways(runs)["our tiles"].items()}
    return by_claim | {claim: ("counted", number) for claim, number in nine_gpus().items()}


def _speedups(runs: Runs) -> dict[str, Number]:
    records = cells.cell_records(runs, [cell for cell in paper_s() if cell.gpus == 256])
    times = {cell: cells.seconds(record) for cell, record in records.items()}
    gains = [times[replace(cell, method="ring")].over(times[cell]) for cell in times if cell.method == "mesh"]
    return {f"speedup over ring, 256 GPUs, {name}": of(gains) for name, of in (("maximum", most), ("average", mean))}


def reproduced(ours: float, paper: float, unit: str) -> bool:
    """Whether ours is within the bound for its unit."""
    if unit == "%":
        return abs(ours - paper) <= POINTS
    return ours == paper if unit == "chunks" else abs(ours / paper - 1) <= SHARE


def claims(runs: Runs) -> Section:
    """All claims with a unit."""
    ours, (_, *other_tiles) = our_claims(runs), three_ways(runs).items()
    table, numbers = [], []
    verdicts: dict[str, list[bool]] = {}
    for row in (row for row in rows("mesh_claims") if row["unit"]):
        claim, unit, paper = row["claim"], row["unit"], cells.stated(row["claim"])
        (start,) = (start for start in ours if claim.startswith(start) or claim.endswith(start))
        ways = [ours[start], *((name, theirs[start]) for name, theirs in other_tiles if start in theirs)]
        verdicts[claim] = [reproduced(value.known, paper.known, unit) for _, value in ways]
        numbers += [ours[start][1], paper]
        for (name, value), good in zip(ways, verdicts[claim], strict=True):
            word = "reproduced" if good else "not reproduced"
            table.append([claim, row["where"], unit, paper, value, value.over(paper), name, BOUNDS[unit], word])
    good = sum(first for first, *_ in verdicts.values())
    values = {"good": tally(good, numbers), "all": tally(len(verdicts), numbers)}
    return section(
        "mesh.claims",
        **values,
        explained=tally(sum(map(any, verdicts.values())) - good, numbers),
        missed="; ".join(claim for claim, ways in verdicts.items() if not any(ways)) or "nothing",
        rows=table,
    )
