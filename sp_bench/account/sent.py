"""Bytes that ranks send in a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sp_bench.cluster import Cluster
from sp_bench.plan.demand import demand
from sp_bench.plan.groups import Exchange, Group
from sp_bench.plan.members import members
from sp_bench.plan.ops import Collective, Pass, Plan, Transfer
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Kind, Tensor, named
from sp_bench.plan.transfers import messages, peers


@dataclass(frozen=True)
class Volume:
    """Bytes that the GPUs send in one phase."""

    by_rank: dict[tuple[str, str, str], np.ndarray]
    """Bytes that each rank sends, (n,), by (lane, tensor, field)."""

    @property
    def sent_bytes(self) -> dict[tuple[str, str, str], float]:
        """Bytes sent by (lane, tensor, field), mean over ranks."""
        return {key: _mean(sent) for key, sent in self.by_rank.items()}

    def of(self, rank: int) -> dict[tuple[str, str, str], int]:
        """Bytes that one rank sends, by (lane, tensor, field); zero entries are left out."""
        return {key: int(sent[rank]) for key, sent in self.by_rank.items() if sent[rank]}

    @property
    def total_bytes(self) -> float:
        """Payload and statistics bytes, mean over ranks."""
        return _mean(sum(self.by_rank.values(), np.zeros(1, np.int64)))

    @property
    def max_bytes(self) -> int:
        """Payload and statistics bytes of the rank that sends most."""
        return int(sum(self.by_rank.values(), np.zeros(1, np.int64)).max())

    @property
    def statistic_bytes(self) -> float:
        """Statistics bytes, mean over ranks."""
        return sum(sent for (_, tensor, name), sent in self.sent_bytes.items() if _is_statistic(tensor, name))

    @property
    def payload_bytes(self) -> float:
        """Payload bytes, which the papers count, mean over ranks."""
        return self.total_bytes - self.statistic_bytes


def _mean(sent: np.ndarray) -> float:
    return int(sent.sum()) / sent.size


def _is_statistic(tensor: str, name: str) -> bool:
    return any(field.name == name and field.kind is Kind.STATISTIC for field in named(tensor).fields)


def volume(plan: Plan, problem: Problem) -> Volume:
    """Bytes that every rank sends in a plan."""
    ranks, wanted, sent = np.arange(problem.n), demand(plan, problem), {}
    for index, op in plan.transfers:
        for sizes in messages(op, problem, ranks, wanted.get(index)):
            for name, size in sizes.items():
                counted = sent.setdefault((op.lane, op.tensor.name, name), np.zeros(problem.n, np.int64))
                counted += size
    return Volume(sent)


Pair = tuple[Group | Exchange, int]
"""A group, and the shift of a peer in it."""
Traffic = list[tuple[np.ndarray, np.ndarray]]
"""[(target rank, bytes sent), ...], each (n,) by sender."""


def traffic(plan: Plan, problem: Problem, cluster: Cluster | None = None) -> Traffic:
    """Bytes that ranks send: an entry per (group, shift) of the plan, and per flow of a collective's algorithm.

    The algorithms are those of the cluster's library; without a cluster, a message to each other member.
    """
    ranks, wanted = np.arange(problem.n), demand(plan, problem)
    sent, collectives = dict[Pair, np.ndarray](), Counter[Collective]()
    # A plan has thousands of operations, of few kinds: those to the same peers, of one tensor, in chunks of one size.
    alike = dict[tuple[Group | Exchange, int, Tensor] | int, list[int]]()
    for index, op in plan.transfers:
        if isinstance(op, Collective) and cluster:
            collectives[replace(op, lane="")] += 1
        elif isinstance(op, Pass) and problem.is_even and not op.against and index not in wanted:
            alike.setdefault((op.group, op.shift, op.send.tensor), []).append(index)
        else:
            alike[index] = [index]
    by_flow = Traffic()
    for op, times in collectives.items():
        assert cluster
        sizes = [sum(each.values()) for each in messages(op, problem, ranks)]
        total = sum(sizes) + np.zeros(problem.n, np.int64)
        way = cluster.algorithm(op, problem, int(total.max()))
        if way is None:
            for pair, size in zip(peers(op), sizes, strict=True):
                _add(sent, pair, times * size, problem.n)
        else:
            by_flow += [(flow.target, times * (flow.share * total)) for flow in way.flows]
    for same in alike.values():
        index, op = same[0], plan.ops[same[0]]
        assert isinstance(op, Transfer)
        for pair, sizes in zip(peers(op), messages(op, problem, ranks, wanted.get(index)), strict=True):
            _add(sent, pair, len(same) * sum(sizes.values()), problem.n)
    return [*((members(group, shift, problem.n), total) for (group, shift), total in sent.items()), *by_flow]


def _add(sent: dict[Pair, np.ndarray], pair: Pair, size: np.ndarray | int, n: int) -> None:
    """Add bytes, (n,) or the same of every rank, to those of a pair."""
    total = sent.setdefault(pair, np.zeros(n, np.int64))
    total += size


def sent_across_nodes(
    plan: Plan, problem: Problem, node_of: Callable[[np.ndarray], np.ndarray], cluster: Cluster | None = None
) -> np.ndarray:
    """Bytes that each rank sends to ranks of other nodes: (n,). `node_of` gives the node of each rank."""
    ranks = np.arange(problem.n)
    across = ((node_of(ranks) != node_of(target)) * sent for target, sent in traffic(plan, problem, cluster))
    return sum(across, np.zeros(problem.n))
