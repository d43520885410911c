"""How a library carries a collective: which flows it makes of it, and what latency they have together.

NCCL's algorithms for all-gather and reduce-scatter, and its choice between them by estimated time (src/graph/tuning.cc
of NCCL 2.2x):

ring    Its channels go round all members, node after node. A channel enters and leaves a node by another GPU than the
        next, so that all NICs carry an equal share. n - 1 steps of latency, of which one between any two nodes. Small
        messages go by the protocols LL and LL128, with shorter steps at a lower rate, over NVSwitch.
pat     Parallel trees, where each member is alone on its node: log2 n steps, at 3/4 of the rate.
nvls    NVSwitch's multicast, inside a node of a cluster that has its rate (intra.nvls_bytes_per_s): one latency.

An all-to-all is a message between each pair. So is a reduce-scatter that the library doesn't add on the way
(lower.staging.adds_up_on_the_way).
Gloo's all-gather is a ring in the order of ranks. Each hop waits for the one before. Its all-to-alls may get less of
links than messages do (cluster.emulation.Wire.most_bytes_per_s).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sp_bench.cluster.tiers import FullMesh, Switch
from sp_bench.cluster.topology import Network
from sp_bench.lower import TransportKind
from sp_bench.lower.staging import adds_up_on_the_way
from sp_bench.plan.groups import UP, Group
from sp_bench.plan.ops import AllGather, AllToAll, Collective, ReduceScatter, RowCollective
from sp_bench.plan.problem import Problem

PAT_RATE = 0.75
"""NCCL: "if (a == NCCL_ALGO_PAT) busBw *= .75"."""
PAT_STEP, PAT_RANK_S = 1 / 3.5, 2.8e-6
"""NCCL's latency of PAT: log2(nodes) * interLat / 3.5 + ranks * 2.8 us."""


class Protocol(NamedTuple):
    """A protocol of NCCL's rings for small messages: its latencies, and what it gets of a ring's rate."""

    name: str
    begin_s: float
    """baseLatencies."""
    inside_s: float
    """A step over NVLink (hwLatencies)."""
    beside_network_s: float
    """The least that such a step takes where some go over the network: what posting to it takes (getNetOverhead)."""
    across_s: float
    """A step over the network between nodes with several members, whose other steps hide a part of it."""
    alone_s: float
    """A step over the network between members that are alone on their nodes."""
    rate_share: float
    most_bytes_per_s: tuple[float, float, float]
    """Inside a node, over two, and over more (llMaxBws: of Hopper's GPUs, and of nodes with Intel's CPUs)."""


PROTOCOLS = (
    Protocol("ring LL", 6.6e-6, 0.6e-6, 1e-6, 2.7e-6, 5e-6, 0.5, (141e9, 39e9, 20.4e9)),
    Protocol("ring LL128", 14e-6, 1.9e-6, 1.9e-6, 4e-6, 8.5e-6, 0.92, (math.inf, math.inf, math.inf)),
)
NVLS_S = 25e-6
"""NCCL's latency of NVLS (hwLat, Simple)."""


class Flow(NamedTuple):
    """The share that every rank sends to one other rank: (n,) each."""

    target: np.ndarray
    share: np.ndarray
    """The share of the bytes that the rank sends in the collective."""


class Algorithm(NamedTuple):
    """A library's algorithm for a collective. Its flows are under way at once, and it ends for all members together."""

    name: str
    flows: tuple[Flow, ...]
    latency_s: np.ndarray
    """The latency of each rank in seconds: (n,)."""
    rate_share: float = 1.0
    """The largest share that a flow gets of its rate alone."""
    rate_cap: float = math.inf
    hops: int = 0
    """If not 0: it has this many hops, one after the other, each with an equal part of the bytes."""


def algorithm(
    op: Collective, problem: Problem, network: Network, transport: TransportKind, sent_bytes: int
) -> Algorithm | None:
    """The algorithm of that transport's library for `sent_bytes` of each rank; None for a message between each pair."""
    if isinstance(op, AllToAll | RowCollective):
        return None
    if isinstance(op, ReduceScatter) and not adds_up_on_the_way(op, problem, transport):
        return None
    if not transport.adds:
        return _hops(op, network)
    ways = [rings(op.group, network), *_small(op.group, network), *_pat(op.group, network), *_nvls(op.group, network)]
    return min(ways, key=lambda way: seconds(way, network, sent_bytes))


def seconds(way: Algorithm, network: Network, sent_bytes: int) -> float:
    """An estimate of its time on an idle network: its latency, and what its busiest link takes."""
    links = network.link_bytes_per_s.size
    load = np.zeros(links + 1)  # the last entry is what -1, no link, gets
    for flow in way.flows:
        for column in network.routes_to(flow.target).links.T:
            load += np.bincount(column % (links + 1), weights=flow.share, minlength=links + 1)
    busiest_s = float((load[:-1] / network.link_bytes_per_s).max()) * sent_bytes
    return float(way.latency_s.max()) + max(busiest_s / way.rate_share, sent_bytes / way.rate_cap)


