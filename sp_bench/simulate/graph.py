"""From a plan to the task graph of all its ranks.

Blocks and folds between two waits or two sends are one task (a segment) on each rank, so that n blocks on n ranks
don't become n * n tasks. A message of a transfer is one flow from each rank. Tasks come in rows of n, by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sp_bench.errors import RequestError
from sp_bench.plan import (
    BLOCKS,
    FIELDS,
    AllToAll,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    Dataflow,
    Exchange,
    Fold,
    Group,
    Join,
    Plan,
    Problem,
    Transfer,
    by_heads,
    dataflow,
    is_partial,
    messages,
    peers,
)
from sp_bench.simulate.cluster import Cluster
from sp_bench.simulate.flows import TaskGraph
from sp_bench.simulate.topology import Routes

MAX_TASKS = 12_000_000
"""What fits a few GB of memory."""


@dataclass(eq=False)
class Segment:
    """Blocks and folds that run without a wait between them."""

    ops: list[int] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    """The last transfer of each lane that it waits for."""


@dataclass(frozen=True, eq=False)
class Item:
    """A segment, or a transfer by its index in the plan, and its rows of tasks: row r is the tasks from r * n on."""

    what: Segment | int
    rows: range


@dataclass(frozen=True)
class PlanGraph:
    """The task graph of a plan, and which tasks are which."""

    tasks: TaskGraph
    items: tuple[Item, ...]
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
        if isinstance(op, Transfer):
            continue
        new = {lane: last for lane, last in flow.waits[index] if last > satisfied.get(lane, -1)}
        if current is None or new:
            current = found[index] = Segment(waits=new)
            satisfied |= new
        current.ops.append(index)
        if index in awaited:
            current = None
    return found


@dataclass
class _Rows:
    """Rows of n tasks as they are added."""

    n: int
    delays: list[np.ndarray] = field(default_factory=list)
    sizes: list[np.ndarray] = field(default_factory=list)
    paths: list[np.ndarray] = field(default_factory=list)
    caps: list[np.ndarray] = field(default_factory=list)
    deps: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.none, self.uncapped = np.full((self.n, 1), -1), np.full(self.n, np.inf)

    def add(
        self,
        delay_s: np.ndarray | float,
        deps: Sequence[np.ndarray],
        flow_bytes: np.ndarray | float = 0.0,
        routes: Routes | None = None,
    ) -> np.ndarray:
        """Add a row: delays (n,), predecessors [(n,), ...], and for flows bytes (n,) and their routes.

        Returns its tasks by rank: (n,).
        """
        n, sizes = self.n, np.broadcast_to(np.asarray(flow_bytes, float), self.n)
        self.delays.append(np.broadcast_to(np.asarray(delay_s, float), n))
        self.sizes.append(sizes)
        self.paths.append(self.none if routes is None else np.where(sizes[:, None] > 0, routes.links, -1))
        self.caps.append(self.uncapped if routes is None else routes.rate_cap)
        self.deps.append(np.stack(deps, axis=1) if deps else np.empty((n, 0), np.int64))
        return (len(self.delays) - 1) * n + np.arange(n)

    def task_graph(self, link_bytes_per_s: np.ndarray) -> TaskGraph:
        """The finished graph."""
        path_counts = np.concatenate([(path >= 0).sum(axis=1) for path in self.paths])
        path_links = np.concatenate([path.ravel() for path in self.paths])
        dep_counts = np.concatenate([np.full(self.n, dep.shape[1]) for dep in self.deps])
        flow_bytes = np.concatenate(self.sizes)
        return TaskGraph(
            delay_s=np.concatenate(self.delays),
            flow_bytes=flow_bytes,
            path_start=np.concatenate(([0], np.cumsum(path_counts))),
            path_links=path_links[path_links >= 0],
            dep_start=np.concatenate(([0], np.cumsum(dep_counts))),
            dep_tasks=np.concatenate([dep.ravel() for dep in self.deps]),
            rate_cap=np.concatenate(self.caps),
            link_bytes_per_s=link_bytes_per_s,
        )


class _Builder:
    def __init__(self, plan: Plan, problem: Problem, cluster: Cluster) -> None:
        self.plan, self.problem, self.cluster = plan, problem, cluster
        self.flow = dataflow(plan)
        self.ranks = np.arange(problem.n)
        self.block_s = cluster.block_s(problem, plan.phase)
        self.owners: dict[Chunk, np.ndarray] = {}
        self.network = cluster.network(problem.n)
        self.routes: dict[tuple[Group | Exchange, int], Routes] = {}
        self.rows = _Rows(problem.n)
        self.busy_s = np.zeros(problem.n)
        self.ended: dict[int, list[np.ndarray]] = {}
        """By operation, the tasks that must end before it has ended on each rank: [(n,), ...]."""

    def build(self) -> PlanGraph:
        starts = segments(self.plan, self.flow)
        wanted = [starts.get(i, i) for i, op in self.plan if i in starts or isinstance(op, Transfer)]
        self._refuse(wanted)
        last = next(item for item in reversed(wanted) if isinstance(item, Segment))
        items, previous = [], {}
        for item in wanted:
            first = len(self.rows.delays)
            if isinstance(item, Segment):
                stream, ended = BLOCKS, self._segment(item, previous.get(BLOCKS, []), last=item is last)
                self.ended |= dict.fromkeys(item.ops, ended)
            else:
                op = self.plan.ops[item]
                assert isinstance(op, Transfer)
                stream, ended = op.lane, self._transfer(item, op, previous.get(op.lane, []))
                self.ended[item] = ended
            previous[stream] = ended
            items.append(Item(item, range(first, len(self.rows.delays))))
        return PlanGraph(self.rows.task_graph(self.network.link_bytes_per_s), tuple(items), self.busy_s)

    def _refuse(self, items: Sequence[Segment | int]) -> None:
        n, ops = self.problem.n, self.plan.ops
        rows = sum(op.group.size if isinstance(i, int) and isinstance(op := ops[i], AllToAll) else 1 for i in items)
        if n * rows > MAX_TASKS:
            raise RequestError(
                f"gpus={n}",
                f"this plan has {n * rows:,} transfers and runs of blocks; at most {MAX_TASKS:,} are simulated",
                "fewer GPUs, or a method with fewer steps, would work",
            )

    def _segment(self, segment: Segment, previous: list[np.ndarray], *, last: bool) -> list[np.ndarray]:
        seconds = self._segment_s(segment)
        if last:
            results = [chunk.tensor for chunk in self.plan.ends_with if is_partial(chunk.tensor)]
            seconds = seconds + sum(self.cluster.cast_s(self.problem, tensor, wire=False) for tensor in results)
        self.busy_s += seconds
        return [self.rows.add(seconds, [*previous, *(t for i in segment.waits.values() for t in self.ended[i])])]

    def _segment_s(self, segment: Segment) -> np.ndarray:
        """What a segment costs each rank: (n,)."""
        seconds = np.zeros(self.problem.n)
        for index in segment.ops:
            op = self.plan.ops[index]
            if isinstance(op, Join | Bundle):
                continue
            if isinstance(op, Fold):
                seconds += self.cluster.fold_s(self.problem, op.into.tensor, arriving=True)
                continue
            assert isinstance(op, Attend | AttendBackward)
            order = self.problem.layout.order(self._owner(op.q), self._owner(op.kv))
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

    def _transfer(self, index: int, op: Transfer, previous: list[np.ndarray]) -> list[np.ndarray]:
        """A flow from each rank for each message. It starts when both its ends have posted: their waits are over."""
        before = [*previous, *(tasks for _, other in self.flow.waits[index] for tasks in self.ended[other])]
        staged_s = self._staged_s(op)
        tasks, arrived = [], []
        for (group, shift), (target, sizes) in zip(peers(op), messages(op, self.problem, self.ranks), strict=True):
            routes = self._routes(group, shift)
            # The lane casts or packs what it sends before it posts it.
            deps = [*before, *(ended[target] for ended in before)]
            tasks.append(self.rows.add(routes.latency_s + staged_s, deps, sum(sizes.values()), routes))
            by_source = np.empty_like(self.ranks)
            by_source[target] = tasks[-1]
            arrived.append(by_source)
        if isinstance(op, AllToAll):  # what arrived is unpacked, and is one thing to wait for
            return [self.rows.add(staged_s, [*before, *tasks, *arrived])]
        return [*tasks, *arrived]

    def _staged_s(self, op: Transfer) -> np.ndarray | float:
        """Seconds of casting or packing what is sent, or of copying it where a rank sends to itself."""
        if isinstance(op, AllToAll):
            packed = sum(self.problem.field_bytes(field, wire=True) for field in by_heads(op))
            return self.cluster.copy_s(self.problem, packed)
        cast_s = self.cluster.cast_s(self.problem, op.carries, wire=True)
        stays = op.target(self.ranks) == self.ranks
        whole = sum(self.problem.field_bytes(field, wire=True) for field in FIELDS[op.carries])
        return cast_s + stays * self.cluster.copy_s(self.problem, whole) if stays.any() else cast_s

    def _routes(self, group: Group | Exchange, shift: int) -> Routes:
        """The routes of every rank's message to the rank `shift` ahead in the group."""
        if (group, shift) not in self.routes:
            self.routes[group, shift] = self.network.routes(self.ranks, group.member(self.ranks, shift))
        return self.routes[group, shift]
