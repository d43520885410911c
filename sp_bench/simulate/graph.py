"""From a plan to the task graph of all its ranks.

Blocks and folds between two waits or two sends are one task (a segment) on each rank, so that n blocks on n ranks
don't become n * n tasks. A Pass is one flow from each rank. Tasks of one segment or Pass are numbered by rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sp_bench.errors import RequestError
from sp_bench.plan import BLOCKS, Attend, AttendBackward, Chunk, Dataflow, Fold, Join, Pass, Plan, Problem, dataflow
from sp_bench.simulate.cluster import Cluster
from sp_bench.simulate.flows import TaskGraph

MAX_TASKS = 12_000_000
"""What fits a few GB of memory."""


@dataclass(eq=False)
class Segment:
    """Blocks and folds that run without a wait between them."""

    ops: list[int] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    """The last Pass of each lane that it waits for."""


@dataclass(frozen=True)
class PlanGraph:
    """The task graph of a plan, and which tasks are which."""

    tasks: TaskGraph
    items: tuple[Segment | int, ...]
    """Item i is the n tasks from i * n: a segment, or a Pass by its index in the plan."""
    busy_s: np.ndarray
    """Seconds that each rank computes: (n,)."""


def build_graph(plan: Plan, problem: Problem, cluster: Cluster) -> PlanGraph:
    """The task graph of every rank's plan on that cluster."""
    return _Builder(plan, problem, cluster).build()


def segments(plan: Plan, flow: Dataflow) -> dict[int, Segment]:
    """The segments of a plan, by the index of their first operation."""
    awaited = {index for waits in flow.waits for stream, index in waits if stream == BLOCKS}
    found: dict[int, Segment] = {}
    current: Segment | None = None
    satisfied: dict[str, int] = {}
    for index, op in plan:
        if isinstance(op, Pass):
            continue
        new = {lane: last for lane, last in flow.waits[index] if last > satisfied.get(lane, -1)}
        if current is None or new:
            current = found[index] = Segment(waits=new)
            satisfied |= new
        current.ops.append(index)
        if index in awaited:
            current = None
    return found


