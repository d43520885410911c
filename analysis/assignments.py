"""Pictures of assignment matrices: which rank computes each block, at which of its steps, and at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap
from matplotlib.ticker import EngFormatter, MaxNLocator

from sp_bench import draw, methods
from sp_bench.analysis.figure import Figure, labelled, new_figure
from sp_bench.analysis.frames import named
from sp_bench.analysis.number import Source, formula, record_source
from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError, unknown
from sp_bench.plan.mask import mask_named
from sp_bench.plan.method import Method
from sp_bench.plan.ops import Attend, AttendBackward, Plan
from sp_bench.plan.problem import Problem
from sp_bench.records import Record

BY = ("rank", "step", "cost")
TITLES = {"rank": "by rank", "step": "by step", "cost": "by cost"}
MOST_NUMBERED, MOST_OUTLINED = 16, 64
"""Wider matrices have no numbers in their blocks, or no lines around a rank's blocks."""
COLOURS = "cividis"
"""Ordered in lightness, so that it holds in grey and for the colour-blind."""
PANEL = 3.2
"""Inches."""


@dataclass(frozen=True)
class Matrix:
    """A value for each block, NaN for those that no rank computes: (Q chunks, KV chunks)."""

    values: np.ndarray
    label: str
    """What it is, in what unit, and what kind of number."""
    whole: bool = True
    """Whether values are small whole numbers."""


def assignment(
    plan: Plan,
    problem: Problem,
    by: str | Sequence[str] = "rank",
    *,
    name: str,
    title: str,
    cluster: Cluster | None = None,
    source: Source | None = None,
) -> Figure:
    """The assignment matrix by rank, step or cost, or several of them side by side.

    `problem` is as the method deals it out. The cost of a block is its (query, key) pairs under the mask or, with a
    cluster, its seconds there. Raises RequestError for another `by`.
    """
    chosen = (by,) if isinstance(by, str) else tuple(by)
    canvas, axes = new_figure(len(chosen), width=PANEL * len(chosen), height=PANEL + 0.5)
    owners = draw.assignment(plan, problem)
    for ax, one in zip(axes[0], chosen, strict=True):
        _panel(ax, matrix(plan, problem, one, cluster), owners)
        ax.set_title(f"{TITLES[one]}, {plan.phase}", fontsize="medium")
        ax.set_xlabel(f"KV chunk ({problem.block_tokens:,} tokens each)")
    axes[0, 0].set_ylabel(f"Q chunk ({problem.block_tokens:,} tokens each)")
    degree = problem.layout.head_parallel
    note = f"Of {degree} ranks that split a block's heads, the lowest is shown. " if degree > 1 else ""
    note += "White blocks are computed by no rank." if (owners < 0).any() else ""
    counted = formula("assignment-matrix", "the rank, the step and the pairs of each block", "sp_bench.draw")
    return Figure(name, title, canvas, (source or counted,), note.strip())


def matrix(plan: Plan, problem: Problem, by: str, cluster: Cluster | None = None) -> Matrix:
    """The values of one picture. Raises RequestError for another `by`."""
    if by not in BY:
        raise unknown("by", by, BY)
    owners = draw.assignment(plan, problem)
    if by == "rank":
        return Matrix(np.where(owners < 0, np.nan, owners), labelled("rank", "computed"))
    if by == "step":
        return Matrix(_steps(plan, problem), labelled("step", "computed"))
    if cluster:
        costs, label = 1e3 * cluster.device.block_s(problem, plan.phase), labelled("ms for a block", "simulated")
    else:
        costs = np.array(problem.blocks.pairs)
        label = labelled("query-key pairs for a head", "computed")
    ranks = np.arange(0, problem.n, problem.layout.head_parallel)
    found = costs[problem.blocks.of(ranks[:, None], ranks)]
    return Matrix(np.where(owners < 0, np.nan, found), label, whole=False)