def _hops(op: AllGather | ReduceScatter, network: Network) -> Algorithm:
    ranks = np.arange(network.gpu.size)
    target = op.group._replace(way=UP).member(ranks, 1)
    flow = Flow(target, np.ones(ranks.size))
    return Algorithm("hops", (flow,), network.routes_to(target).latency_s, hops=op.group.size - 1)


class _Placed(NamedTuple):
    """The members of every rank's group by place: (n,) each."""

    on_node: np.ndarray
    """How many members share the rank's node."""
    nodes: np.ndarray
    beside: tuple[np.ndarray, ...]
    """The members 1, 2, ... places on around the node; itself where there are fewer."""
    beyond: np.ndarray
    """The member with the rank's place on the next node of the group."""


@lru_cache(maxsize=32)
def _placed(group: Group, network: Network) -> _Placed:
    ranks = np.arange(network.gpu.size)
    on_node, nodes, beyond = (np.zeros(ranks.size, int) for _ in range(3))
    beside: list[np.ndarray] = []
    first = group.first(ranks)
    for members in np.lexsort((network.gpu, first)).reshape(-1, group.size):
        _, starts = np.unique(network.node_of(members), return_index=True)
        parts = np.split(members, starts[1:])
        for part, next_part in zip(parts, [*parts[1:], parts[0]], strict=True):
            on_node[part], nodes[part] = part.size, len(parts)
            beyond[part] = next_part[np.arange(part.size) % next_part.size]
            beside += [ranks.copy() for _ in range(part.size - 1 - len(beside))]
            for places, other in enumerate(beside[: part.size - 1], 1):
                other[part] = np.roll(part, -places)
    return _Placed(on_node, nodes, tuple(beside), beyond)


@lru_cache(maxsize=32)
def rings(group: Group, network: Network) -> Algorithm:
    """Rings through all members.

    Where cables join pairs of GPUs, channels go round a node in all orders, so that all cables carry as much.
    """
    ranks, placed = np.arange(network.gpu.size), _placed(group, network)
    leaves = np.where(placed.nodes > 1, 1 / placed.on_node, 0.0)
    beside = placed.beside if isinstance(network.topology.intra, FullMesh) else placed.beside[:1]
    inside = (1 - leaves) / np.clip(placed.on_node - 1, 1, max(len(beside), 1))
    flows = [Flow(target, inside * (target != ranks)) for target in beside]
    inside_s = np.max([network.routes_to(target).latency_s for target in beside or [ranks]], axis=0)
    if (placed.nodes > 1).any():
        flows.append(Flow(placed.beyond, leaves))
    across_s = network.routes_to(placed.beyond).latency_s
    latency_s = (group.size - placed.nodes) * inside_s + (placed.nodes - 1) * across_s
    return Algorithm("ring", tuple(flows), latency_s)


@lru_cache(maxsize=32)
def _small(group: Group, network: Network) -> list[Algorithm]:
    """Rings of protocols for small messages; only of GPUs on NVSwitch are NCCL's latencies those of the links."""
    if type(network.topology.intra) is not Switch:
        return []
    ring, placed = rings(group, network), _placed(group, network)
    several = placed.nodes > 1
    algorithms = []
    for protocol in PROTOCOLS:
        inside_s = np.where(several, max(protocol.inside_s, protocol.beside_network_s), protocol.inside_s)
        across_s = np.where(placed.on_node == 1, protocol.alone_s, protocol.across_s)
        steps_s = (group.size - placed.nodes) * inside_s + (placed.nodes - 1) * across_s
        cap = protocol.most_bytes_per_s[min(int(placed.nodes.max()), 3) - 1]
        algorithms.append(Algorithm(protocol.name, ring.flows, protocol.begin_s + steps_s, protocol.rate_share, cap))
    return algorithms


@lru_cache(maxsize=32)
def _pat(group: Group, network: Network) -> list[Algorithm]:
    """Step k sends to the member 2^k ahead what has come so far, as far as that is lacking there."""
    ranks, placed = np.arange(network.gpu.size), _placed(group, network)
    if group.size < 3 or (placed.on_node > 1).any():
        return []
    up, flows = group._replace(way=UP), []
    for step in range((group.size - 1).bit_length()):
        sent = min(2**step, group.size - 2**step)
        flows.append(Flow(up.member(ranks, 2**step), np.full(ranks.size, sent / (group.size - 1))))
    across_s = np.max([network.routes_to(flow.target).latency_s for flow in flows], axis=0)
    latency_s = math.log2(group.size) * across_s * PAT_STEP + group.size * PAT_RANK_S
    return [Algorithm("pat", tuple(flows), latency_s, PAT_RATE)]


@lru_cache(maxsize=32)
def _nvls(group: Group, network: Network) -> list[Algorithm]:
    rate, placed = network.topology.intra.nvls_bytes_per_s, _placed(group, network)
    if rate is None or group.size < 3 or (placed.nodes > 1).any():
        return []
    flow = Flow(placed.beside[0], np.ones(placed.nodes.size))
    return [Algorithm("nvls", (flow,), np.full(placed.nodes.size, NVLS_S), rate_cap=rate)]
