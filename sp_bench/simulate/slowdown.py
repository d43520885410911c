"""Blocks that transfers slow down: on a GPU, the network's kernels use the same device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sp_bench.simulate.plan_graph import PlanGraph
from sp_bench.simulate.task_graph import TaskGraph, Timing


def slowed_by_transfers(graph: PlanGraph, timing: Timing, slowdown: float) -> TaskGraph:
    """The graph with the delays that its blocks have if transfers run when `timing` says.

    A rank's blocks take 1 + `slowdown` times as long while it sends.
    """
    q, work = graph.quotient.ranks.size, getattr(graph.tasks, graph.work).copy()
    starts, ends = (x.reshape(-1, q) for x in (timing.start_s, timing.finish_s))
    blocks, flows = graph.rows_of(blocks=True), graph.rows_of(blocks=False)
    moving = graph.tasks.flow_bytes.reshape(-1, q) > 0
    by_row = work.reshape(-1, q)
    by_row /= graph.work_per_s
    for rank in range(q):
        sends = flows[moving[flows, rank]]
        times, progress = _progress(starts[sends, rank], ends[sends, rank], 1 / (1 + slowdown))
        begun = starts[blocks, rank]
        done = np.interp(begun, times, progress) + by_row[blocks, rank]
        # Beyond the last transfer blocks run at full speed.
        finished = np.where(done > progress[-1], times[-1] + done - progress[-1], np.interp(done, progress, times))
        alone = by_row[blocks, rank]
        # Never shorter than alone, which rounding could make it.
        by_row[blocks, rank] = np.where(begun >= times[-1], alone, np.maximum(finished - begun, alone))
    by_row *= graph.work_per_s
    return replace(graph.tasks, **{graph.work: work})


def _progress(starts: np.ndarray, ends: np.ndarray, speed: float) -> tuple[np.ndarray, np.ndarray]:
    """A rank's work done over time, at that speed while any of its transfers is under way: (times, work done)."""
    edges = np.concatenate(([0.0], starts, ends))
    order = np.argsort(edges, kind="stable")
    times = edges[order]
    change = np.concatenate(([0], np.ones_like(starts), -np.ones_like(ends)))[order]
    under_way = np.cumsum(change)[:-1] > 0
    steps = np.diff(times) * np.where(under_way, speed, 1.0)
    return times, np.concatenate(([0.0], np.cumsum(steps)))
