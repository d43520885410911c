"""What each device computes in each round, counted from our plans: figure 4 of Striped Attention, and its formula."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np

from sp_bench import account
from sp_bench.analysis.figure import STYLE, Figure, new_figure
from sp_bench.analysis.number import Number, formula
from sp_bench.analysis.section import Section, text
from sp_bench.analysis.studies.striped_model import LIMIT, WORK, attention_limit
from sp_bench.analysis.table import Column, Table
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.ops import Attend, Plan
from sp_bench.plan.problem import Problem

N, BLOCK = 8, 4096
NAMES = {"ring": "Ring, contiguous", "striped": "Striped"}
COUNTED = {
    name: formula(
        f"{name}-plan-work",
        f"(query, key) pairs of the blocks that the forward plan of {label} gives each rank in each step",
        f"methods/{name}.py, sp_bench/account.py",
    )
    for name, label in NAMES.items()
}


def planned(name: str, n: int, block: int) -> tuple[Plan, Problem]:
    """The forward plan of ring on the paper's contiguous layout, or of striped; one head."""
    layout = "contiguous" if name == "ring" else "striped"
    problem = Problem(n=n, seqlen=n * block, heads=1, kv_heads=1, head_dim=128, layout=LAYOUTS[layout])
    return build(name, {"layout": layout}).forward(problem, COMPUTE_BOUND), problem


def work_by_round(plan: Plan, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(pairs, keys): what each device computes in each round, and whose keys: (rounds, n) each."""
    devices = np.arange(problem.n)
    by_class = np.array(problem.blocks.pairs)
    rounds = max(plan.steps) + 1
    pairs, keys = np.zeros((rounds, problem.n), np.int64), np.full((rounds, problem.n), -1)
    for op, step in zip(plan.ops, plan.steps, strict=True):
        if isinstance(op, Attend):
            queries, keys[step] = op.q.owner(devices), op.kv.owner(devices)
            pairs[step] += by_class[problem.blocks.of(queries, keys[step])]
    return pairs, keys


def paper_work(name: str, i: np.ndarray, j: np.ndarray, block: int) -> np.ndarray:
    """Pairs of query block i and key block j by the paper's masks; Striped: the formula of section 3."""
    causal, strict = block * (block + 1) // 2, block * (block - 1) // 2
    if name == "striped":
        return np.where(i >= j, causal, strict)
    return np.where(i == j, causal, np.where(i > j, block * block, 0))


def as_the_paper(name: str, n: int, block: int) -> int:
    """How many of the n x n blocks of the plan have the work that the paper says."""
    pairs, keys = work_by_round(*planned(name, n, block))
    return int((pairs == paper_work(name, np.arange(n), keys, block)).sum())


def work() -> Section:
    """Work(i, j) by device and round, the rounds' busiest devices, and the limit that follows."""
    counted = {name: work_by_round(*planned(name, N, BLOCK))[0] for name in NAMES}
    equal = {name: Number(as_the_paper(name, N, BLOCK), "computed", (COUNTED[name], WORK)) for name in NAMES}
    busiest = {name: int(account.pairs(*planned(name, N, BLOCK)).max()) for name in NAMES}
    both = (COUNTED["ring"], COUNTED["striped"])
    exact = Number(busiest["ring"] / busiest["striped"], "computed", both)
    least = Number(counted["striped"].min() / counted["striped"].max(), "computed", (COUNTED["striped"],))
    full = Number(int((counted["ring"].max(axis=1) == BLOCK**2).sum()), "computed", (COUNTED["ring"],))
    blocks = Number(N * N, "computed", both)
    return Section(
        f"Work of each device in each round, {N} devices",
        [
            text(
                "Computed from our plans, no time in it. Of {blocks:.0f} blocks, {ring:.0f} of Ring's and {striped:.0f}"
                " of Striped's hold as many (query, key) pairs as the paper's masks and its formula for Work(i, j) say."
                " In {full:.0f} of Ring's {rounds:.0f} rounds some device has a full block, so that such a round"
                " takes as long as without a mask; Striped's least block is {least:.4%} of its largest. If the busiest"
                " device alone sets the time, Striped's attention is {exact:.4f} times as fast as Ring's; with large"
                " blocks that is 2 - 1/n = {limit:.4f}.",
                blocks=blocks,
                ring=equal["ring"],
                striped=equal["striped"],
                full=full,
                rounds=Number(len(counted["ring"]), "computed", (COUNTED["ring"],)),
                least=least,
                exact=exact,
                limit=Number(attention_limit(N), "computed", (LIMIT,)),
            ),
            _figure(counted),
            _table(counted),
        ],
    )


def _table(counted: dict[str, np.ndarray]) -> Table:
    rows = []
    for step in range(N):
        cells: list[Number | str | int] = [step]
        for name, pairs in counted.items():
            cells += [
                Number(float(value), "computed", (COUNTED[name],)) for value in (pairs[step].max(), pairs[step].min())
            ]
        causal = BLOCK * (BLOCK + 1) // 2
        cells += [
            Number(causal if step == 0 else BLOCK * BLOCK, "computed", (WORK,)),
            Number(causal, "computed", (WORK,)),
        ]
        rows.append(cells)
    names = ("Ring, busiest", "Ring, least", "Striped, busiest", "Striped, least")
    columns = [Column("round"), *(Column(name, "pairs", ".0f") for name in names)]
    columns += [Column(f"{name}, paper's formula", "pairs", ".0f") for name in ("Ring, busiest", "Striped, busiest")]
    return Table(
        "striped-work",
        f"Work of the busiest and the least busy device, {N} devices, blocks of {BLOCK} tokens",
        columns,
        rows,
    )


def _figure(counted: dict[str, np.ndarray]) -> Figure:
    canvas, axes = new_figure(2, height=3.3, sharey=True)
    with mpl.rc_context(STYLE):
        for axis, (name, pairs) in zip(axes[0], counted.items(), strict=True):
            shares = pairs.T / BLOCK**2
            axis.imshow(shares, cmap="Blues", vmin=0, vmax=1.35, origin="upper")
            for (device, step), share in np.ndenumerate(shares):
                axis.text(
                    step,
                    device,
                    f"{share:.2g}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if share > 0.8 else "black",
                )
            axis.set_title(f"{NAMES[name]} (computed)")
            axis.set_xlabel("round")
            axis.set_xticks(range(N))
            axis.set_yticks(range(N))
            axis.grid(False)
        axes[0][0].set_ylabel("device")
    note = (
        "Pairs over c squared, from the plans: 1 is a full block, 0.5 one that is masked by half, 0 one that is masked"
        f" away. c = {BLOCK} tokens."
    )
    title = "Work of each device in each round (the paper's figure 4, in numbers)"
    return Figure("striped-figure4", title, canvas, tuple(COUNTED.values()), note)
