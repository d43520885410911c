"""Execute a plan on a model of a cluster: a flow-level network and a table of kernel costs.

What the model has: latency and max-min fair bandwidth on every GPU's switch port and NIC, the plan's waits, block and
fold times, blocks slowed down while transfers run, cores and links that are shared unevenly, bursts that idle links let
through, slow ranks and links, noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

from sp_bench.cluster.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.plan.ops import BLOCKS, AllGather, Pass, Plan, ReduceScatter, Transfer
from sp_bench.plan.problem import Problem
from sp_bench.plan.schedule import Segment
from sp_bench.plan.transfers import peers
from sp_bench.simulate import machine_code
from sp_bench.simulate.flows import LongerError, solve, sooner
from sp_bench.simulate.graph import build_as_alike, build_graph, relaxed_s
from sp_bench.simulate.plan_graph import PlanGraph
from sp_bench.simulate.slowdown import slowed_by_transfers
from sp_bench.simulate.symmetry import links_are_of_pairs
from sp_bench.simulate.task_graph import TaskGraph, Timing
from sp_bench.simulate.uncontended import solve_rows

__all__ = ["WAITING", "LongerError", "Run", "Span", "exactly", "least_s", "relaxed_s", "simulate"]

SLOWDOWN_ROUNDS, SLOWDOWN_SETTLED = 8, 1e-4
"""Transfers slow blocks down, which changes when they run: how often at most that is worked out, and how well."""
WAITING = "waiting"
"""The stream of the times when a rank's blocks wait."""
SAME_TIME = 1e-9
"""Ranks that end within this part of a time end together."""
NEARLY_LAST, ALIKE = 0.05, 0.1
"""Ranks are shown for the last one if they end this part of the step before it, and wait as long within that part."""
MANY_TASKS, SAME_STEP = 500_000, 1e-3
"""From so many tasks on, all ranks are simulated only if that may change a rank's end by more than this part of the
step: a tenth of what is measured at best."""
NARROW, SHORT = 128, 100_000
"""Up to so many ranks with so many tasks, the machine code has solved them by events sooner than row after row
(uncontended): in a tenth of the time for 8 ranks, in half of it for 64."""
MARGIN = 0.98
"""Less work may make a network slower: an estimate by less of it is taken for so much of itself."""


