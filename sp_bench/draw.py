"""Draw plans and timelines as text: assignment matrices, the steps of a rank's tile, bars over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sp_bench.plan.block_classes import block_classes
from sp_bench.plan.ops import Block, Join, Plan
from sp_bench.plan.problem import Problem

SHADES = " ░▒▓█"


def timeline(spans: Iterable[tuple[str, float, float]], end_s: float, width: int) -> dict[str, str]:
    """A text bar of `width` columns, from 0 to end_s, for each stream of (stream, start_s, end_s) spans.

    A column's shade is the fraction of its time that the stream was busy.
    """
    busy: dict[str, list[float]] = {}
    column_s = end_s / width if end_s > 0 else 1.0
    for stream, start_s, stop_s in spans:
        columns = busy.setdefault(stream, [0.0] * width)
        first, last = int(start_s / column_s), min(int(stop_s / column_s), width - 1)
        for i in range(first, last + 1):
            columns[i] += max(0.0, min(stop_s, (i + 1) * column_s) - max(start_s, i * column_s)) / column_s
    return {stream: "".join(_shade(share) for share in columns) for stream, columns in busy.items()}


def chrome_trace(spans: Iterable[tuple[int, str, str, float, float]]) -> dict[str, Any]:
    """A Chrome trace, for Perfetto, of (rank, stream, label, start_s, end_s) spans, with a track for each stream.

    The trace's times are in microseconds. Rank -1 stands for all ranks.
    """
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[int, str], int] = {}
    for rank, stream, label, start_s, end_s in spans:
        track = tracks.setdefault((rank, stream), len(tracks))
        times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
        events.append({"ph": "X", "name": label, "pid": rank + 1, "tid": track, **times})
    for (rank, stream), track in tracks.items():
        names = {"process_name": "all ranks" if rank < 0 else f"rank {rank}", "thread_name": stream}
        events += [
            {"ph": "M", "name": kind, "pid": rank + 1, "tid": track, "args": {"name": name}}
            for kind, name in names.items()
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def shares(parts: Sequence[tuple[str, float]], width: int) -> str:
    """A text bar of `width` columns, divided among (character, amount) parts in proportion."""
    total = sum(amount for _, amount in parts) or 1.0
    bar, upto = "", 0.0
    for character, amount in parts:
        upto += amount
        bar += character * (round(width * upto / total) - len(bar))
    return bar


def _shade(share: float) -> str:
    return SHADES[min(len(SHADES) - 1, max(0, round(share * (len(SHADES) - 1))))]


def assignment(plan: Plan, problem: Problem) -> np.ndarray:
    """The assignment matrix, (query chunks, key chunks): the rank that computes each block; -1 if none does.

    A block of packed documents in which no query sees a key has -1 too.

    If several ranks split the heads of a block, it has the lowest of them.
    """
    degree = problem.layout.head_parallel
    ranks, matrix = np.arange(0, plan.n, degree), np.full((plan.n // degree, plan.n // degree), -1)
    classes = block_classes(plan, problem)
    for index, op in plan:
        for row, block in enumerate(op.blocks, classes.first[index]) if isinstance(op, Block) else ():
            computing = ranks if classes.nothing is None else ranks[classes.of[row, ranks] != classes.nothing]
            matrix[block.q.owner(computing) // degree, block.kv.owner(computing) // degree] = computing
    if not problem.mask.sends_unseen:
        matrix[np.asarray(problem.blocks.pairs).reshape(matrix.shape) == 0] = -1
    return matrix


def block_steps(plan: Plan) -> np.ndarray:
    """The step of each block of a rank's tile, (head slices, local queries, local keys); -1 for blocks outside it."""
    blocks = [
        (block, step)
        for op, step in zip(plan.ops, plan.steps, strict=True)
        if isinstance(op, Block)
        for block in op.blocks
    ]
    where = [(op.q.heads, op.q.index, op.kv.index) for op, _ in blocks]
    steps = np.full([1 + max(indices) for indices in zip(*where, strict=True)], -1)
    for place, (_, step) in zip(where, blocks, strict=True):
        steps[place] = step
    return steps


def grid(matrix: np.ndarray, row_name: str, column_name: str) -> str:
    """A matrix of small integers as text, with row and column indices; -1 is shown as a dot."""
    width = max(3, len(str(matrix.max())) + 1, len(str(max(matrix.shape))) + 1)
    head = f"{row_name:>8} \\ {column_name:<4}" + "".join(f"{v:>{width}}" for v in range(matrix.shape[1]))
    lines = [
        f"{u:>8}   " + " " * 4 + "".join(f"{value if value >= 0 else '.':>{width}}" for value in row)
        for u, row in enumerate(matrix)
    ]
    return "\n".join((head, *lines))


def steps(plan: Plan) -> list[str]:
    """A rank's program as text, a line for each step."""
    by_step: dict[int, list[str]] = {}
    for op, step in zip(plan.ops, plan.steps, strict=True):
        if not isinstance(op, Join):
            by_step.setdefault(step, []).append(str(op))
    return [f"step {step:>3}: {'; '.join(ops)}" for step, ops in by_step.items()]
