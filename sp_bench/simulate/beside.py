"""A plan and a collective at the same time, over the same links: what gathers of parameters do to an attention.

The collectives go by NCCL's rings (cluster.collectives). Latencies of a ring's steps add up before the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sp_bench.cluster.collectives import rings
from sp_bench.cluster.topology import Network
from sp_bench.plan.groups import Group
from sp_bench.simulate.flows import solve
from sp_bench.simulate.plan_graph import PlanGraph
from sp_bench.simulate.task_graph import TaskGraph, Timing


def ring_traffic(network: Network, size: int, sent_bytes: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """[((n,) target, bytes), ...] by sender (account.traffic), where each rank sends `sent_bytes` in all.

    Rings are of `size` consecutive ranks.
    """
    return [(flow.target, flow.share * sent_bytes) for flow in rings(Group(1, size), network).flows]


@dataclass(frozen=True)
class Together:
    """When an attention and a collective that run beside each other have ended."""

    attention_s: float
    """From the beginning of both, the time before the attention included."""
    collective_s: float
    busy_s: np.ndarray
    """Seconds that each rank computes in the attention: (n,)."""


def beside(
    graphs: Sequence[PlanGraph], networks: Sequence[Network], sent_bytes: float, steps: int, before_s: float
) -> Together:
    """Run plans' graphs of all their ranks, `before_s` after a collective of so many steps has begun.

    Each rank sends `sent_bytes` in the collective of its graph's network; 0 for none. Several graphs run at one time
    over the same links: each has a network, which begins with its own ranks and goes on with those of other
    data-parallel groups, of which the collective is too.
    """
    parts = []
    for graph, network in zip(graphs, networks, strict=True):
        n = graph.quotient.ranks.size
        assert n == graph.quotient.orbit.size, "the collective sees every rank"
        legs = ring_traffic(network, network.gpu.size, sent_bytes) if sent_bytes else []
        parts.append(_added(graph.tasks, n, network, legs, steps, before_s))
    timing, first, times = solve(_joined(parts)), 0, []
    for graph, part in zip(graphs, parts, strict=True):
        n, tasks, end = graph.quotient.ranks.size, first + graph.tasks.delay_s.size, first + part.delay_s.size
        own = Timing(start_s=timing.start_s[first:tasks], finish_s=timing.finish_s[first:tasks])
        ended = float(timing.finish_s[tasks + n : end].max(initial=0.0))
        times.append((own.makespan_s, ended, graph.busy_s(own)))
        first = end
    attention_s, collective_s, busy_s = zip(*times, strict=True)
    return Together(max(attention_s), max(collective_s), np.max(busy_s, axis=0))


def alone_s(networks: Sequence[Network], size: int, sent_bytes: float, steps: int) -> float:
    """Seconds of a collective of `size` consecutive ranks, in all such groups and networks at one time."""
    if not sent_bytes:
        return 0.0
    nothing = TaskGraph(
        delay_s=np.empty(0),
        flow_bytes=np.empty(0),
        path_start=np.zeros(1, np.int32),
        path_links=np.empty(0, np.int32),
        path_loads=np.empty(0),
        dep_start=np.zeros(1, np.int32),
        dep_tasks=np.empty(0, np.int32),
        rate_cap=np.empty(0),
        weight=np.empty(0),
        link_bytes_per_s=networks[0].link_bytes_per_s,
    )
    parts = [
        _added(nothing, network.gpu.size, network, ring_traffic(network, size, sent_bytes), steps, 0.0)
        for network in networks
    ]
    return solve(_joined(parts)).makespan_s


def _joined(parts: Sequence[TaskGraph]) -> TaskGraph:
    """Graphs over the same links as one."""
    if len(parts) == 1:
        return parts[0]
    tasks, crossed, deps = (
        np.cumsum([0, *(getattr(part, name).size for part in parts)]) for name in ("delay_s", "path_links", "dep_tasks")
    )
    own = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("delay_s", "flow_bytes", "path_links", "path_loads", "rate_cap", "weight")
    }
    return TaskGraph(
        **own,
        path_start=np.concatenate([[0], *(part.path_start[1:] + crossed[i] for i, part in enumerate(parts))]),
        dep_start=np.concatenate([[0], *(part.dep_start[1:] + deps[i] for i, part in enumerate(parts))]),
        dep_tasks=np.concatenate([part.dep_tasks + tasks[i] for i, part in enumerate(parts)]).astype(np.int32),
        link_bytes_per_s=parts[0].link_bytes_per_s,
    )


def _added(
    tasks: TaskGraph,
    n: int,
    network: Network,
    legs: list[tuple[np.ndarray, np.ndarray]],
    steps: int,
    before_s: float,
) -> TaskGraph:
    """The tasks of n ranks, each beginning `before_s` later, and after them the flows of the network's collective."""
    count, ranks = tasks.delay_s.size, np.arange(network.gpu.size)
    waiting = np.diff(tasks.dep_start)
    roots = np.flatnonzero(waiting == 0)
    later = count + roots % n  # rows have a task for each rank
    routes = [network.routes(ranks, target) for target, _ in legs]
    latency_s = _latency_s(routes, legs, steps)
    links = [route.links for route in routes]
    crossed = [each >= 0 for each in links]
    hops = [np.diff(tasks.path_start), np.zeros(n, np.int64), *(crossing.sum(axis=1) for crossing in crossed)]
    flows = [each[crossing] for each, crossing in zip(links, crossed, strict=True)]
    own, added = (tasks.path_links, tasks.path_loads), n + ranks.size * len(legs)
    return TaskGraph(
        delay_s=np.concatenate([tasks.delay_s, np.full(n, before_s), *([latency_s] * len(legs))]),
        flow_bytes=np.concatenate([tasks.flow_bytes, np.zeros(n), *(sent for _, sent in legs)]),
        path_start=np.concatenate(([0], np.cumsum(np.concatenate(hops)))),
        path_links=np.concatenate([own[0], *flows]).astype(np.int32),
        path_loads=np.concatenate([own[1], *(np.ones(each.size) for each in flows)]),
        dep_start=np.concatenate(
            ([0], np.cumsum(np.concatenate([np.where(waiting == 0, 1, waiting), np.zeros(added, int)])))
        ),
        dep_tasks=np.insert(tasks.dep_tasks, tasks.dep_start[roots], later.astype(np.int32)),
        rate_cap=np.concatenate([tasks.rate_cap, np.full(n, np.inf), *(route.rate_cap for route in routes)]),
        weight=np.concatenate([tasks.weight, np.ones(added)]),
        link_bytes_per_s=tasks.link_bytes_per_s,
    )


def _latency_s(routes: list, legs: list[tuple[np.ndarray, np.ndarray]], steps: int) -> np.ndarray:
    """The latency of a ring's steps before its bytes have come, by rank: each step crosses the mean of its hops."""
    if not routes:
        return np.zeros(0)
    shares = np.array([sent[0] for _, sent in legs])
    mean_s = sum(
        share * float(np.mean(route.latency_s)) for share, route in zip(shares / shares.sum(), routes, strict=True)
    )
    return np.full(routes[0].latency_s.size, steps * mean_s)
