"""Assignments of tokens: which chunk gets which tokens of a pack, by layouts that know its documents.

zigzag_documents   every document is cut into 2n pieces, and chunk i gets pieces i and 2n - 1 - i of each: equal
                   work by document. The chunks take turns in being the first, so that short documents don't all
                   start on the same one
whole_documents    no document is cut: the one with most work first, each to the chunk with the least so far (LPT)
blocks             the sequence is cut into equal blocks, which are assigned in turn, those with most work first, to
                   all chunks and back again (like the PTRR load balancer of PyTorch's context parallelism)
balanced           the sequence is cut into equal blocks; those with most work first, each goes to the chunk with the
                   least work so far of those that lack blocks, so that all get as many (MagiAttention's dispatch)
hybrid             each document goes to a sub-group of neighbouring chunks: the smallest power of two of them with at
                   most so many tokens each; those of many chunks and most work first, each to the sub-group with least
                   work so far. Inside it is zigzag (Megatron's hybrid context parallelism). Chunks differ in tokens
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sp_bench.plan.layout import LAYOUTS, Layout, Positions

if TYPE_CHECKING:
    from sp_bench.plan.documents import Packed

BLOCKS_EACH = 16
"""How many blocks a chunk gets under the assignment `blocks`."""
EVEN = 1.005
"""`balanced` takes the largest blocks with which the busiest chunk has at most this multiple of the mean."""
EVEN_ENOUGH, MOST_CUTS = 1.03, 16
"""Sub-groups of `hybrid` grow until the busiest chunk has at most this multiple of the mean, or documents of a 16th of
a chunk are cut."""
FOR_ANY = ("zigzag_documents", "whole_documents", "blocks")
"""The assignments that every method of any layout takes."""


@dataclass(frozen=True)
class TokenAssignment:
    """The tokens of a pack assigned to chunks in one of the ways above."""

    mask: Packed
    name: str
    """One of ASSIGNMENTS."""
    block_tokens: int | None = None
    """Tokens of a block, at most; None: the assignment chooses."""

    def __call__(self, chunk: int, chunks: int, seqlen: int) -> Positions:
        """The positions of one chunk of `chunks`, ascending."""
        return self.all(chunks)[chunk]

    @lru_cache(maxsize=32)  # noqa: B019  # equal ones share it
    def all(self, chunks: int) -> tuple[Positions, ...]:
        """The positions of every chunk."""
        return tuple(tuple(map(range, start.tolist(), stop.tolist())) for start, stop in self.runs(chunks))

    @lru_cache(maxsize=32)  # noqa: B019
    def runs(self, chunks: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The runs of neighbouring positions of every chunk, ascending: (first, behind the last), (runs,) each. They
        are the pieces of each in order, neighbours joined, without empty ones.
        """
        pieces = ASSIGNMENTS[self.name](self, chunks)
        filled = np.flatnonzero(pieces.stop > pieces.start)
        filled = filled[np.lexsort((pieces.start[filled], pieces.chunk[filled]))]
        chunk, start, stop = (each[filled] for each in pieces)
        begins = np.flatnonzero(np.append(True, (chunk[1:] != chunk[:-1]) | (start[1:] != stop[:-1])))
        chunk, start, stop = chunk[begins], start[begins], stop[np.append(begins[1:], chunk.size) - 1]
        ends = np.searchsorted(chunk, np.arange(1, chunks))
        return [*zip(np.split(start, ends), np.split(stop, ends), strict=True)]

    @lru_cache(maxsize=32)  # noqa: B019
    def tokens(self, chunks: int) -> np.ndarray:
        """The tokens of every chunk: (chunks,)."""
        return np.array([int((stop - start).sum()) for start, stop in self.runs(chunks)])


class Pieces(NamedTuple):
    """Runs of positions and the chunk of each, in any order; some may be empty. (pieces,) each."""

    chunk: np.ndarray
    """The chunk that gets each."""
    start: np.ndarray
    stop: np.ndarray
    """The position behind the last one."""


