"""Pictures of assignment matrices: the rank that computes each block, its step, and its cost."""

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
from sp_bench.plan.method import Method
from sp_bench.plan.ops import Attend, AttendBackward, Plan
from sp_bench.plan.problem import Problem
from sp_bench.point.given import SHAPE
from sp_bench.point.masks import mask_of
from sp_bench.point.variants import FUSED
from sp_bench.records import Record

BY = ("rank", "step", "cost")
TITLES = {"rank": "by rank", "step": "by step", "cost": "by cost"}
MOST_NUMBERED, MOST_OUTLINED = 16, 64
"""Blocks along a side up to which a matrix has numbers in its blocks, and lines around the blocks of a rank."""
COLOURS = "cividis"
"""A colour map that is ordered in lightness, for grey print and the colour-blind."""
PANEL = 3.2
"""The width of a panel in inches."""


@dataclass(frozen=True)
class Matrix:
    """A value for each block: (Q chunks, KV chunks). NaN where no rank computes the block."""

    values: np.ndarray
    label: str
    """The quantity with its unit and the kind of number."""
    whole: bool = True
    """Whether the values are small whole numbers."""


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

    `problem` is the one that the method assigns. The cost of a block is its number of (query, key) pairs under the
    mask or, with a cluster, its time there. Raises RequestError for another `by`.
    """
    chosen = (by,) if isinstance(by, str) else tuple(by)
    canvas, axes = new_figure(len(chosen), width=PANEL * len(chosen), height=PANEL + 0.5)
    owners = draw.assignment(plan, problem)
    for ax, one in zip(axes[0], chosen, strict=True):
        panel(ax, matrix(plan, problem, one, cluster), owners)
        ax.set_title(f"{TITLES[one]}, {plan.phase}", fontsize="medium")
        ax.set_xlabel(f"KV chunk ({problem.keys.largest:,} tokens each)")
    axes[0, 0].set_ylabel(f"Q chunk ({problem.queries.largest:,} tokens each)")
    degree = problem.layout.head_parallel
    note = f"Of {degree} ranks that split a block's heads, the lowest is shown. " if degree > 1 else ""
    note += "White blocks are computed by no rank." if (owners < 0).any() else ""
    counted = formula("assignment-matrix", "the rank, the step and the pairs of each block", "sp_bench.draw")
    return Figure(name, title, canvas, (source or counted,), note.strip())


def matrix(plan: Plan, problem: Problem, by: str, cluster: Cluster | None = None) -> Matrix:
    """The values of one panel. Raises RequestError if `by` is not one of BY."""
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
    costs_of_blocks = costs[problem.blocks.of(ranks[:, None], ranks)]
    return Matrix(np.where(owners < 0, np.nan, costs_of_blocks), label, whole=False)


def _steps(plan: Plan, problem: Problem) -> np.ndarray:
    """The step in which a rank computes each block; the last step if it computes the heads in slices."""
    degree = problem.layout.head_parallel
    ranks, step_of = np.arange(0, plan.n, degree), np.full((plan.n // degree, plan.n // degree), np.nan)
    for op, step in zip(plan.ops, plan.steps, strict=True):
        if isinstance(op, Attend | AttendBackward):
            step_of[op.q.owner(ranks) // degree, op.kv.owner(ranks) // degree] = step
    return step_of


def panel(ax: Axes, shown: Matrix, owners: np.ndarray) -> None:
    """Draw the values of each block, with lines between blocks of different `owners`: (Q chunks, KV chunks)."""
    values, size = shown.values, len(shown.values)
    image = ax.imshow(values, cmap=COLOURS, interpolation="nearest", vmin=0, vmax=np.nanmax(values) or 1)
    ax.grid(visible=False)
    ticks = np.arange(0, size, max(1, -(-size // 8)))
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    figure = ax.get_figure()
    assert figure is not None
    ticks_of_bar = MaxNLocator(5, integer=shown.whole)
    bar = figure.colorbar(image, ax=ax, location="bottom", shrink=0.9, label=shown.label, ticks=ticks_of_bar)
    if np.nanmax(values) >= 1000:
        bar.formatter = EngFormatter(sep="")
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
    """The value of each block, dark on light and light on dark."""
    high = np.nanmax(values) or 1
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            light = np.dot(colours(value / high)[:3], (0.299, 0.587, 0.114)) > 0.5
            ax.text(column, row, f"{value:.0f}", ha="center", va="center", size=6, color="black" if light else "white")


def of_record(record: Record, phase: str = "forward", by: Sequence[str] = BY) -> Figure:
    """The assignment matrices of one phase of a record's plan, which is built again from the record's request.

    Costs are simulated times if the record is simulated, else pairs. Raises RequestError if the code has no such plan.
    """
    plan, problem, cluster = planned(record, phase)
    return assignment(
        plan,
        problem,
        by,
        name=f"{record.run_id}-assignment-{phase}",
        title=f"Assignment matrix of {named(record)} on {record.gpus} GPUs, {phase}",
        cluster=cluster if record.mode == "simulate" else None,
        source=record_source(record),
    )


def planned(record: Record, phase: str) -> tuple[Plan, Problem, Cluster]:
    """The plan of one phase of a record's variant, the problem it assigns, and the cluster, by the record's request.

    Raises RequestError if the code has no such plan.
    """
    cluster, problem = Cluster.build((record.config or {})["cluster"]), _problem(record)
    method = _variant(record, problem)
    return method.plan(problem, phase, cluster.profile(problem)), method.assigned(problem), cluster


def _problem(record: Record) -> Problem:
    keys = (*SHAPE, "dtype", "wire_dtype")
    mask = mask_of(record.config or {}, record.seed or 0, record.seqlen, record.kv_seqlen)
    return Problem(
        n=record.gpus, mask=mask, layout=mask.layout(record.layout or ""), **{key: getattr(record, key) for key in keys}
    )


def _variant(record: Record, problem: Problem) -> Method:
    """The method in the variant of the record."""
    asked = (record.config or {})["method"]
    method = methods.build(asked["name"], {key: value for key, value in asked.items() if key != "name"})
    variants = {one.variant(problem.n): one for one in method.candidates(problem)}
    name = (record.variant or "").removesuffix(FUSED).rstrip()
    if name not in variants:
        known = ", ".join(variants)
        raise RequestError(
            f"{record.run_id}: {record.method} {name}", "this code has no such variant", f"known: {known}"
        )
    return variants[name]