class _Builder:
    def __init__(self, plan: Plan, problem: Problem, cluster: Cluster) -> None:
        self.plan, self.problem, self.cluster = plan, problem, cluster
        self.flow = dataflow(plan)
        self.ranks = np.arange(problem.n)
        self.block_s = cluster.block_s(problem, plan.phase)
        self.owners: dict[Chunk, np.ndarray] = {}
        self.item_of: dict[int, int] = {}
        """The item that an operation belongs to."""

    def build(self) -> PlanGraph:
        n, starts = self.problem.n, segments(self.plan, self.flow)
        items: list[Segment | int] = []
        for index, op in self.plan:
            if isinstance(op, Pass):
                self.item_of[index] = len(items)
                items.append(index)
            elif index in starts:
                self.item_of |= dict.fromkeys(starts[index].ops, len(items))
                items.append(starts[index])
        if n * len(items) > MAX_TASKS:
            raise RequestError(
                f"gpus={n}",
                f"this plan has {n * len(items):,} transfers and runs of blocks; at most {MAX_TASKS:,} are simulated",
                "fewer GPUs, or a method with fewer steps, would work",
            )
        outputs, last = self.plan.outputs, next(item for item in reversed(items) if isinstance(item, Segment))
        delays, sizes, paths, deps = [], [], [], []
        busy_s, previous = np.zeros(n), {}
        for number, item in enumerate(items):
            if isinstance(item, Segment):
                seconds = self._segment_s(item)
                if item is last:
                    seconds = seconds + sum(self.cluster.cast_s(self.problem, x.tensor, wire=False) for x in outputs)
                busy_s += seconds
                delays.append(seconds)
                sizes.append(np.zeros(n))
                paths.append(np.full((n, 2), -1))
                deps.append(self._segment_deps(item, previous.get(BLOCKS)))
                previous[BLOCKS] = number
            else:
                op = self.plan.ops[item]
                assert isinstance(op, Pass) and op.send
                latency_s, path = self._path(op)
                # The lane casts what it sends before it posts it.
                delays.append(latency_s + self.cluster.cast_s(self.problem, op.send.tensor, wire=True))
                sizes.append(np.full(n, float(self.problem.chunk_bytes(op.send.tensor, wire=True))))
                paths.append(path)
                deps.append(self._pass_deps(item, op, previous.get(op.lane)))
                previous[op.lane] = item
        return PlanGraph(self._task_graph(delays, sizes, paths, deps), tuple(items), busy_s)

    def _segment_s(self, segment: Segment) -> np.ndarray:
        """What a segment costs each rank: (n,)."""
        seconds = np.zeros(self.problem.n)
        for index in segment.ops:
            op = self.plan.ops[index]
            if isinstance(op, Join):
                continue
            if isinstance(op, Fold):
                seconds += self.cluster.fold_s(self.problem, op.into.tensor, arriving=True)
                continue
            assert isinstance(op, Attend | AttendBackward)
            order = np.sign(self._owner(op.q) - self._owner(op.kv)) + 1
            seconds += self.block_s[order]
            computed = self.block_s[order] > 0
            for chunk in op.writes:
                first = self.flow.starts(index, chunk)
                seconds += computed * self.cluster.fold_s(self.problem, chunk.tensor, first=first)
        return seconds

    def _owner(self, chunk: Chunk) -> np.ndarray:
        if chunk not in self.owners:
            self.owners[chunk] = chunk.owner(self.ranks)
        return self.owners[chunk]

    def _path(self, op: Pass) -> tuple[np.ndarray, np.ndarray]:
        """The latency of each rank's flow, (n,), and the two links it crosses, (n, 2): the sender's, the receiver's."""
        n, target = self.problem.n, op.target(self.ranks)
        inter = self.cluster.node_of(self.ranks) != self.cluster.node_of(target)
        latency_s = np.where(inter, self.cluster.inter.latency_s, self.cluster.intra.latency_s)
        out = np.where(inter, 2 * n, 0) + self.ranks
        into = np.where(inter, 3 * n, n) + target
        return latency_s, np.stack([out, into], axis=1)

    def _link_rates(self) -> np.ndarray:
        """Four links for each GPU: its switch port out and in, its NIC out and in."""
        n, intra, inter = self.problem.n, self.cluster.intra.bytes_per_s, self.cluster.inter.bytes_per_s
        return np.concatenate([np.full(2 * n, float(intra)), np.full(2 * n, float(inter))])

    def _tasks(self, index: int) -> np.ndarray:
        """The tasks of an operation, by rank: (n,)."""
        return self.item_of[index] * self.problem.n + self.ranks

    def _ended(self, index: int) -> list[np.ndarray]:
        """The tasks that must end before an operation has ended on each rank: [(n,), ...]."""
        op, tasks = self.plan.ops[index], self._tasks(index)
        return [tasks, tasks[op.source(self.ranks)]] if isinstance(op, Pass) else [tasks]

    def _segment_deps(self, segment: Segment, previous: int | None) -> np.ndarray:
        deps = [] if previous is None else [previous * self.problem.n + self.ranks]
        for index in segment.waits.values():
            deps += self._ended(index)
        return self._columns(deps)

    def _pass_deps(self, index: int, op: Pass, previous: int | None) -> np.ndarray:
        """A flow starts when both its ends have posted: each when its own waits are over."""
        ends = [] if previous is None else self._ended(previous)
        for _, other in self.flow.waits[index]:
            ends += self._ended(other)
        target = op.target(self.ranks)
        return self._columns([*ends, *(tasks[target] for tasks in ends)])

    def _columns(self, deps: list[np.ndarray]) -> np.ndarray:
        return np.stack(deps, axis=1) if deps else np.empty((self.problem.n, 0), np.int64)

    def _task_graph(self, delays, sizes, paths, deps) -> TaskGraph:
        n = self.problem.n
        path_links = np.concatenate(paths).ravel()
        dep_counts = np.concatenate([np.full(n, dep.shape[1]) for dep in deps])
        path_counts = np.concatenate([np.where(path[:, 0] < 0, 0, 2) for path in paths])
        flow_bytes = np.concatenate(sizes)
        return TaskGraph(
            delay_s=np.concatenate(delays),
            flow_bytes=flow_bytes,
            path_start=np.concatenate(([0], np.cumsum(path_counts))),
            path_links=path_links[path_links >= 0],
            dep_start=np.concatenate(([0], np.cumsum(dep_counts))),
            dep_tasks=np.concatenate([dep.ravel() for dep in deps]),
            rate_cap=np.full(flow_bytes.size, np.inf),
            link_bytes_per_s=self._link_rates(),
        )
