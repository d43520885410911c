"""From a plan to the task graph of all its ranks.

Blocks and folds between two waits or two sends are one task (a segment) on each rank, so that n blocks on n ranks
don't become n * n tasks. A message of a transfer is one flow from each rank. On an emulated machine a second one, which
nobody waits for, may follow it. Tasks come in rows of n, by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary, proxy

import numpy as np

from sp_bench.cluster.cluster import Cluster
from sp_bench.cluster.collectives import Algorithm
from sp_bench.errors import RequestError
from sp_bench.lower import Waits, lower
from sp_bench.machine import give_back_memory
from sp_bench.plan.groups import Group
from sp_bench.plan.ops import (
    BLOCKS,
    AllToAll,
    Collective,
    Op,
    Pass,
    Plan,
    ReduceScatter,
    RowCollective,
    Transfer,
    TreeReduce,
)
from sp_bench.plan.problem import Problem
from sp_bench.plan.schedule import Segment
from sp_bench.plan.transfers import messages, peers
from sp_bench.simulate import collectives
from sp_bench.simulate.least_times import least_makespan_s
from sp_bench.simulate.message_flows import Flow, MessageFlows
from sp_bench.simulate.noise import Noise
from sp_bench.simulate.operations import operation_costs
from sp_bench.simulate.plan_graph import Item, PlanGraph
from sp_bench.simulate.rows import CORE_WORK_PER_S, Path, Rows, Tasks
from sp_bench.simulate.symmetry import quotient, rotations, that_leave

MAX_TASKS, SOME_TASKS = 12_000_000, 100_000
"""As many as fit two GB of memory, and as many as take so long that an estimate is worth while."""
NEARLY = 0.1
"""Ranks may be taken for alike if their blocks differ by this share. A zigzag ring's blocks of half the queries take up
to 8% longer than those of half the keys."""
FEWER = 4
"""How many times as many ranks a graph has that is worth replacing by an estimate."""
KEPT_TASKS = 4_000_000
"""Rows of so many tasks are kept between relaxed_s and build_graph: a hundred MB. Before a graph of more is made, the
system gets back what has been freed."""
LATER_WEIGHT = 1e3
"""The weight of bytes that links carry after their message (Wire.later_bytes): messages, of about 1, go first."""


def build_graph(
    plan: Plan, problem: Problem, cluster: Cluster, *, use_symmetry: bool = True, nearly_alike: bool = False
) -> PlanGraph:
    """The task graph of every rank's plan on that cluster, or of one rank of each kind where some are alike.

    With `nearly_alike`, also where blocks of them differ by NEARLY.
    """
    if use_symmetry and nearly_alike:
        builder = _nearly(plan, problem, cluster)
        _KEPT.pop(plan, None)
        return builder.build()
    return _Builder(plan, problem, cluster, use_symmetry, NEARLY if nearly_alike else 0.0).build()


_KEPT: WeakKeyDictionary[Plan, _Builder] = WeakKeyDictionary()
"""Builders of plans with nearly alike ranks, and with rows."""


def build_as_alike(plan: Plan, problem: Problem, cluster: Cluster) -> PlanGraph | None:
    """The task graph of one rank of each kind, where ranks with the same peers and links are of a kind, however long
    their blocks take. None where that is hardly fewer than build_graph has with nearly alike ranks.
    """
    nearly = _nearly(plan, problem, cluster)
    if FEWER * nearly.ranks.size <= problem.n:
        return None
    alike = _Builder(plan, problem, cluster, True, 1.0)
    return alike.build() if FEWER * alike.ranks.size <= nearly.ranks.size else None


def relaxed_s(plan: Plan, problem: Problem, cluster: Cluster) -> float:
    """A lower bound on the makespan of build_graph's tasks, with nearly alike ranks or with all, in seconds: no flow
    slows another down, or flows share one link, and no other (least_makespan_s). Ranks that are nearly alike are each
    as fast as the fastest, and need not run at the same time. 0.0 where that is no quicker than to solve them.
    """
    builder = _nearly(plan, problem, cluster)
    seconds = builder.relaxed_s()
    if builder.tasks + sum(kept.tasks for kept in _KEPT.values()) <= KEPT_TASKS:
        _KEPT[plan] = builder
    return seconds


def _nearly(plan: Plan, problem: Problem, cluster: Cluster) -> _Builder:
    """The builder with nearly alike ranks: the plan's last one, with its rows, where relaxed_s has kept that."""
    kept = _KEPT.get(plan)
    if kept and kept.cluster is cluster and kept.problem == problem:
        return kept
    return _Builder(plan, problem, cluster, True, NEARLY)