def _steps(plan: Plan, problem: Problem) -> np.ndarray:
    """At which step its rank computes each block; the last one where it takes the heads in slices."""
    degree = problem.layout.head_parallel
    ranks, found = np.arange(0, plan.n, degree), np.full((plan.n // degree, plan.n // degree), np.nan)
    for op, step in zip(plan.ops, plan.steps, strict=True):
        if isinstance(op, Attend | AttendBackward):
            found[op.q.owner(ranks) // degree, op.kv.owner(ranks) // degree] = step
    return found


def _panel(ax: Axes, shown: Matrix, owners: np.ndarray) -> None:
    values, size = shown.values, len(shown.values)
    image = ax.imshow(values, cmap=COLOURS, interpolation="nearest", vmin=0, vmax=np.nanmax(values) or 1)
    ax.grid(visible=False)
    ticks = np.arange(0, size, max(1, -(-size // 8)))
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    figure = ax.get_figure()
    assert figure is not None
    ticks_of_bar, thousands = MaxNLocator(5, integer=shown.whole), EngFormatter(sep="")
    bar = figure.colorbar(image, ax=ax, location="bottom", shrink=0.9, label=shown.label, ticks=ticks_of_bar)
    if np.nanmax(values) >= 1000:
        bar.formatter = thousands
    if size <= MOST_OUTLINED:
        _outline(ax, owners)
    if shown.whole and size <= MOST_NUMBERED:
        _number(ax, values, image.get_cmap())


def _outline(ax: Axes, owners: np.ndarray) -> None:
    """Lines between blocks of different ranks."""
    rows, columns = np.nonzero(owners[:, 1:] != owners[:, :-1])
    lines = [((c + 0.5, r - 0.5), (c + 0.5, r + 0.5)) for r, c in zip(rows, columns, strict=True)]
    rows, columns = np.nonzero(owners[1:] != owners[:-1])
    lines += [((c - 0.5, r + 0.5), (c + 0.5, r + 0.5)) for r, c in zip(rows, columns, strict=True)]
    ax.add_collection(LineCollection(lines, colors="white", linewidths=min(0.7, 12 / len(owners))))


def _number(ax: Axes, values: np.ndarray, colours: Colormap) -> None:
    """Each block's value in it, dark on light and light on dark."""
    high = np.nanmax(values) or 1
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            light = np.dot(colours(value / high)[:3], (0.299, 0.587, 0.114)) > 0.5
            ax.text(column, row, f"{value:.0f}", ha="center", va="center", size=6, color="black" if light else "white")


def of_record(record: Record, phase: str = "forward", by: Sequence[str] = BY) -> Figure:
    """The pictures of one phase of a record's plan, made again from what was asked for.

    Costs are simulated where the record is, else pairs. Raises RequestError where this code has no such plan.
    """
    config = record.config or {}
    cluster, problem = Cluster.build(config["cluster"]), _problem(record)
    method = _variant(record, problem)
    plan = method.plan(problem, phase, cluster.profile(problem))
    return assignment(
        plan,
        method.dealt(problem),
        by,
        name=f"{record.run_id}-assignment-{phase}",
        title=f"Assignment matrix of {named(record)} on {record.gpus} GPUs, {phase}",
        cluster=cluster if record.mode == "simulate" else None,
        source=record_source(record),
    )


def _problem(record: Record) -> Problem:
    keys = ("seqlen", "batch", "heads", "kv_heads", "head_dim", "dtype", "wire_dtype")
    mask = mask_named(record.mask)
    return Problem(
        n=record.gpus, mask=mask, layout=mask.layout(record.layout or ""), **{key: getattr(record, key) for key in keys}
    )


def _variant(record: Record, problem: Problem) -> Method:
    """The variant of the method that ran."""
    asked = (record.config or {})["method"]
    method = methods.build(asked["name"], {key: value for key, value in asked.items() if key != "name"})
    variants = {one.variant(problem.n): one for one in method.candidates(problem)}
    if (name := record.variant or "") not in variants:
        known = ", ".join(variants)
        raise RequestError(
            f"{record.run_id}: {record.method} {name}", "this code has no such variant", f"known: {known}"
        )
    return variants[name]
