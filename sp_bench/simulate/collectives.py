"""The tasks of a collective: flows of the library's algorithm between a start and an end that all members share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sp_bench.cluster.collectives import Algorithm
from sp_bench.cluster.emulation import Effects, Message, Wire
from sp_bench.cluster.topology import Network
from sp_bench.plan.groups import UP, Group
from sp_bench.simulate.rows import Path, Rows, Tasks
from sp_bench.simulate.symmetry import Quotient


class Bytes(NamedTuple):
    """Bytes that each rank sends in a collective."""

    by_field: Mapping[str, int]
    """To one member."""
    members: int

    @property
    def total(self) -> int:
        """To all others."""
        return (self.members - 1) * sum(self.by_field.values())


def rows_of(way: Algorithm, group: Group) -> int:
    """At most how many rows of tasks a collective takes."""
    return way.hops or len(way.flows) + 2 * (1 + (group.size - 1).bit_length())


def path_to(target: np.ndarray, network: Network, quotient: Quotient, *, capped: bool) -> Path:
    """The path of every simulated rank's flow to its `target`, (n,)."""
    ranks, kinds = quotient.ranks, quotient.orbit
    routes = network.routes_to(target) if ranks.size == target.size else network.routes(ranks, target[ranks])
    source = np.zeros_like(target)
    source[target] = np.arange(target.size)
    links, loads = quotient.paths(routes.links)
    alone = network.alone_bytes_per_s(routes, capped=capped)
    cap = routes.rate_cap if capped else np.full(ranks.size, np.inf)
    return Path(kinds[target[ranks]], kinds[source[ranks]], routes.latency_s, cap, links, loads, routes.inter, alone)


def at_once(
    rows: Rows,
    quotient: Quotient,
    network: Network,
    way: Algorithm,
    group: Group,
    sent: Bytes,
    before: list[Tasks],
    staged_s: np.ndarray | float,
    noise: np.ndarray | float,
) -> list[Tasks]:
    """All flows of an algorithm together. A pipeline goes at the pace of its slowest link: members end together."""
    started = _together(rows, quotient, group, [rows.add(staged_s, before)])
    latency_s, flows = way.latency_s[quotient.ranks] * noise, []
    for flow in way.flows:
        path = path_to(flow.target, network, quotient, capped=False)
        cap = np.minimum(path.alone_bytes_per_s * way.rate_share, way.rate_cap)
        path = path._replace(rate_cap=np.where(np.isfinite(cap), cap, np.inf))
        flows.append(rows.add(latency_s, started, flow.share[quotient.ranks] * sent.total, path))
    return _together(rows, quotient, group, flows)


def hop_by_hop(
    rows: Rows,
    quotient: Quotient,
    network: Network,
    way: Algorithm,
    group: Group,
    sent: Bytes,
    before: list[Tasks],
    noise: Callable[[], np.ndarray | float],
    effects: Effects,
    over: Callable[[Path, Wire], Path],
) -> tuple[list[Tasks], list[tuple[list[Tasks], np.ndarray, Path]]]:
    """Gloo's ring: (what ends it, bytes that links carry after messages).

    A hop is sent in halves, the first of which goes on while the second comes: after the first hop, latency is hidden
    as far as half of a message takes.
    """
    (flow,), later = way.flows, []
    path = path_to(flow.target, network, quotient, capped=True)
    halves = {f"{name}/{half}": size / 2 for name, size in sent.by_field.items() for half in range(2)}
    message = Message((group._replace(way=UP), 1), halves, path.inter)
    hidden_s = np.minimum(path.latency_s, message.bytes / 2 / path.alone_bytes_per_s)
    ended: list[list[Tasks]] = [before, before]
    for hop in range(way.hops):
        (wire,) = effects.on_wire([message])
        crossed = over(path, wire)
        latency_s = np.maximum(path.latency_s * noise() - (hidden_s if hop else 0.0), 0.0)
        posted_there = (rows.at(tasks, path.target) for tasks in ended[-2])  # receives are posted a hop ahead
        deps = [*ended[-1], *posted_there]
        task = rows.add(latency_s, deps, message.bytes - wire.later_bytes, crossed, wire.weight)
        if np.any(wire.later_bytes):
            later.append(([task], wire.later_bytes, crossed))
        ended.append([task, rows.at(task, path.source)])
    return ended[-1], later


def _together(rows: Rows, quotient: Quotient, group: Group, tasks: Sequence[Tasks]) -> list[Tasks]:
    """Tasks that end once all members' have: a dissemination barrier, each round of which doubles who is known."""
    ranks, kinds = quotient.ranks, quotient.orbit
    apart = [2**k for k in range((group.size - 1).bit_length())]
    if all(np.array_equal(kinds[group.member(ranks, shift)], np.arange(ranks.size)) for shift in apart):
        return list(tasks)
    known = rows.add(0.0, tasks)
    for shift in apart:
        known = rows.add(0.0, [known, rows.at(known, kinds[group.member(ranks, shift)])])
    return [known]