class PipelinedStart(NamedTuple):
    """How a pipelined send begins while the transfer before on its lane is under way.

    Here it begins the moment that all it waits for is there; lanes look only when a tensor has come.
    """

    hidden_s: np.ndarray
    """(n,) Of its latency, what passes meanwhile."""
    begun: list[Tasks]
    """Tasks that end so long after all that its sender waits for on other streams."""


class _Builder:
    def __init__(self, plan: Plan, problem: Problem, cluster: Cluster, use_symmetry: bool, blocks_apart: float) -> None:
        # A builder may be kept as long as its plan is in use, and must not be what uses it.
        self.plan: Plan = proxy(plan)
        self.problem, self.cluster = problem, cluster
        self.lowering = lower(plan, problem, cluster.transport)
        self.costs = operation_costs(plan, problem, cluster.device, self.lowering)
        starts = self.costs.segments
        self.wanted = [starts.get(i, i) for i, op in plan if i in starts or isinstance(op, Transfer)]
        """The plan's segments and, by their indices, its transfers."""
        self.algorithms: dict[Collective, Algorithm | None] = {}
        """Those of collectives, of which a plan may have thousands, of few kinds."""
        self.network = cluster.network(problem.n)
        slow = cluster.stragglers.slow_ranks(problem.n)
        is_even = use_symmetry and cluster.is_even(problem.n)
        moves = that_leave(rotations(plan, self.network), [slow]) if is_even else []
        moves = [move for move in moves if self._keeps_algorithms(move)]
        moves = self.costs.that_leave_blocks(that_leave(moves, self.costs.transfers.varying()), apart=blocks_apart)
        self.exact = not blocks_apart or len(self.costs.that_leave_blocks(moves)) == len(moves)
        self.noise = Noise(cluster.stragglers.jitter, cluster.stragglers.seed)
        self.quotient = quotient(moves, self.network)
        self.ranks = self.quotient.ranks
        self.effects = cluster.effects(self.network, self.ranks, plan.phase)
        self.slow, self.all_slow = slow[self.ranks], slow
        self.messages = MessageFlows(
            problem, cluster, self.lowering, self.costs.transfers, self.quotient, self.effects, self.noise
        )
        self.flows: dict[int, list[Flow]] = {}
        """The flows of each transfer."""
        self.cores = cluster.shared_cores(problem.n)
        self.rows = Rows(self.quotient)
        self.ended: dict[int, list[Tasks]] = {}
        """By operation, the tasks that must end before it has ended on each rank."""
        self.in_order = cluster.starts_in_order(plan)
        self.started: list[Tasks] = []
        """The tasks after which the last transfer of any lane has started on each rank; nothing yet at first."""
        self.later: list[tuple[list[Tasks], np.ndarray, Path]] = []
        """After which messages links carry how many bytes, and over what."""
        self.own_s, self.kind_s, self.least = np.zeros(problem.n), np.zeros(self.ranks.size), dict[int, np.ndarray]()
        """If ranks are nearly alike, seconds that each of them computes, those of its kind, and PlanGraph.least."""

    @property
    def tasks(self) -> int:
        """How many tasks its rows have by now."""
        return self.ranks.size * len(self.rows.delays)

    def build(self) -> PlanGraph:
        self._refuse(self.wanted)
        items = self._items
        if self.tasks > KEPT_TASKS:
            give_back_memory()  # what bounds of other variants have left: the graph takes a GB
        work = "flow_bytes" if self.cores else "delay_s"
        tasks, share = self.rows.task_graph(self.cores), np.ones(self.problem.n)
        if not self.exact:
            share = (self.own_s + self.costs.results_s()) * self.all_slow / self.kind_s[self.quotient.orbit]
        return PlanGraph(tasks, tuple(items), self.quotient, work, self.exact, self.least, share)

    def relaxed_s(self) -> float:
        """A lower bound on the makespan; 0.0 where so few tasks are simulated soon enough."""
        if not SOME_TASKS < self._most_tasks(self.wanted) <= MAX_TASKS:
            return 0.0
        rows = self._items[-1].rows.stop  # a run doesn't wait for what links carry after a message
        return least_makespan_s(self.rows, self.cores, rows, self.least, alike=self.exact)

    @cached_property
    def _items(self) -> list[Item]:
        """The rows of all segments and transfers, which are added: which are whose."""
        wanted = self.wanted
        last = next(item for item in reversed(wanted) if isinstance(item, Segment))
        items, previous, work = [], {}, self._work([item for item in wanted if isinstance(item, Segment)])
        for item in wanted:
            if isinstance(item, Segment):
                first = len(self.rows.delays)
                stream, ended = BLOCKS, self._segment(item, next(work), previous.get(BLOCKS, []), last=item is last)
                self.ended |= dict.fromkeys(item.ops, ended)
            else:
                op = self.plan.ops[item]
                assert isinstance(op, Transfer)
                early = self._pipelined_start(item) if item in self.lowering.pipelined else None
                before = self._before(item, op, previous.get(op.lane, []), early=early is not None)
                first = len(self.rows.delays)
                stream, ended = op.lane, self._transfer(item, op, before, early)
                self.ended[item] = ended
            previous[stream] = ended
            items.append(Item(item, range(first, len(self.rows.delays))))
        for later in self.later:
            self.rows.add(0.0, *later, LATER_WEIGHT)
        self.messages.keep_few()
        return items

    def _refuse(self, items: Sequence[Segment | int]) -> None:
        if (tasks := self._most_tasks(items)) > MAX_TASKS:
            raise RequestError(
                f"gpus={self.problem.n}",
                f"this plan has {tasks:,} transfers and runs of blocks; at most {MAX_TASKS:,} are simulated",
                "fewer GPUs, or a method with fewer steps, would work",
            )

    def _most_tasks(self, items: Sequence[Segment | int]) -> int:
        """At most how many tasks these take."""
        ops = self.plan.ops
        rows = sum(self._rows_of(ops[i]) if isinstance(i, int) else 1 for i in items)
        rows += len(self.lowering.pipelined)
        rows += 2 * sum(isinstance(i, int) for i in items) if self.in_order else 0
        rows *= 2 if self.effects.defers else 1  # what links carry after a message is a row too
        return self.ranks.size * rows

    def _rows_of(self, op: Op) -> int:
        """At most how many rows of tasks a transfer takes."""
        if not isinstance(op, Collective):
            return 1
        if isinstance(op, RowCollective):
            return len(op.members) + 1
        if isinstance(op, TreeReduce):
            return 2 * len(op.rounds)
        way = self._algorithm(op)
        return collectives.rows_of(way, op.group) if way else op.group.size

    @cached_property
    def _collectives(self) -> list[Collective]:
        """The plan's collectives, equal ones once."""
        return list(dict.fromkeys(op for op in self.plan.ops if isinstance(op, Collective)))

    def _keeps_algorithms(self, move: np.ndarray) -> bool:
        """Whether the flows of collectives are the same after the ranks have moved."""
        ways = [way for op in self._collectives if (way := self._algorithm(op))]
        return all(
            np.array_equal(move[flow.target], flow.target[move])
            and np.array_equal(flow.share[move], flow.share)
            and np.array_equal(way.latency_s[move], way.latency_s)
            for way in ways
            for flow in way.flows
        )

    def _work(self, found: Sequence[Segment]) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Seconds of each segment on each rank that is simulated: (q,), and where ranks are nearly alike
        the most and the least of any rank of its kind.
        """
        indices = [segment.ops for segment in found]
        if self.exact:
            for seconds in self.costs.work_s(indices, self.ranks):
                yield from ((each, None) for each in seconds)
            return
        for seconds in self.costs.work_s(indices, np.arange(self.problem.n)):
            self.own_s += seconds.sum(axis=0)
            yield from zip(self.quotient.largest(seconds), self.quotient.smallest(seconds), strict=True)

    def _segment(
        self, segment: Segment, work: tuple[np.ndarray, np.ndarray | None], previous: list[Tasks], *, last: bool
    ) -> list[Tasks]:
        factor, results_s = self.slow * self.noise(self.ranks.size), self.costs.results_s() if last else 0.0
        most_s, least_s = work
        seconds = (most_s + results_s) * factor
        if least_s is not None:
            self.kind_s += seconds
            self.least[len(self.rows.delays)] = (least_s + results_s) * factor
        deps = [*previous, *(t for i in segment.waits.values() for t in self.ended[i])]
        if self.cores:
            return [
                self.rows.add(
                    0.0, deps, CORE_WORK_PER_S * seconds, self.messages.on_cores, self.effects.block_weights(seconds)
                )
            ]
        return [self.rows.add(seconds, deps)]

    def _pipelined_start(self, index: int) -> PipelinedStart:
        """How a rank begins with a transfer when the first tensor of the one before has come, and not yet the last."""
        before = self.lowering.pipelined[index]
        op, previous = self.plan.ops[index], self.plan.ops[before]
        assert isinstance(op, Transfer)
        assert isinstance(previous, Transfer)
        path = self.messages.path(*peers(op)[0])  # which is that of the one before, too
        (sizes,) = messages(previous, self.problem, self.ranks, self.costs.transfers.wanted.get(before))
        (flow,) = self.flows[before]
        whole = sum(sizes.values())
        later = 0.0 if flow.later_bytes is None else flow.later_bytes
        rest_s = np.minimum(whole - next(iter(sizes.values())), whole - later) / path.alone_bytes_per_s
        hidden_s, elsewhere = np.minimum(path.latency_s, rest_s), self._elsewhere(index)
        begun = [self.rows.add(hidden_s, elsewhere)] if elsewhere else []
        return PipelinedStart(hidden_s, begun)

    def _before(self, index: int, op: Transfer, previous: list[Tasks], *, early: bool) -> list[Tasks]:
        """The tasks before a rank begins with a transfer: in launch order, its last one's start is one of them.

        A rank that takes no part launches nothing. Staging is taken to be over when the transfer starts.
        """
        before = [*previous, *([] if early else self._elsewhere(index))]
        if not self.in_order or (isinstance(op.group, Group) and op.group.size == 1):
            return before
        sends, receives = self.costs.transfers.moves(index, op, self.ranks)
        moves = sends | receives
        if isinstance(op, Pass):
            moves = moves & (op.target(self.ranks, self.problem.n) != self.ranks)
        others = self.started
        self.started = before = [self.rows.add(0.0, [*before, *others])]
        if not np.all(moves):
            self.started = [self.rows.either(moves, before[0], self.rows.add(0.0, others))]
        return before

    def _elsewhere(self, index: int) -> list[Tasks]:
        """The tasks that an operation waits for on other streams."""
        return self._tasks(self.lowering.waits[index])

    def _tasks(self, waits: Waits) -> list[Tasks]:
        return [tasks for _, other in waits for tasks in self.ended[other]]

    def _algorithm(self, op: Collective) -> Algorithm | None:
        if op not in self.algorithms:
            self.algorithms[op] = self.cluster.algorithm(op, self.problem, self._sent(op).total)
        return self.algorithms[op]

    def _sent(self, op: Collective) -> collectives.Bytes:
        by_field = messages(op, self.problem, 0)[0] if op.group.size > 1 else {}
        return collectives.Bytes(by_field, op.group.size)

    def _collective(self, op: Collective, way: Algorithm, before: list[Tasks], index: int) -> list[Tasks]:
        """A collective by the library's algorithm; partials are packed before it."""
        sent = self._sent(op)
        ours, where = (self.rows, self.quotient, self.network), (way, op.group, sent, before)
        staged_s = self.costs.transfers.staged_s(index, op, self.ranks)
        noise = partial(self.noise, self.ranks.size)
        if way.hops:
            ended, later = collectives.hop_by_hop(*ours, *where, noise, self.effects, self.messages.on_wire)
            self.later += later
            return ended
        return collectives.at_once(*ours, *where, staged_s, noise())

    def _transfer(self, index: int, op: Transfer, before: list[Tasks], early: PipelinedStart | None) -> list[Tasks]:
        """A flow from each rank for each message. It starts when both its ends have posted: their waits are over.

        A pipelined send begins `early`, and the receives of some transfers are pre-posted.
        """
        if isinstance(op, Collective) and (way := self._algorithm(op)):
            return self._collective(op, way, before, index)
        begun = early.begun if early else []
        expecting = before
        if posted := self.lowering.preposted.get(index):
            expecting = [*(self.ended[posted.after] if posted.after is not None else []), *self._tasks(posted.waits)]
        tasks, arrived = [], []
        self.flows[index] = self.messages.of(index, op, early.hidden_s if early else None)
        for number, flow in enumerate(self.flows[index]):
            ready = [self.rows.at(ended, flow.over.target) for ended in expecting]
            if flow.sends is not True:
                pairs = zip(ready, expecting, strict=True)
                ready = [self.rows.either(flow.sends, posted, ended) for posted, ended in pairs]
            tasks.append(self.rows.add(flow.delay_s, [*before, *ready, *begun], flow.sent, flow.over, flow.weight))
            if flow.later_bytes is not None:
                self.later.append(([tasks[-1]], flow.later_bytes, flow.over))
            came = self.rows.at(tasks[-1], flow.over.source)
            arrived.append(came if flow.receives is True else self.rows.either(flow.receives, came, tasks[-1]))
            if isinstance(op, TreeReduce):
                before = expecting = [self.rows.add(self.costs.transfers.merged_s(op, number), [tasks[-1], came])]
        if isinstance(op, TreeReduce):
            return before
        if isinstance(op, AllToAll | ReduceScatter | RowCollective):  # one thing to wait for, unpacked or merged
            return [self.rows.add(self.costs.transfers.arrived_s(op, len(tasks)), [*before, *tasks, *arrived])]
        return [*tasks, *arrived]