class Span(NamedTuple):
    """An operation of one stream of a rank, from start to end in seconds."""

    stream: str
    label: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Run:
    """One simulated phase."""

    plan: Plan
    graph: PlanGraph
    """Without its tasks where the run is exact."""
    start_s: np.ndarray
    finish_s: np.ndarray

    @property
    def makespan_s(self) -> float:
        """Until the last rank has ended."""
        return float(self.ended_s.max(initial=0.0))

    busy_s: np.ndarray
    """Seconds that each rank computes, waiting for a core among it where cores are shared: (n,)."""
    work_s: np.ndarray
    """Seconds that it would compute alone on its core or device: (n,)."""
    exact: bool
    """Whether it is that of all ranks, each with its own blocks (see `exactly`)."""
    by_kind: bool = False
    """Whether it is that of one rank of each kind of nearly alike ones nevertheless, as all would be too many."""
    as_alike_s: float | None = None
    """The makespan with nearly alike ranks taken for alike, of a run that `exactly` has made of that one."""

    @property
    def nearly_s(self) -> float:
        """The makespan as `simulate` finds it with `nearly_alike`."""
        return self.makespan_s if self.as_alike_s is None else self.as_alike_s

    @cached_property
    def ended_s(self) -> np.ndarray:
        """When each rank has ended: (n,)."""
        return self.graph.by_rank(self.finish_s).max(axis=0)[self.graph.quotient.orbit]

    @property
    def exposed_s(self) -> np.ndarray:
        """Seconds that each rank waits for transfers before it has ended: (n,)."""
        return self.ended_s - self.busy_s

    @property
    def idle_s(self) -> np.ndarray:
        """Seconds that each rank has ended before the last one: (n,)."""
        return self.makespan_s - self.ended_s

    @property
    def last_rank(self) -> int:
        """The rank that ends last; of several, the one that waits longest for transfers."""
        last = self.ended_s >= self.makespan_s * (1 - SAME_TIME)
        return int(np.argmax(np.where(last, self.exposed_s, -1.0)))

    @cached_property
    def shown_rank(self) -> int:
        """The rank whose timeline shows what the step waits for: of those that end about last and wait about as long as
        the last one, the one at which arrivals take the longest. On a ring it receives from another node.
        """
        last, kinds = self.last_rank, self.graph.quotient.ranks
        arriving_s = np.zeros(kinds.size)
        for times in self._arrivals(kinds):
            if times:
                arriving_s += times[1] - times[0]
        alike = np.abs(self.exposed_s - self.exposed_s[last]) <= ALIKE * self.exposed_s[last]
        nearly_last = self.ended_s >= self.makespan_s * (1 - NEARLY_LAST)
        return int(kinds[np.argmax(np.where((alike & nearly_last)[kinds], arriving_s, -1.0))])

    def spans(self, rank: int) -> list[Span]:
        """The timeline of one rank: its blocks, and what its lanes send."""
        kind = int(self.graph.quotient.orbit[rank])
        starts, ends = (self.graph.by_rank(x)[:, kind] for x in (self.start_s, self.finish_s))
        # Between one item's rows and the next's may be one that neither shows.
        edges = [edge for item in self.graph.items for edge in (item.rows.start, item.rows.stop)][:-1]
        begun, ended = (of.reduceat(x, edges)[::2].tolist() for of, x in ((np.minimum, starts), (np.maximum, ends)))
        return [Span(*names, *times) for names, *times in zip(self._names, begun, ended, strict=True)]

    def waits(self, rank: int) -> list[Span]:
        """The waits of one rank: on each lane what arrives, and as `WAITING` when its blocks wait before it ends."""
        kind, spans, idle_from_s = self.graph.quotient.orbit[rank], [], 0.0
        starts, ends = self.graph.by_rank(self.start_s), self.graph.by_rank(self.finish_s)
        arrivals = self._arrivals(np.array([rank]))
        for item, (stream, label), times in zip(self.graph.items, self._names, arrivals, strict=True):
            if isinstance(item.what, Segment):
                rows = list(item.rows)
                spans.append(Span(WAITING, label, idle_from_s, float(starts[rows, kind].min())))
                idle_from_s = float(ends[rows, kind].max())
            elif times:
                spans.append(Span(stream, label, *(float(time[0]) for time in times)))
        return [*spans, Span(WAITING, "the end", idle_from_s, float(self.ended_s[rank]))]

    def _arrivals(self, ranks: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray] | None]:
        """When what each item brings begins and ends to arrive at each of `ranks`; None of one that brings nothing."""
        starts, ends = self.graph.by_rank(self.start_s), self.graph.by_rank(self.finish_s)
        orbit = self.graph.quotient.orbit
        source = cache(lambda group, shift: orbit[group.member(ranks, -shift)])
        for item in self.graph.items:
            if isinstance(item.what, Segment):
                yield None
                continue
            op = self.plan.ops[item.what]
            assert isinstance(op, Transfer)
            if isinstance(op, Pass):  # one row, as of most
                row, sender = item.rows.start, source(op.group, op.shift)
                yield starts[row, sender], ends[row, sender]
                continue
            rows = np.array(item.rows)
            if isinstance(op, AllGather | ReduceScatter):
                sources = np.tile(orbit[ranks], (rows.size, 1))
            else:
                sources = np.array([source(group, shift) for group, shift in peers(op)], int)
            rows = rows[: len(sources), None]  # then an AllToAll unpacks
            yield (starts[rows, sources].min(axis=0), ends[rows, sources].max(axis=0)) if rows.size else None

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        """The stream and label of each item, the same on all ranks."""
        names = []
        for item in self.graph.items:
            if isinstance(item.what, Segment):
                names.append((BLOCKS, f"{len(item.what.ops)} operations from {self.plan.ops[item.what.ops[0]]}"))
            else:
                op = self.plan.ops[item.what]
                assert isinstance(op, Transfer)
                names.append((op.lane, str(op.reads[0]) if op.reads else str(None)))
        return names


def simulate(
    plan: Plan, problem: Problem, cluster: Cluster, *, use_symmetry: bool = True, nearly_alike: bool = False
) -> Run:
    """Run one plan on a cluster, all ranks starting together. Raises RequestError if it is too large to simulate.

    Where plan and cluster leave ranks that can't be told apart, one of each kind is simulated, with the same result
    (symmetry.py); `use_symmetry=False` simulates all of them. `nearly_alike` takes ranks for alike whose blocks take
    almost equally long, each as slow as the slowest: enough to rank variants (`Run.exact` says if it did).
    """
    graph = build_graph(plan, problem, cluster, use_symmetry=use_symmetry, nearly_alike=use_symmetry)
    run = _run(plan, graph, cluster, exact=graph.exact)
    return run if nearly_alike else exactly(run, problem, cluster)


