"""Tables 2, 3 and 4 of the Mesh-Attention paper: volumes by formula, throughput, MFU."""

from __future__ import annotations

from functools import cache

from sp_bench import account
from sp_bench.analysis.mesh_fit import Cell, fitted, implied_peak_tflops
from sp_bench.analysis.number import Number, derived, formula, of_paper, of_record
from sp_bench.analysis.paper_tables import rows
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, Text, text
from sp_bench.analysis.studies import mesh_cells as cells
from sp_bench.analysis.table import Column, Table
from sp_bench.describe import PaperVolume, Volumes, counted_volumes
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL
from sp_bench.plan.problem import Problem

TABLE2 = "mesh_table2_comm_volume.csv"
COUNTED = formula(
    "mesh-counted-volume",
    "payload that ranks send in the forward plans, lse apart, in units of N * d, full attention, for the variant that"
    " sends least",
    "sp_bench.account.volume",
)
EXACT = 1e-12


def table2() -> Section:
    """Volumes: the formulas as printed, and the plans counted."""
    made, gaps = [], []
    for row in rows("mesh_table2_comm_volume"):
        expression = row["per_gpu_forward_volume_in_units_of_N_d"]
        for n in (16, 64, 256):
            found = _counted(row["method"], expression, n)
            paper = of_paper(found.paper, TABLE2)
            mean, busiest = (Number(value, "computed", (COUNTED,)) for value in (found.mean, found.busiest))
            gaps.append(derived(lambda ours, theirs: ours - theirs, busiest, paper))
            made.append([row["method"], expression, n, found.variant, paper, mean, busiest, gaps[-1]])
    number = ".6f"
    head = [Column("method"), Column("formula"), Column("GPUs"), Column("variant"), Column("by formula", "N d", number)]
    head += [Column("counted, mean", "N d", number), Column("busiest", "N d", number), Column("busiest - formula")]
    exact = cells.count(gaps, lambda gap: abs(gap) < EXACT)
    word = "reproduced" if exact.known == len(gaps) else "not reproduced"
    about = text(
        "Computed: volumes are counted from the plans of all ranks. Of the busiest rank they equal the formula in"
        f" {{exact:.0f}} of {{all:.0f}} rows: {word}. Of StarTrail the paper has two formulas. The table's is what its"
        " four stages add up to, and what a rank sends that has to exchange its KV at the start; one rank in C has it"
        " already, so that the mean is 2/n below. The text's own sum, (4C-1)/n + 2/C, is 3/n above the table's and"
        " holds for no rank.",
        exact=exact,
        all=cells.count(gaps, lambda gap: True),
    )
    return Section(
        "Table 2: communication volume",
        [about, Table("mesh-table2", "Forward volume per GPU", head, made), _nine_gpus()],
    )


@cache
def _counted(method: str, expression: str, n: int) -> Volumes:
    return counted_volumes(PaperVolume(method, expression), n)


def nine_gpus() -> dict[str, Number]:
    """Section 1's example by claim: units that 9 GPUs send together, Ring, and 3 x 3 tiles without and with local Q-KV.

    Counted from plans; without the property, from the unrotated assignment: each GPU receives the Q (1 unit) and KV (2)
    chunks of its tile that it doesn't own, and sends the partial outputs of the two rows that aren't its own.
    """
    side, n = 3, 9
    foreign = 0
    for gpu in range(n):
        row, column = divmod(gpu, side)
        foreign += sum(side * row + i != gpu for i in range(side)) + 2 * sum(
            side * column + i != gpu for i in range(side)
        )
    source = formula("mesh-unrotated-units", "units of the unrotated 3 x 3 assignment, counted", "section 1, figure 1b")
    return {
        "ring total units of communication": _units("ring", n),
        "3x3 tiles without local Q-KV property": Number(foreign + n * (side - 1), "computed", (source,)),
        "3x3 tiles with local Q-KV property": _units("mesh", n),
    }


def _units(method: str, n: int) -> Number:
    problem = Problem(n=n, seqlen=2 * n, heads=n, kv_heads=n, head_dim=8, mask=FULL, layout=LAYOUTS["contiguous"])
    options = {"tile": [3, 3]} if method == "mesh" else {}
    plan = build(method, options).plan(problem, "forward", COMPUTE_BOUND)
    sent = n * account.volume(plan, problem).payload_bytes / problem.chunk_bytes("q", wire=True)
    return Number(sent, "computed", (COUNTED,))


def _nine_gpus() -> Table:
    made = []
    for claim, ours in nine_gpus().items():
        paper = next(cells.stated(start) for start in _starts() if start.endswith(claim))
        made.append([claim, paper, ours, ours.over(paper)])
    head = [Column("9 GPUs"), Column("paper", "chunks"), Column("ours", "chunks"), Column("ours / paper's", "", ".2f")]
    return Table("mesh-nine-gpus", "The example of section 1: what all 9 GPUs send, forward", head, made)