@dataclass(frozen=True)
class AssignedLayout(Layout):
    """A layout of a pack by an assignment. A chunk, or a rank, may have no token."""

    ranges: TokenAssignment  # pyright: ignore[reportIncompatibleMethodOverride]

    def tokens(self, rank, n: int, seqlen: int):
        degree = self.head_parallel
        tokens = self.chunk_tokens(rank // degree, n // degree, seqlen)
        return tokens // degree + 1 * (rank % degree < tokens % degree)

    def chunk_tokens(self, chunk, chunks: int, seqlen: int):
        tokens = self.ranges.tokens(chunks)[chunk]
        return int(tokens) if isinstance(chunk, int) else tokens

    def is_even(self, n: int, seqlen: int) -> bool:
        return False

    def most(self, n: int, seqlen: int) -> int:
        return -(-self.largest(n, seqlen) // self.head_parallel)

    def largest(self, n: int, seqlen: int) -> int:
        return int(self.ranges.tokens(n // self.head_parallel).max())

    @property
    def of_history(self) -> Layout:
        """Runs: what was there before was assigned with other documents."""
        return replace(LAYOUTS["contiguous"], head_parallel=self.head_parallel)

    def gives_all_work(self, n: int, seqlen: int) -> bool:
        return bool(self.ranges.tokens(n // self.head_parallel).all())

    def boundaries(self, chunks: int, seqlen: int) -> Sequence[int]:
        return range(1, chunks)

    def refuse(self, n: int, seqlen: int, key: str = "seqlen") -> None:
        """Any number of ranks will do."""


def _documents(mask: Packed) -> tuple[np.ndarray, np.ndarray]:
    """(first, behind the last) position of each document."""
    ends = np.cumsum(mask.queries)
    return ends - mask.queries, ends


def _zigzag_documents(assignment: TokenAssignment, chunks: int) -> Pieces:
    start, stop = _documents(assignment.mask)
    base, longer = np.divmod(stop - start, 2 * chunks)
    many = np.where(base > 0, 2 * chunks, longer)
    of = np.repeat(np.arange(many.size), many)
    number = np.arange(of.size) - np.repeat(np.cumsum(many) - many, many)
    at = start[of] + number * base[of] + np.minimum(number, longer[of])
    # `longer` pieces have a token more: the next document starts behind them.
    to = (np.minimum(number, 2 * chunks - 1 - number) + start[of]) % chunks
    return Pieces(to, at, at + base[of] + (number < longer[of]))


def _whole_documents(assignment: TokenAssignment, chunks: int) -> Pieces:
    mask, to = assignment.mask, np.zeros(len(assignment.mask.queries), np.int64)
    least = [(0, 0, chunk) for chunk in range(chunks)]
    work = mask.work_of_documents
    for index in np.lexsort((-np.array(mask.queries), -work)).tolist():
        done, tokens, chunk = heapq.heappop(least)
        to[index] = chunk
        heapq.heappush(least, (done + int(work[index]), tokens + mask.queries[index], chunk))
    return Pieces(to, *_documents(mask))


def _blocks(assignment: TokenAssignment, chunks: int) -> Pieces:
    each = -(-assignment.mask.seqlen // (assignment.block_tokens * chunks)) if assignment.block_tokens else BLOCKS_EACH
    edges, work = _cut(assignment.mask, each * chunks, chunks)
    turn, place = np.divmod(np.arange(work.size), chunks)
    to = np.empty(work.size, np.int64)
    to[np.argsort(-work, kind="stable")] = np.where(turn % 2, chunks - 1 - place, place)
    return Pieces(to, edges[:-1], edges[1:])


def _cut(mask: Packed, count: int, chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """The edges of about `count` equal blocks of the sequence, a multiple of `chunks` if there are that many, and their
    work: (blocks + 1,), (blocks,).
    """
    count = min(count, mask.seqlen)
    count -= count % chunks if count > chunks else 0
    base, longer = divmod(mask.seqlen, count)
    numbers = np.arange(count + 1)
    edges = numbers * base + np.minimum(numbers, longer)
    return edges, np.diff(mask.work_before(edges))


def _balanced(assignment: TokenAssignment, chunks: int) -> Pieces:
    seqlen = assignment.mask.seqlen
    if assignment.block_tokens:
        edges, work = _cut(assignment.mask, -(-seqlen // (assignment.block_tokens * chunks)) * chunks, chunks)
        return Pieces(_least_first(work, chunks)[0], edges[:-1], edges[1:])
    best, least = Pieces(*[np.zeros(0, np.int64)] * 3), np.inf
    each = 1
    while each == 1 or (least > EVEN and each <= BLOCKS_EACH and each * chunks <= seqlen):
        edges, work = _cut(assignment.mask, each * chunks, chunks)
        to, imbalance = _least_first(work, chunks)
        if imbalance < least:
            best, least = Pieces(to, edges[:-1], edges[1:]), imbalance
        each *= 2
    return best


def _least_first(work: np.ndarray, chunks: int) -> tuple[np.ndarray, float]:
    """The chunk of each block, as many for all, and the busiest chunk's work over the mean."""
    to, assigned, room = np.zeros(work.size, np.int64), [0] * chunks, -(-work.size // chunks)
    least = [(0, chunk) for chunk in range(chunks)]
    full: list[int] = []
    for block in np.argsort(-work, kind="stable").tolist():
        done, chunk = heapq.heappop(least)
        to[block] = chunk
        assigned[chunk] += 1
        done += int(work[block])
        if assigned[chunk] < room:
            heapq.heappush(least, (done, chunk))
        else:
            full.append(done)
    busiest = max([*full, *(done for done, _ in least)])
    return to, busiest * chunks / max(int(work.sum()), 1)


def _hybrid(assignment: TokenAssignment, chunks: int) -> Pieces:
    mask = assignment.mask
    if assignment.block_tokens:
        return _in_sub_groups(mask, chunks, _sub_groups(mask, chunks, assignment.block_tokens)[0])
    best, least, tokens = list[tuple[int, int]](), np.inf, -(-2 * mask.seqlen // chunks)
    while tokens and least > EVEN_ENOUGH:  # larger sub-groups are more even, and send more
        sub_groups, imbalance = _sub_groups(mask, chunks, tokens)
        if imbalance < least:
            best, least = sub_groups, imbalance
        tokens = tokens // 2 if tokens > mask.seqlen // (MOST_CUTS * chunks) else 0
    return _in_sub_groups(mask, chunks, best)


def _sub_groups(mask: Packed, chunks: int, tokens: int) -> tuple[list[tuple[int, int]], float]:
    """(first chunk, chunks) of each document's sub-group, with so many tokens a chunk, and the imbalance."""
    load, most = np.zeros(chunks), chunks.bit_length() - 1
    work = mask.work_of_documents
    sizes = np.array([1 << min((-(-length // tokens) - 1).bit_length(), most) for length in mask.queries])
    sub_groups, order = [(0, 1)] * len(mask.queries), np.lexsort((-work, -sizes))
    shared = int((sizes > 1).sum())  # these come first
    for index in order[:shared].tolist():
        size = int(sizes[index])
        groups = load[: chunks // size * size].reshape(-1, size)
        first = int(groups.max(axis=1).argmin()) * size
        load[first : first + size] += work[index] / size
        sub_groups[index] = (first, size)
    least = [(done, chunk) for chunk, done in enumerate(load.tolist())]
    heapq.heapify(least)
    for index in order[shared:].tolist():
        done, chunk = least[0]
        heapq.heapreplace(least, (done + float(work[index]), chunk))
        sub_groups[index] = (chunk, 1)
    each = np.array([done for done, _ in least])
    return sub_groups, float(each.max() / each.mean())


def _in_sub_groups(mask: Packed, chunks: int, sub_groups: list[tuple[int, int]]) -> Pieces:
    """The pieces of each chunk: zigzag inside each document's sub-group."""
    start, stop = _documents(mask)
    first, size = np.array(sub_groups).T
    many = np.where(size == 1, 1, 2 * size)
    of = np.repeat(np.arange(many.size), many)
    number = np.arange(of.size) - np.repeat(np.cumsum(many) - many, many)
    base, longer = (each[of] for each in np.divmod(stop - start, many))
    at = start[of] + number * base + np.minimum(number, longer)
    to = first[of] + np.minimum(number, many[of] - 1 - number)
    return Pieces(to, at, at + base + (number < longer))


ASSIGNMENTS: dict[str, Callable[[TokenAssignment, int], Pieces]] = {
    "zigzag_documents": _zigzag_documents,
    "whole_documents": _whole_documents,
    "blocks": _blocks,
    "balanced": _balanced,
    "hybrid": _hybrid,
}
"""The layouts that know the documents of a pack: (assignment, chunks) -> the runs of positions and their chunks."""
