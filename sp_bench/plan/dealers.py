"""Dealers: how a pack of documents is dealt to chunks, where a layout of the whole sequence would not know of them.

zigzag_documents   every document is cut into 2n pieces, and chunk i gets pieces i and 2n - 1 - i of each: equal
                   work by document. The chunks take turns in being the first, so that short documents don't all
                   start on the same one
whole_documents    no document is cut: the one with most work first, each to the chunk with the least so far (LPT)
blocks             the sequence is cut into equal blocks, which are dealt in turn, those with most work first, to
                   all chunks and back again (like the PTRR load balancer of PyTorch's context parallelism)
balanced           the sequence is cut into equal blocks; those with most work first, each goes to the chunk with the
                   least work so far of those that lack blocks, so that all get as many (MagiAttention's dispatch)
hybrid             each document goes to a sub-group of neighbouring chunks: the smallest power of two of them with at
                   most so many tokens each; those of many chunks and most work first, each to the sub-group with least
                   work so far. Inside it is zigzag (Megatron's hybrid context parallelism). Chunks differ in tokens
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np

from sp_bench.plan.layout import LAYOUTS, Layout, Positions, piece

BLOCKS_EACH = 16
"""How many blocks a chunk gets from the dealer `blocks`."""
EVEN = 1.005
"""The dealer `balanced` takes the largest blocks with which the busiest chunk has at most this multiple of the mean."""
EVEN_ENOUGH, MOST_CUTS = 1.03, 16
"""Sub-groups of the dealer `hybrid` grow until the busiest chunk has at most this multiple of the mean, or documents of
a 16th of a chunk are cut."""
FOR_ANY = ("zigzag_documents", "whole_documents", "blocks")
"""The dealers that every method of any layout takes."""


class Pack(Protocol):
    """Documents packed into one sequence, as plan.documents has them: what a dealer asks of a pack."""

    @property
    def queries(self) -> tuple[int, ...]:
        """Tokens of each document that are dealt, in order."""
        ...

    @property
    def seqlen(self) -> int:
        """Those of all documents."""
        ...

    @property
    def work_of_documents(self) -> np.ndarray:
        """Pairs of query and key that each document computes: (documents,)."""
        ...

    def work_before(self, positions: np.ndarray) -> np.ndarray:
        """Pairs of query and key of all queries before each position."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Deal:
    """A pack dealt by one of the dealers above."""

    mask: Pack
    dealer: str
    block_tokens: int | None = None
    """Tokens of a block that is dealt, at most; None: as the dealer has it."""

    def __call__(self, chunk: int, chunks: int, seqlen: int) -> Positions:
        """The positions of one chunk of `chunks`, ascending."""
        return self.all(chunks)[chunk]

    def all(self, chunks: int) -> tuple[Positions, ...]:
        """The positions of every chunk."""
        return _dealt(self, chunks)

    def tokens(self, chunks: int) -> np.ndarray:
        """The tokens of every chunk: (chunks,)."""
        return _tokens(self, chunks)