def least_s(plan: Plan, problem: Problem, cluster: Cluster) -> float:
    """Less than the makespan where that takes all ranks to find: by one rank of each kind, as fast as the fastest.

    0.0 where `simulate` takes ranks for nearly alike anyway.
    """
    graph = build_as_alike(plan, problem, cluster)
    if graph is None:
        return 0.0
    return MARGIN * _run(plan, replace(graph, tasks=graph.fastest), cluster, exact=False).makespan_s


def exactly(run: Run, problem: Problem, cluster: Cluster, most_s: float = math.inf) -> Run:
    """The run with every rank's own blocks. Raises RequestError if that is too large to simulate, LongerError where
    solving it by events shows that it is longer than `most_s`.

    Where ranks are nearly alike, all of them are simulated, unless that takes MANY_TASKS and they end at the same time,
    within SAME_STEP of the step, whether each is as fast as the fastest of its kind or as slow as the slowest. So it
    is where transfers bound the step. Between the two are the ranks as they are, and the run with the slowest stands;
    but only where each link carries the messages of one rank to one other. Elsewhere ranks that are hardly apart may
    fall out of step, as those of TokenRing do, whose steps are up to 3.3% longer then. So one of each kind stands for
    them only where all would be too many, and the run says so (`by_kind`).
    """
    if run.exact:
        return run
    tasks = run.graph.tasks.delay_s.size * (problem.n / run.graph.quotient.ranks.size)
    of_pairs = tasks > MANY_TASKS and links_are_of_pairs(run.plan, cluster.network(problem.n))
    if of_pairs and _ends_as_its_fastest(run, cluster):
        return replace(run, exact=True)
    try:
        graph_of_all = build_graph(run.plan, problem, cluster)
    except RequestError:
        if of_pairs or not _ends_as_its_fastest(run, cluster):
            raise
        return replace(run, exact=True, by_kind=True)
    of_all = _run(run.plan, graph_of_all, cluster, exact=True, most_s=most_s)
    return replace(of_all, as_alike_s=run.makespan_s)


def _ends_as_its_fastest(run: Run, cluster: Cluster) -> bool:
    """Whether every rank ends at the same time if each is as fast as the fastest of its kind."""
    fast = _run(run.plan, replace(run.graph, tasks=run.graph.fastest), cluster, exact=False)
    return bool(np.all(run.ended_s - fast.ended_s <= SAME_STEP * run.makespan_s))


def _run(plan: Plan, graph: PlanGraph, cluster: Cluster, *, exact: bool, most_s: float = math.inf) -> Run:
    timing, tasks = settle(graph, cluster, most_s)
    busy_s, work_s = graph.busy_s(timing), graph.work_s(tasks)
    # A run that is kept while others are simulated needs no tasks any more, unless those are to be others.
    kept = graph.without_tasks() if exact else graph
    return Run(plan, kept, timing.start_s, timing.finish_s, busy_s, work_s, exact)


def settle(graph: PlanGraph, cluster: Cluster, most_s: float = math.inf) -> tuple[Timing, TaskGraph]:
    """When the tasks of a graph run, and the tasks with the delays that transfers leave them, if these slow blocks.

    Raises LongerError where solving them by events shows that it is after `most_s`.
    """
    tasks, least_s, width = graph.tasks, float(graph.work_s(graph.tasks).max()), graph.quotient.ranks.size
    slowdown, noisy = cluster.device.transfer_slowdown, cluster.stragglers.jitter > 0
    # Tasks that nothing slows down yet may take longer on a network than those that it does. For what links carry after
    # a message, a run doesn't wait.
    has_later = tasks.delay_s.size > graph.items[-1].rows.stop * width
    most_s = math.inf if has_later else most_s / MARGIN if slowdown else most_s

    def by_events(some: TaskGraph) -> Timing:
        return solve(some, sooner(some), least_s=least_s, most_s=most_s, noisy=noisy)

    narrow = width <= NARROW and tasks.delay_s.size <= SHORT and machine_code.can_be_had()
    solved = by_events if narrow else partial(solve_rows, width=width, solve=by_events)
    timing = solved(tasks)
    for _ in range(SLOWDOWN_ROUNDS if slowdown else 0):
        tasks = slowed_by_transfers(graph, timing, slowdown)
        timing, before = solved(tasks), timing
        if abs(timing.makespan_s - before.makespan_s) <= SLOWDOWN_SETTLED * before.makespan_s:
            break
    return timing, tasks
