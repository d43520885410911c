"""The work of each device in each round, counted from our plans (Striped Attention, figure 4 and section 3)."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np

from sp_bench import account
from sp_bench.analysis.figure import STYLE, Figure, new_figure
from sp_bench.analysis.number import computed, formula
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.section import Section, section
from sp_bench.analysis.studies.striped.model import LIMIT, WORK, attention_limit
from sp_bench.analysis.table import Cell
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
        f"methods/{name}.py, sp_bench/account/sent.py",
    )
    for name, label in NAMES.items()
}


def planned(name: str, n: int, block: int) -> tuple[Plan, Problem]:
    """The forward plan of ring on the paper's contiguous layout, or of striped, with one head."""
    layout = "contiguous" if name == "ring" else "striped"
    problem = Problem(n=n, seqlen=n * block, heads=1, kv_heads=1, head_dim=128, layout=LAYOUTS[layout])
    return build(name, {"layout": layout}).forward(problem, COMPUTE_BOUND), problem


def work_by_round(plan: Plan, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The (query, key) pairs that each device computes in each round, and the owner of the keys: (rounds, n) each."""
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
    """The pairs of query block i and key block j by the paper's masks and, for Striped, its formula (section 3)."""
    causal, strict = block * (block + 1) // 2, block * (block - 1) // 2
    if name == "striped":
        return np.where(i >= j, causal, strict)
    return np.where(i == j, causal, np.where(i > j, block * block, 0))


def as_the_paper(name: str, n: int, block: int) -> int:
    """The number of the plan's n x n blocks that have as many pairs as the paper says."""
    pairs, keys = work_by_round(*planned(name, n, block))
    return int((pairs == paper_work(name, np.arange(n), keys, block)).sum())


def work(_: Runs | None = None) -> Section:
    """Work(i, j) by device and round, the busiest device of each round, and the speedup that follows."""
    counted = {name: work_by_round(*planned(name, N, BLOCK))[0] for name in NAMES}
    ring, striped = counted["ring"], counted["striped"]
    busiest = {name: int(account.pairs(*planned(name, N, BLOCK)).max()) for name in NAMES}
    values = {"n": N, "block": BLOCK, "blocks": computed(N * N, *COUNTED.values())}
    values |= {"limit": computed(attention_limit(N), LIMIT), "figure": _figure(counted), "rows": _rows(counted)}
    return section(
        "striped.work",
        **values,
        full=computed(int((ring.max(axis=1) == BLOCK**2).sum()), COUNTED["ring"]),
        rounds=computed(len(ring), COUNTED["ring"]),
        least=computed(striped.min() / striped.max(), COUNTED["striped"]),
        exact=computed(busiest["ring"] / busiest["striped"], *COUNTED.values()),
        **{name: computed(as_the_paper(name, N, BLOCK), COUNTED[name], WORK) for name in NAMES},
    )


def _rows(counted: dict[str, np.ndarray]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    causal = BLOCK * (BLOCK + 1) // 2
    for step in range(N):
        pairs = [(pick(of[step]), COUNTED[name]) for name, of in counted.items() for pick in (np.max, np.min)]
        by_formula = [(causal if step == 0 else BLOCK * BLOCK, WORK), (causal, WORK)]
        rows.append([step, *(computed(float(value), source) for value, source in pairs + by_formula)])
    return rows


def _figure(counted: dict[str, np.ndarray]) -> Figure:
    canvas, axes = new_figure(2, height=3.3, sharey=True)
    with mpl.rc_context(STYLE):
        for axis, (name, pairs) in zip(axes[0], counted.items(), strict=True):
            shares = pairs.T / BLOCK**2
            axis.imshow(shares, cmap="Blues", vmin=0, vmax=1.35, origin="upper")
            for (device, step), share in np.ndenumerate(shares):
                colour = "white" if share > 0.8 else "black"
                axis.text(step, device, f"{share:.2g}", ha="center", va="center", fontsize=8, color=colour)
            axis.set(title=f"{NAMES[name]} (computed)", xlabel="round", xticks=range(N), yticks=range(N))
            axis.grid(visible=False)
        axes[0][0].set_ylabel("device")
    note = (
        f"Pairs over c squared, c = {BLOCK} tokens: 1 is a full block, 0.5 a causal one, 0 one that the mask removes."
    )
    title = "Work of each device in each round (the paper's figure 4, in numbers)"
    return Figure("striped-figure4", title, canvas, tuple(COUNTED.values()), note)