@dataclass(frozen=True)
class Dealt(Layout):
    """A layout whose chunks were dealt one by one (plan.dealers). A chunk, or a rank, may have no token."""

    ranges: Deal  # pyright: ignore[reportIncompatibleMethodOverride]

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
        """Runs: what was there before was dealt with other documents."""
        return replace(LAYOUTS["contiguous"], head_parallel=self.head_parallel)

    def gives_all_work(self, n: int, seqlen: int) -> bool:
        return bool(self.ranges.tokens(n // self.head_parallel).all())

    def boundary(self, chunks: int, seqlen: int) -> int:
        raise NotImplementedError("every chunk differs")

    def refuse(self, n: int, seqlen: int, key: str = "seqlen") -> None:
        """Any number of ranks will do."""


@lru_cache(maxsize=32)
def _dealt(deal: Deal, chunks: int) -> tuple[Positions, ...]:
    return tuple(_joined(runs) for runs in DEALERS[deal.dealer](deal, chunks))


@lru_cache(maxsize=32)
def _tokens(deal: Deal, chunks: int) -> np.ndarray:
    return np.array([sum(map(len, runs)) for runs in _dealt(deal, chunks)])


def _joined(runs: list[range]) -> Positions:
    """The runs in order, neighbours joined, without empty ones."""
    found: list[range] = []
    for run in sorted(filter(None, runs), key=lambda run: run.start):
        if found and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return tuple(found)


def _documents(mask: Pack) -> list[range]:
    ends = list(accumulate(mask.queries))
    return [range(end - length, end) for end, length in zip(ends, mask.queries, strict=True)]


def _zigzag_documents(deal: Deal, chunks: int) -> list[list[range]]:
    dealt: list[list[range]] = [[] for _ in range(chunks)]
    turn = 0
    for document in _documents(deal.mask):
        base, longer = divmod(len(document), 2 * chunks)
        start = document.start
        for index in range(2 * chunks if base else longer):
            to, stop = min(index, 2 * chunks - 1 - index), start + base + (index < longer)
            dealt[(to + turn) % chunks].append(range(start, stop))
            start = stop
        turn += len(document)  # `longer` pieces have a token more: the next document starts behind them
    return dealt


def _whole_documents(deal: Deal, chunks: int) -> list[list[range]]:
    mask, dealt = deal.mask, [list[range]() for _ in range(chunks)]
    least = [(0, 0, chunk) for chunk in range(chunks)]
    documents, work = _documents(mask), mask.work_of_documents
    for index in np.lexsort((-np.array(mask.queries), -work)):
        done, tokens, chunk = heapq.heappop(least)
        dealt[chunk].append(documents[index])
        heapq.heappush(least, (done + int(work[index]), tokens + len(documents[index]), chunk))
    return dealt


def _blocks(deal: Deal, chunks: int) -> list[list[range]]:
    seqlen, dealt = deal.mask.seqlen, [list[range]() for _ in range(chunks)]
    each = -(-seqlen // (deal.block_tokens * chunks)) if deal.block_tokens else BLOCKS_EACH
    blocks, work = _cut(deal.mask, each * chunks, chunks)
    for index, block in enumerate(np.argsort(-work, kind="stable")):
        turn, place = divmod(index, chunks)
        dealt[chunks - 1 - place if turn % 2 else place].append(blocks[block])
    return dealt


def _cut(mask: Pack, count: int, chunks: int) -> tuple[list[range], np.ndarray]:
    """About `count` equal blocks of the sequence, a multiple of `chunks` if there are that many, and their work."""
    count = min(count, mask.seqlen)
    count -= count % chunks if count > chunks else 0
    blocks = [piece(index, count, mask.seqlen) for index in range(count)]
    return blocks, np.diff(mask.work_before(np.array([*(block.start for block in blocks), mask.seqlen])))


def _balanced(deal: Deal, chunks: int) -> list[list[range]]:
    seqlen = deal.mask.seqlen
    if deal.block_tokens:
        return _least_first(*_cut(deal.mask, -(-seqlen // (deal.block_tokens * chunks)) * chunks, chunks), chunks)[0]
    best, least = [list[range]()], np.inf
    each = 1
    while each == 1 or (least > EVEN and each <= BLOCKS_EACH and each * chunks <= seqlen):
        dealt, imbalance = _least_first(*_cut(deal.mask, each * chunks, chunks), chunks)
        if imbalance < least:
            best, least = dealt, imbalance
        each *= 2
    return best


def _least_first(blocks: list[range], work: np.ndarray, chunks: int) -> tuple[list[list[range]], float]:
    """The blocks of each chunk, as many for all, and the busiest chunk's work over the mean."""
    dealt, room = [list[range]() for _ in range(chunks)], -(-len(blocks) // chunks)
    least = [(0, chunk) for chunk in range(chunks)]
    full: list[int] = []
    for block in np.argsort(-work, kind="stable"):
        done, chunk = heapq.heappop(least)
        dealt[chunk].append(blocks[block])
        done += int(work[block])
        if len(dealt[chunk]) < room:
            heapq.heappush(least, (done, chunk))
        else:
            full.append(done)
    busiest = max([*full, *(done for done, _ in least)])
    return dealt, busiest * chunks / max(int(work.sum()), 1)


def _hybrid(deal: Deal, chunks: int) -> list[list[range]]:
    mask = deal.mask
    if deal.block_tokens:
        return _in_sub_groups(mask, chunks, _sub_groups(mask, chunks, deal.block_tokens)[0])
    best, least, tokens = list[tuple[int, int]](), np.inf, -(-2 * mask.seqlen // chunks)
    while tokens and least > EVEN_ENOUGH:  # larger sub-groups are more even, and send more
        found, imbalance = _sub_groups(mask, chunks, tokens)
        if imbalance < least:
            best, least = found, imbalance
        tokens = tokens // 2 if tokens > mask.seqlen // (MOST_CUTS * chunks) else 0
    return _in_sub_groups(mask, chunks, best)


def _sub_groups(mask: Pack, chunks: int, tokens: int) -> tuple[list[tuple[int, int]], float]:
    """(first chunk, chunks) of each document's sub-group, with so many tokens a chunk, and the imbalance."""
    load, most = np.zeros(chunks), chunks.bit_length() - 1
    work = mask.work_of_documents
    sizes = np.array([1 << min((-(-length // tokens) - 1).bit_length(), most) for length in mask.queries])
    found, order = [(0, 1)] * len(mask.queries), np.lexsort((-work, -sizes))
    shared = int((sizes > 1).sum())  # these come first
    for index in order[:shared].tolist():
        size = int(sizes[index])
        groups = load[: chunks // size * size].reshape(-1, size)
        first = int(groups.max(axis=1).argmin()) * size
        load[first : first + size] += work[index] / size
        found[index] = (first, size)
    least = [(done, chunk) for chunk, done in enumerate(load.tolist())]
    heapq.heapify(least)
    for index in order[shared:].tolist():
        done, chunk = least[0]
        heapq.heapreplace(least, (done + float(work[index]), chunk))
        found[index] = (chunk, 1)
    each = np.array([done for done, _ in least])
    return found, float(each.max() / each.mean())


def _in_sub_groups(mask: Pack, chunks: int, sub_groups: list[tuple[int, int]]) -> list[list[range]]:
    """The pieces of each chunk: zigzag inside each document's sub-group."""
    dealt = [list[range]() for _ in range(chunks)]
    for document, (first, size) in zip(_documents(mask), sub_groups, strict=True):
        if size == 1:
            dealt[first].append(document)
            continue
        for number in range(2 * size):
            part = piece(number, 2 * size, len(document))
            to = first + min(number, 2 * size - 1 - number)
            dealt[to].append(range(document.start + part.start, document.start + part.stop))
    return dealt


DEALERS: dict[str, Callable[[Deal, int], list[list[range]]]] = {
    "zigzag_documents": _zigzag_documents,
    "whole_documents": _whole_documents,
    "blocks": _blocks,
    "balanced": _balanced,
    "hybrid": _hybrid,
}
"""The layouts that know the documents of a pack: (deal, chunks) -> the runs of positions of each chunk."""
