"""Lower bounds on the time of a plan on a cluster: its blocks, the links it loads, the latencies it adds up."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import cache

import numpy as np

from sp_bench.cluster.cluster import Cluster
from sp_bench.cluster.topology import Network
from sp_bench.lower import lower
from sp_bench.plan.cast_rows import rows_moved
from sp_bench.plan.demand import demand
from sp_bench.plan.groups import Exchange, Group
from sp_bench.plan.members import members
from sp_bench.plan.ops import AllGather, Pass, Plan, ReduceScatter, RowCollective, Transfer, TreeReduce
from sp_bench.plan.problem import Problem
from sp_bench.plan.transfers import messages, peers

Traffic = Iterable[tuple[np.ndarray, np.ndarray]]
"""(target, bytes) of what ranks send, each (n,) by rank (account.traffic)."""


def lower_bounds(
    plan: Plan, problem: Problem, cluster: Cluster, crossing: np.ndarray, compute_s: float
) -> dict[str, float]:
    """Seconds that one phase takes at least, by what sets the bound; `crossing` are the bytes on each link: (L,).

    compute     blocks and folds of the busiest rank, `compute_s`
    latency     the latencies of what a rank sends on a lane, one transfer after the other; none where noise may shorten
                them, or of transfers that begin while the one before comes
    port, nic   and other classes of links: the bytes on the busiest one of them at its full rate, but for those that
                emulated links may carry after the end (emulation.EmulatedHosts)
    """
    network, hosts = cluster.network(plan.n), cluster.hosts
    between = {level.name for level in network.topology.between(network.gpus_per_node)}
    lanes, by_class = len(plan.lanes), {}
    for name, links in link_classes(network).items():
        carried = crossing[links]
        if hosts and lanes and name in between:
            carried = hosts.least_wire_bytes(carried, lanes)
        by_class[name] = float((carried / network.link_bytes_per_s[links]).max(initial=0.0))
    pipelined = lower(plan, problem, cluster.transport).pipelined if cluster.transport.pipelines else {}
    latency_s = 0.0 if cluster.stragglers.jitter else _latency_s(plan, problem, cluster, pipelined)
    return {"compute": compute_s, "latency": latency_s, **by_class}


def link_bytes(network: Network, traffic: Traffic) -> np.ndarray:
    """The bytes that cross each link: (L,)."""
    total = np.zeros(network.link_bytes_per_s.size + 1)  # the last entry is what -1, no link, gets
    for target, sent in traffic:
        links = network.routes_to(target).links
        for column in links.T:
            total += np.bincount(column % total.size, weights=sent, minlength=total.size)
    return total[:-1]


def by_link_class(network: Network, link_bytes: np.ndarray) -> dict[str, float]:
    """Bytes that cross the links of each class, counted where they go out."""
    classes = enumerate(network.first_link)
    outward = ((i, name.split()[0]) for i, name in classes if not name.endswith(" in"))
    return {name: float(link_bytes[network.link_class == i].sum()) for i, name in outward}


def link_classes(network: Network) -> dict[str, np.ndarray]:
    """The links of each class, both directions together, by a mask: (L,)."""
    names = np.array([name.split()[0] for name in network.first_link])[network.link_class]
    return {name: names == name for name in dict.fromkeys(names.tolist())}


def _latency_s(plan: Plan, problem: Problem, cluster: Cluster, pipelined: Container[int]) -> float:
    """The most latency that a rank's lane adds up, but for that which passes while other messages come."""
    ranks, lanes, network = np.arange(plan.n), {}, cluster.network(plan.n)
    wanted = demand(plan, problem)

    @cache
    def latency_s(group: Group | Exchange, shift: int) -> np.ndarray:
        """The latency of a message of each rank: (n,)."""
        return network.routes_to(members(group, shift, plan.n)).latency_s

    @cache
    def longest_s(pairs: tuple[tuple[Group | Exchange, int], ...]) -> np.ndarray:
        """The longest latency of messages that are under way at once: (n,)."""
        return np.max([latency_s(*pair) for pair in pairs], axis=0)

    def sent_s(index: int, op: Transfer, pairs: Sequence[tuple[Group | Exchange, int]]) -> np.ndarray:
        """The longest latency of the messages of a transfer that each rank has something for: (n,)."""
        if isinstance(op, RowCollective):
            return np.max(np.stack([latency_s(*pair) for pair in pairs]) * (rows_moved(op, problem, ranks) > 0), axis=0)
        there = wanted[index].there[op.target(ranks, plan.n)] if isinstance(op, Pass) and index in wanted else 1
        return longest_s(tuple(pairs)) * there

    for index, op in plan.transfers:
        if isinstance(op, AllGather | ReduceScatter):
            size = sum(sum(sizes.values()) for sizes in messages(op, problem, 0))
            if way := cluster.algorithm(op, problem, size):
                lanes[op.lane] = lanes.get(op.lane, 0.0) + way.latency_s
                continue
        if isinstance(op, TreeReduce):  # round after round
            lanes[op.lane] = lanes.get(op.lane, 0.0) + sum(latency_s(*pair) for pair in peers(op))
        elif index not in pipelined and (pairs := peers(op)):
            lanes[op.lane] = lanes.get(op.lane, 0.0) + sent_s(index, op, pairs)
    return max((float(np.max(seconds)) for seconds in lanes.values()), default=0.0)
