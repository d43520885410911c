"""Tables 2, 3 and 4 of the Mesh-Attention paper: volumes by formula, throughput, MFU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from sp_bench import account
from sp_bench.analysis.number import Number, computed, count, derived, formula, of_record
from sp_bench.analysis.paper_tables import of_paper, rows
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies.mesh import cells
from sp_bench.analysis.studies.mesh.paper import Cell, fitted, implied_peak_tflops
from sp_bench.analysis.studies.mesh.scaling import paper_seconds
from sp_bench.analysis.table import Table, columns
from sp_bench.describe import PaperVolume, Volumes, counted_volumes
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Q

TABLE2 = "mesh_table2_comm_volume"
COUNTED = formula(
    "mesh-counted-volume",
    "payload that ranks send in the forward plans, lse apart, in units of N * d, full attention, for the variant that"
    " sends least",
    "sp_bench.account.volume",
)
EXACT = 1e-12
"""Volumes in units of N * d that differ by less count as equal."""


def table2(_: Runs | None = None) -> Section:
    """Forward volumes: the formulas as printed, and counted from the plans."""
    made, gaps = [], []
    for row in rows(TABLE2):
        expression = row["per_gpu_forward_volume_in_units_of_N_d"]
        for n in (16, 64, 256):
            found = _counted(row["method"], expression, n)
            paper = of_paper(found.paper, TABLE2)
            mean, busiest = (computed(value, COUNTED) for value in (found.mean, found.busiest))
            gaps.append(derived(lambda ours, theirs: ours - theirs, busiest, paper))
            made.append([row["method"], expression, n, found.variant, paper, mean, busiest, gaps[-1]])
    heads = columns(
        "method; formula; GPUs; variant; by formula | N d | .6f; counted, mean of ranks | N d | .6f;"
        " counted, busiest rank | N d | .6f; busiest rank - formula"
    )
    exact = count(gaps, lambda gap: abs(gap) < EXACT)
    about = text(
        "Computed: volumes are counted from the plans of all ranks. Those of the busiest rank equal the formula in"
        " {exact:.0f} of {all:.0f} rows: {verdict}. The paper has two formulas for StarTrail. The one in the table is"
        " the sum of its four stages. A rank that exchanges its KV at the start sends this; one rank in C has its KV"
        " already, so the mean is 2/n lower. The text's own sum, (4C-1)/n + 2/C, is 3/n above the table's and holds for"
        " no rank.",
        exact=exact,
        all=count(gaps),
        verdict="reproduced" if exact.known == len(gaps) else "not reproduced",
    )
    values = Table("mesh-table2", "Forward volume per GPU", heads, made)
    return Section("Table 2: communication volume", about, values, _nine_gpus())


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


def _nine_gpus() -> Table:
    stated = [row["claim"] for row in rows("mesh_claims")]
    made = []
    for claim, ours in nine_gpus().items():
        paper = next(cells.stated(start) for start in stated if start.endswith(claim))
        made.append([claim, paper, ours, ours.over(paper)])
    heads = columns("what 9 GPUs send; paper | chunks; ours | chunks; ours / paper's || .2f")
    return Table("mesh-nine-gpus", "The example of section 1: what all 9 GPUs send, forward", heads, made)


def table3(runs: Runs) -> Section:
    """Throughput, and Mesh's speedup over Ring."""
    paper = {cell: value for cell, (value,) in cells.printed(3).items()}
    found = cells.cell_records(runs, paper)
    ours = {cell: cells.throughput(record) for cell, record in found.items()}
    made, speedups = [], []
    for cell, value in paper.items():
        compared = [value, ours[cell], ours[cell].over(value)]
        made.append([*cells.key(cell), found[cell].variant or "", cells.which(cell), *compared])
    for mesh in (cell for cell in paper if cell.method == "mesh"):
        ring = replace(mesh, method="ring")
        theirs, mine = paper[mesh].over(paper[ring]), ours[mesh].over(ours[ring])
        speedups.append([*cells.key(mesh)[:3], cells.which(mesh), theirs, mine, mine.over(theirs)])
    heads = columns(
        f"{cells.KEY}; tile; cell; paper | iterations in 100 s | .1f; ours | iterations in 100 s | .1f;"
        " ours / paper's || .2f"
    )
    speedup_heads = columns("causal; seqlen; GPUs; Mesh's cell; paper | x | .2f; ours | x | .2f; ours / paper's || .2f")
    return Section(
        "Table 3: throughput",
        _errors_of_sets({cell: paper[cell].over(ours[cell]) for cell in paper}, f"{cells.ABOUT_TIMES} Times:"),
        Table("mesh-table3", "Throughput, forward + backward", heads, made, shown_rows=24),
        text(
            "Mesh is faster than Ring in {faster:.0f} of {pairs:.0f} pairs, and in {theirs:.0f} in the paper.",
            theirs=count((row[4] for row in speedups), lambda ratio: ratio > 1),
            faster=count((row[5] for row in speedups), lambda ratio: ratio > 1),
            pairs=count(row[5] for row in speedups),
        ),
        Table("mesh-speedup", "Mesh's speedup over Ring", speedup_heads, speedups, shown_rows=12),
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
    about = (
        "Simulated times over the peak of the cluster, {peak:.1f} TFLOP/s. No GPU is named, so the peak is the one that"
        " tables 3 and 4 imply together, the median of the fitted cells. The errors are those of table 3, and the"
        " rounding of low MFUs. MFUs:"
    )
    implied = formula(
        "mesh-implied-peak",
        "FLOPs / time of table 3 / MFU of table 4, median",
        "mesh.paper.implied_peak_tflops",
    )
    heads = columns(
        f"{cells.KEY}; cell of table 3; paper | % | .1f; ours | % | .1f; ours / paper's || .2f;"
        " peak implied by tables 3 and 4 | TFLOP/s | .0f"
    )
    note = "Where the implied peak is far from the others, the rounding is coarse or one of the tables is wrong."
    return Section(
        "Table 4: MFU",
        _errors_of_sets(ratios, about, peak=computed(implied_peak_tflops(fitted()), implied)),
        Table("mesh-table4", "MFU", heads, made, note, shown_rows=24),
    )


def _errors_of_sets(ratios: dict[Cell, Number], about: str, **more: Number) -> Text:
    """The errors on fitted and on held-out cells."""
    fit, held = ([ratio for cell, ratio in ratios.items() if cell.fitted == chosen] for chosen in (True, False))
    fit_median, fit_most = cells.median_and_most(fit)
    median, most = cells.median_and_most(held)
    return text(
        about + " the error on the {fit:.0f} fitted cells is {fit_median:.1f}% in the median and at most"
        " {fit_most:.1f}%. On the {held:.0f} held-out cells it is {median:.1f}% in the median and at most {most:.1f}%;"
        " ours is within 10% of the paper's in {near:.0f} of them.",
        fit=count(fit),
        fit_median=fit_median,
        fit_most=fit_most,
        held=count(held),
        median=median,
        most=most,
        near=count(held, lambda ratio: abs(ratio - 1) <= 0.1),
        **more,
    )
