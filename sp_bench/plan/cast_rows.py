"""Rows that the operations of a group cast send, hold and read, by rank (plan.casts, plan.travel)."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain

import numpy as np

from sp_bench.plan.block_classes import block_classes
from sp_bench.plan.casts import Casts, Gathering, Keys, Work, Works, casts
from sp_bench.plan.groups import Grid, Group
from sp_bench.plan.ops import Chunk, Gathered, GroupCast, GroupReduce, Place, Plan, RowCollective, relays
from sp_bench.plan.problem import Problem
from sp_bench.plan.region_table import by_keys
from sp_bench.plan.tensors import KV, Q
from sp_bench.plan.travel import QueryCasts, travel


def casts_of(op: RowCollective | Gathered, problem: Problem) -> Casts | QueryCasts:
    """The rows that an operation moves or reads: of keys, or of queries that travel."""
    if op.pairs == "all":
        return casts(problem)
    ways = travel(problem, forward=op.forward)
    return ways.queries if op.pairs == "queries" else ways.keys


def members_seen(problem: Problem, own: Chunk) -> set[int]:
    """The chunks #u, other than its own, of which queries of any rank see rows."""
    return set(_members_seen(casts(problem), own.home, problem.n, problem.layout.head_parallel))


@lru_cache(maxsize=32)  # forward and backward have the same
def _members_seen(found: Casts, home: Group | Grid, n: int, degree: int) -> tuple[int, ...]:
    ranks = np.arange(n)
    owners = np.stack([home.member(ranks, u) for u in range(1, home.size)] or [ranks[:0]])
    seen = found.counts[ranks[: owners.shape[1]] // degree, owners // degree].any(axis=1)
    return tuple((np.flatnonzero(seen) + 1).tolist())


def rows_moved(op: RowCollective, problem: Problem, rank) -> np.ndarray:
    """How many rows one or an array of ranks sends in the message of each member: (members,) or (members, ranks).

    In a GroupCast that of #u goes to the rank whose #u it is itself, in a GroupReduce to the owner of #u.
    """
    rows_of, degree = rows_from if isinstance(op, GroupReduce) else rows_wanted, problem.layout.head_parallel
    if degree == 1 or not np.array_equal(rank, np.arange(problem.n)):
        return rows_of(op, problem, rank)
    return np.repeat(rows_of(op, problem, rank[::degree]), degree, axis=1)  # ranks that split heads have the same


def rows_from(op: RowCollective, problem: Problem, rank) -> np.ndarray:
    """How many rows of each member one or an array of ranks has: (members,) or (members, ranks)."""
    return _rows(casts_of(op, problem), op.own, _each(op.members, rank), problem.layout.head_parallel, rank)


def rows_wanted(op: RowCollective, problem: Problem, rank) -> np.ndarray:
    """How many rows of `own` the rank whose #u it is has, for each member #u and one or an array of ranks: (members,)
    or (members, ranks).
    """
    each = _each(op.members, rank)
    holders = op.group.member(rank, -op.shift(each))
    return _rows(casts_of(op, problem), op.own, each, problem.layout.head_parallel, holders)


def _each(members: tuple[int, ...], rank) -> np.ndarray:
    """The members, to be broadcast with one or an array of ranks: (members,) or (members, 1)."""
    return np.array(members, int).reshape(-1, *[1] * np.ndim(rank))


def _rows(found: Casts | QueryCasts, own: Chunk, members: np.ndarray, degree: int, holders) -> np.ndarray:
    """How many rows of each member of a chunk these ranks have."""
    owners = own.home.member(holders, members) // degree
    holders = np.broadcast_to(holders // degree, owners.shape)
    if isinstance(own.home, Group):
        return found.counts[holders, owners]
    rows, relayed = np.zeros(owners.shape, np.int64), np.array([relays(own.at(u)) for u in members.ravel().tolist()])
    for many in np.unique(relayed).tolist():
        some = relayed == many
        rows[some] = found.counts_for(many)[holders[some], owners[some]]
    return rows


def rows_to(op: RowCollective, problem: Problem, rank: int, member: int) -> np.ndarray:
    """The rows of `own`, as they lie on the rank, that the rank whose #u it is has."""
    degree, of_casts, owner = problem.layout.head_parallel, casts_of(op, problem), int(op.own.owner(rank))
    holder = int(op.group.member(rank, -op.shift(member)))
    rows = of_casts.rows(holder // degree, owner // degree, relays(op.own.at(member)))
    if not op.own.index:
        return rows
    return np.searchsorted(of_casts.rows(rank // degree, owner // degree, relays(op.own)), rows)


def rows_held(op: RowCollective, problem: Problem, rank):
    """How many rows one or an array of ranks has of the chunks of all members."""
    return rows_from(op, problem, rank).sum(axis=0)


def rows_owned(op: RowCollective, problem: Problem, rank):
    """How many rows of its own chunk the members have of one or an array of ranks, all together."""
    return rows_wanted(op, problem, rank).sum(axis=0)


def most_rows(op: RowCollective, problem: Problem, *, sent: bool) -> int:
    """How many rows the rank with most of them sends, or receives."""
    held, own = sent == isinstance(op, GroupReduce), op.own.place
    rows = _rows_of_all(casts_of(op, problem), own, op.members, problem.n, problem.layout.head_parallel, held)
    return int(rows.max())


@lru_cache(maxsize=1024)  # casts and reductions of both phases have the same, and blocks that read what came
def _rows_of_all(
    found: Casts | QueryCasts, own: Place, members: tuple[int, ...], n: int, degree: int, held: bool
) -> np.ndarray:
    """How many rows of all members each rank holds, or how many of its own they have, all together: (n,)."""
    # Rows that a rank holds are those of each member; those that it owns, each member's whose #u it is.
    ranks, op, rows = np.arange(n), GroupCast("", Chunk(KV, own.index, own.home), members, _ANY), np.zeros(n, int)
    for start in range(0, len(members), MEMBERS_AT_ONCE):
        each = _each(members[start : start + MEMBERS_AT_ONCE], ranks)
        holders = ranks if held else op.group.member(ranks, -op.shift(each))
        rows += _rows(found, op.own, each, degree, holders).sum(axis=0)
    return rows


MEMBERS_AT_ONCE = 512
"""Few enough that a number for each of them on all ranks fits a cache."""
_ANY = Chunk(Q, 0, Group(1, 1))


def keys_of(op: Gathered, problem: Problem, rank: int) -> Keys:
    """The rows of a Gathered block on one rank, and its regions as its kernels take them.

    Rows are of keys, in the order of their positions, or of queries that travelled, and then all of the rank's keys.
    """
    keys = _keys(casts_of(op, problem), _chunks(op, problem, rank))
    return keys if op.forward else keys._replace(regions=by_keys(keys.regions))


@lru_cache(maxsize=64)
def _keys(found: Casts | QueryCasts, of: Gathering) -> Keys:
    return found.keys(*of)  # forward and backward have the same


def find_regions(plan: Plan, problem: Problem, rank: int) -> None:
    """Have the regions found of all blocks that a rank computes: at once, as that is faster."""
    if not problem.mask.in_pieces:
        return
    table = block_classes(plan, problem)
    together = (range(table.first[at], table.first[at] + len(op.blocks)) for at, op in plan.gathered.items())
    problem.blocks.find(np.unique(np.delete(table.of[:, rank], [*chain.from_iterable(together)])))
    by_rows: dict[Casts | QueryCasts, list[Gathering]] = {}
    for op in plan.gathered.values():
        by_rows.setdefault(casts_of(op, problem), []).append(_chunks(op, problem, rank))
    for of_casts, wanted in by_rows.items():
        of_casts.find(wanted)


def works_of(op: Gathered, problem: Problem) -> tuple[list[Work], np.ndarray]:
    """The different works of a Gathered block, and which of them each rank has: (ranks,)."""
    brought = tuple((chunk.place, relays(chunk)) for chunk in op.brought)
    of_both = _works(casts_of(op, problem), op.rank_own.place, brought, problem.n, problem.layout.head_parallel)
    return [work[not op.forward] for work in of_both[0]], of_both[1]


@lru_cache(maxsize=64)  # kernels and folds of both phases have the same, and variants with fewer or more slices
def _works(
    found: Casts | QueryCasts, own: Place, brought: tuple[tuple[Place, int], ...], n: int, degree: int
) -> tuple[list[Works], np.ndarray]:
    firsts = np.arange(0, n, degree)  # the ranks that split a chunk's heads have the same
    owners = [place.home.member(firsts, place.index) // degree for place in (own, *(place for place, _ in brought))]
    works, of = found.works(owners[0], np.stack(owners[1:], axis=1), max(relayed for _, relayed in brought))
    return works, np.repeat(of, degree)


def is_one_call(work: Work) -> bool:
    """Whether one call of a kernel for variable lengths takes all of it, without copies of keys for several pieces."""
    kind, _, kv_tokens, _ = work.sizes
    return np.unique(kind).size < 2 and kv_tokens.sum() == work.kv_rows


def rows_read(op: Gathered, problem: Problem, ranks: np.ndarray) -> np.ndarray:
    """How many rows that were brought a Gathered block reads on each of the ranks, or of its own keys: (ranks,)."""
    own, members = Place(op.brought[0].home, 0), tuple(chunk.index for chunk in op.brought)
    return _rows_of_all(casts_of(op, problem), own, members, problem.n, problem.layout.head_parallel, True)[ranks]


def _chunks(op: Gathered, problem: Problem, rank: int) -> Gathering:
    """The rank's own chunk of a Gathered block, and those of which it has rows."""
    degree = problem.layout.head_parallel
    members = tuple(int(chunk.owner(rank)) // degree for chunk in op.brought)
    return Gathering(int(op.rank_own.owner(rank)) // degree, members, max(map(relays, op.brought)))


def received(op: RowCollective, problem: Problem, rank):
    """How many rows one or an array of ranks receives in all."""
    return rows_held(op, problem, rank) if isinstance(op, GroupCast) else rows_owned(op, problem, rank)


def sent(op: RowCollective, problem: Problem, rank):
    """How many rows one or an array of ranks sends in all."""
    return rows_owned(op, problem, rank) if isinstance(op, GroupCast) else rows_held(op, problem, rank)
