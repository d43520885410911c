"""Ranks that can't be told apart: simulating one of each kind gives what simulating all of them would.

A symmetry of a plan on a network is a permutation of the ranks that leaves everything the same: each rank's peers, the
links between them, what its blocks cost, how much it sends. Max-min fair rates are unique, so that ranks which a
symmetry maps onto each other do the same at the same time. The quotient has one rank and one link for each such orbit;
a flow loads a link's orbit as often as there are flows of its own orbit on each link of it.

Candidates are the rotations of the groups that a plan names: all ranks of a ring move on by so many places.

Ranks whose blocks take almost equally long may be taken for alike, each as slow as the slowest: to rank variants, and
where it can't matter (simulate.exactly).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from sp_bench.cluster.topology import Network
from sp_bench.plan.groups import Exchange, Group
from sp_bench.plan.members import members
from sp_bench.plan.ops import Plan, Transfer, TreeReduce
from sp_bench.plan.patterns import divisors
from sp_bench.plan.transfers import peers

Permutation = np.ndarray
"""(n,) The rank that each rank is mapped to."""


def rotations(plan: Plan, network: Network) -> Sequence[Permutation]:
    """For each group of a plan, the smallest rotation that leaves all its groups, and the network, the same."""
    groups = dict.fromkeys(group for _, op in plan.transfers for group in _groups(op))
    return _rotations(tuple(groups), plan.n, network)


@lru_cache(maxsize=64)
def _rotations(groups: tuple[Group | Exchange, ...], n: int, network: Network) -> Sequence[Permutation]:
    """Cached, as the plans of a method's phases and layouts have the same groups."""
    ranks, rotations = np.arange(n), []
    for group in groups:
        if isinstance(group, Group):
            moves = (group.member(ranks, shift) for shift in divisors(group.size)[:-1])
            fitting = (move for move in moves if _commutes(move, groups) and network.moved(move) is not None)
            rotations += [move for move in [next(fitting, None)] if move is not None]
    return tuple(rotations)


def _groups(op: Transfer) -> tuple[Group | Exchange, ...]:
    return op.levels if isinstance(op, TreeReduce) else (op.group,)


def _commutes(move: Permutation, groups: Iterable[Group | Exchange]) -> bool:
    ranks = np.arange(move.size)
    return all(np.array_equal(move[group.member(ranks, 1)], group.member(move, 1)) for group in groups)


def links_are_of_pairs(plan: Plan, network: Network) -> bool:
    """Whether each link carries the messages of one rank to one other alone, as on a ring."""
    ranks, pair_of = np.arange(plan.n), np.full(network.link_bytes_per_s.size, -1)
    for group, shift in dict.fromkeys(pair for _, op in plan.transfers for pair in peers(op)):
        target = members(group, shift, plan.n)
        for links in network.routes_to(target).links.T:
            there = (links >= 0) & (target != ranks)
            links, pairs = links[there], (ranks * plan.n + target)[there]
            known = pair_of[links]
            pair_of[links] = pairs  # of several pairs on one link, one
            if np.any((known >= 0) & (known != pairs)) or np.any(pair_of[links] != pairs):
                return False
    return True


def that_leave(moves: Sequence[Permutation], values: Iterable[np.ndarray]) -> Sequence[Permutation]:
    """The moves under which every rank's values, (n,) each, stay the same."""
    for x in values:
        if not moves:
            break
        if np.min(x) < np.max(x):
            moves = [move for move in moves if np.array_equal(x[move], x)]
    return moves


@dataclass(frozen=True, eq=False)
class Quotient:
    """One rank for each orbit of ranks and one link for each orbit of links."""

    ranks: np.ndarray
    """(q,) The lowest rank of each orbit."""
    orbit: np.ndarray
    """(n,) The orbit of each rank, as an index into `ranks`."""
    sizes: np.ndarray
    """(q,) How many ranks are in it."""
    link_orbit: np.ndarray
    """(L,) The orbit of each link."""
    link_sizes: np.ndarray
    """By orbit of links, how many are in it."""
    link_bytes_per_s: np.ndarray
    """The same, the rate of each of them."""

    @cached_property
    def _by_orbit(self) -> tuple[np.ndarray, np.ndarray]:
        """All ranks by orbit, and where each orbit begins."""
        return np.argsort(self.orbit, kind="stable"), np.concatenate([[0], np.cumsum(self.sizes)[:-1]])

    def largest(self, values: np.ndarray) -> np.ndarray:
        """The largest value of each orbit's ranks: (..., n) -> (..., q)."""
        ranks, first = self._by_orbit
        return np.maximum.reduceat(values[..., ranks], first, axis=-1)

    def smallest(self, values: np.ndarray) -> np.ndarray:
        """The smallest value of each orbit's ranks: (..., n) -> (..., q)."""
        ranks, first = self._by_orbit
        return np.minimum.reduceat(values[..., ranks], first, axis=-1)

    def paths(self, links: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(orbits, times) of the links of each orbit's flow: links (q, P), -1 for none -> (q, P) both.

        A flow loads an orbit of links so many times as each of them carries flows of its own orbit.
        """
        orbits = np.where(links >= 0, self.link_orbit[links], -1)
        times = np.where(links >= 0, self.sizes[:, None] // self.link_sizes[orbits], 0)
        return orbits, times


def quotient(moves: Sequence[Permutation], network: Network) -> Quotient:
    """The quotient by these symmetries; everything itself where there are none. It is the same one each time."""
    return _quotient(tuple(move.tobytes() for move in moves), network)


@lru_cache(maxsize=16)
def _quotient(in_bytes: tuple[bytes, ...], network: Network) -> Quotient:
    n, links = network.gpu.size, network.link_bytes_per_s.size
    moves = [np.frombuffer(move, np.intp) for move in in_bytes]
    ranks, orbit, sizes = np.unique(_orbits(n, moves), return_inverse=True, return_counts=True)
    moved = [m for m in (network.moved(move) for move in moves) if m is not None]
    first, link_orbit, link_sizes = np.unique(_orbits(links, moved), return_inverse=True, return_counts=True)
    return Quotient(ranks, orbit, sizes, link_orbit, link_sizes, network.link_bytes_per_s[first])


def _orbits(size: int, moves: Iterable[Permutation]) -> np.ndarray:
    """The lowest element that each can be moved to: (size,)."""
    lowest, last = np.arange(size), None
    moves = list(moves)
    while last is None or not np.array_equal(lowest, last):
        last = lowest
        for move in moves:
            power = move
            for _ in range(size.bit_length()):  # all powers of the move, by doubling
                lowest, power = np.minimum(lowest, lowest[power]), power[power]
    return lowest
