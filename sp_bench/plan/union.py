"""Unions of blocks: the fewest kernel calls that compute several blocks together.

The blocks are those of every query chunk i with every key chunk j. Regions of kind FULL that have the same queries are
one region of these queries and of all their keys; of what then has the same keys, the queries are joined in turn (or
keys first, if that leaves fewer). A region of another kind is a call of its own. Both steps only concatenate, so that a
(query, key) pair is in exactly one call if it was in exactly one region.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from sp_bench.plan.ops import Fused
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import Region, RegionKind, Regions


class Piece(NamedTuple):
    """A run of rows of one chunk."""

    chunk: int
    """The place of the chunk among the query chunks, or the key chunks, of its operation."""
    rows: range


Pieces = tuple[Piece, ...]


class KernelCall(NamedTuple):
    """One kernel call: attention of pieces of query chunks, end to end, to pieces of key chunks, end to end."""

    kind: RegionKind
    q: Pieces
    kv: Pieces

    @property
    def region(self) -> Region:
        """The rectangle of the concatenated queries and keys."""
        return Region(self.kind, range(tokens(self.q)), range(tokens(self.kv)))


Calls = tuple[KernelCall, ...]


def tokens(pieces: Pieces) -> int:
    """How many rows the pieces have together."""
    return sum(len(piece.rows) for piece in pieces)


def kernel_calls(op: Fused, problem: Problem, rank: int) -> Calls:
    """The kernel calls of an operation on one rank; none if the mask leaves nothing of its blocks."""
    return calls_of(problem, classes(op, problem, rank))


def classes(op: Fused, problem: Problem, rank):
    """The class of each of its blocks, a row of them for each query chunk, on one rank or an array of ranks."""
    return tuple(tuple(problem.blocks.of(q.owner(rank), kv.owner(rank)) for kv in op.keys) for q in op.queries)


@lru_cache(maxsize=4096)
def calls_of(problem: Problem, found: tuple[tuple[int, ...], ...]) -> Calls:
    """The kernel calls of blocks of these classes (see `classes`)."""
    return union([[problem.blocks.regions_of(int(kind)) for kind in row] for row in found])


def union(regions: Sequence[Sequence[Regions]]) -> Calls:
    """The kernel calls of blocks with these regions, by query chunk and key chunk."""
    alone = [
        KernelCall(region.kind, (Piece(i, region.q),), (Piece(j, region.kv),))
        for i, row in enumerate(regions)
        for j, of_block in enumerate(row)
        for region in (given.plain for given in of_block)
    ]
    full = [call for call in alone if call.kind is RegionKind.FULL]
    ways = (_joined(_joined(full, keys=keys), keys=not keys) for keys in (True, False))
    return (*min(ways, key=len), *(call for call in alone if call.kind is not RegionKind.FULL))


def _joined(calls: Iterable[KernelCall], *, keys: bool) -> list[KernelCall]:
    """The calls with those as one that have the same queries, with the `keys` of all, or the other way round."""
    together: dict[Pieces, list[Piece]] = {}
    for call in calls:
        same, other = (call.q, call.kv) if keys else (call.kv, call.q)
        together.setdefault(same, []).extend(other)
    pairs = [(same, tuple(sorted(pieces, key=lambda x: (x.chunk, x.rows.start)))) for same, pieces in together.items()]
    return [KernelCall(RegionKind.FULL, *(pair if keys else pair[::-1])) for pair in pairs]