def _starts() -> list[str]:
    return [row["claim"] for row in rows("mesh_claims")]


def table3(runs: Runs) -> Section:
    """Throughput, and Mesh's speedup over Ring."""
    paper = cells.printed(3)
    found = cells.cell_records(runs, paper)
    ours = {cell: cells.throughput(record) for cell, record in found.items()}
    made = [
        [*cells.key(cell), found[cell].variant or "", cells.which(cell), value, ours[cell], ours[cell].over(value)]
        for cell, (value,) in paper.items()
    ]
    head = [*cells.KEY, Column("tile"), Column("cell"), Column("paper", "iterations in 100 s", ".1f")]
    head += [Column("ours", "iterations in 100 s", ".1f"), Column("ours / paper's", "", ".2f")]
    pairs = {cell: Cell(cell.causal, cell.seqlen, cell.gpus, "ring") for cell in paper if cell.method == "mesh"}
    speedups = []
    for mesh, ring in pairs.items():
        theirs, mine = paper[mesh][0].over(paper[ring][0]), ours[mesh].over(ours[ring])
        speedups.append([*cells.key(mesh)[:3], cells.which(mesh), theirs, mine, mine.over(theirs)])
    speedup_head = [*cells.KEY[:3], Column("Mesh's cell"), Column("paper", "x", ".2f"), Column("ours", "x", ".2f")]
    faster = [row[-2] for row in speedups if isinstance(row[-2], Number)]
    return Section(
        "Table 3: throughput",
        [
            _of_sets(
                {cell: value.over(ours[cell]) for cell, (value,) in paper.items()}, f"{cells.ABOUT_TIMES} Of times:"
            ),
            Table("mesh-table3", "Throughput, forward + backward", head, made, shown_rows=24),
            text(
                "Mesh is faster than Ring in {faster:.0f} of {pairs:.0f} pairs of ours, and in {theirs:.0f} of the"
                " paper's.",
                theirs=cells.count([row[-3] for row in speedups], lambda ratio: ratio > 1),
                faster=cells.count(faster, lambda ratio: ratio > 1),
                pairs=cells.count(faster, lambda ratio: True),
            ),
            Table(
                "mesh-speedup",
                "Mesh's speedup over Ring",
                [*speedup_head, Column("ours / paper's", "", ".2f")],
                speedups,
                shown_rows=12,
            ),
        ],
    )


def table4(runs: Runs) -> Section:
    """MFU."""
    paper = cells.printed(4)
    found = cells.cell_records(runs, paper)
    ours = {cell: of_record(record, "mfu").times(100) for cell, record in found.items()}
    made = [
        [*cells.key(cell), cells.which(cell), value, ours[cell], ours[cell].over(value)]
        for cell, (value,) in paper.items()
    ]
    head = [*cells.KEY, Column("cell of table 3"), Column("paper", "%", ".1f"), Column("ours", "%", ".1f")]
    about = (
        "Simulated times, over the peak of the cluster, {peak:.1f} TFLOP/s: what tables 3 and 4 imply together, the"
        " median of the fitted cells, since no GPU is named. What is left are table 3's errors and the rounding of low"
        " MFUs. Of MFUs:"
    )
    implied = formula(
        "mesh-implied-peak", "FLOPs / time of table 3 / MFU of table 4, median", "mesh_fit.implied_peak_tflops"
    )
    peak = Number(implied_peak_tflops(fitted()), "computed", (implied,))
    return Section(
        "Table 4: MFU",
        [
            _of_sets({cell: ours[cell].over(value) for cell, (value,) in paper.items()}, about, peak=peak),
            Table("mesh-table4", "MFU", [*head, Column("ours / paper's", "", ".2f")], made, shown_rows=24),
        ],
    )


def _of_sets(ratios: dict[Cell, Number], about: str, **more: Number) -> Text:
    """The errors on fitted and on held-out cells."""
    sets = {name: [ratio for cell, ratio in ratios.items() if cell.fitted == chosen] for name, chosen in SETS.items()}
    fit_median, fit_most = cells.median_and_most(sets["fitted"])
    median, most = cells.median_and_most(sets["held out"])
    return text(
        f"{about} error on the {{fit:.0f}} fitted cells: median {{fit_median:.1f}}%, at most {{fit_most:.1f}}%. On the"
        " {held:.0f} held-out cells: median {median:.1f}%, at most {most:.1f}%; ours is within 10% of the paper's in"
        " {near:.0f} of them.",
        fit=cells.count(sets["fitted"], lambda ratio: True),
        fit_median=fit_median,
        fit_most=fit_most,
        held=cells.count(sets["held out"], lambda ratio: True),
        median=median,
        most=most,
        near=cells.count(sets["held out"], lambda ratio: abs(ratio - 1) <= 0.1),
        **more,
    )


SETS = {"fitted": True, "held out": False}
