"""Dealers: how a pack of documents is dealt to chunks, where a layout of the whole sequence would not know of them.

zigzag_documents   every document is cut into 2n pieces, and chunk i gets pieces i and 2n - 1 - i of each: equal
                   work by document. The chunks take turns in being the first, so that short documents don't all
                   start on the same one
whole_documents    no document is cut: the one with most work first, each to the chunk with the least so far (LPT)
blocks             the sequence is cut into equal blocks, which are dealt in turn, those with most work first, to
                   all chunks and back again (like the PTRR load balancer of PyTorch's context parallelism)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from sp_bench.plan.layout import Positions, piece

if TYPE_CHECKING:
    from sp_bench.plan.documents import Packed

BLOCKS_EACH = 16
"""How many blocks a chunk gets from the dealer `blocks`."""


@dataclass(frozen=True)
class Deal:
    """A pack dealt by one of the dealers above."""

    mask: Packed
    dealer: str

    def __call__(self, chunk: int, chunks: int, seqlen: int) -> Positions:
        """The positions of one chunk of `chunks`, ascending."""
        return self.all(chunks)[chunk]

    def all(self, chunks: int) -> tuple[Positions, ...]:
        """The positions of every chunk."""
        return _dealt(self.mask, self.dealer, chunks)

    def tokens(self, chunks: int) -> np.ndarray:
        """The tokens of every chunk: (chunks,)."""
        return _tokens(self.mask, self.dealer, chunks)


@lru_cache(maxsize=32)
def _dealt(mask: Packed, dealer: str, chunks: int) -> tuple[Positions, ...]:
    return tuple(_joined(runs) for runs in DEALERS[dealer](mask, chunks))


@lru_cache(maxsize=32)
def _tokens(mask: Packed, dealer: str, chunks: int) -> np.ndarray:
    return np.array([sum(map(len, runs)) for runs in _dealt(mask, dealer, chunks)])


def _joined(runs: list[range]) -> Positions:
    """The runs in order, neighbours joined, without empty ones."""
    found: list[range] = []
    for run in sorted(filter(None, runs), key=lambda run: run.start):
        if found and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return tuple(found)


def _documents(mask: Packed) -> list[range]:
    ends = list(accumulate(mask.lengths))
    return [range(end - length, end) for end, length in zip(ends, mask.lengths, strict=True)]


def _zigzag_documents(mask: Packed, chunks: int) -> list[list[range]]:
    dealt: list[list[range]] = [[] for _ in range(chunks)]
    turn = 0
    for document in _documents(mask):
        base, longer = divmod(len(document), 2 * chunks)
        start = document.start
        for index in range(2 * chunks if base else longer):
            to, stop = min(index, 2 * chunks - 1 - index), start + base + (index < longer)
            dealt[(to + turn) % chunks].append(range(start, stop))
            start = stop
        turn += len(document)  # `longer` pieces have a token more: the next document starts behind them
    return dealt


def _whole_documents(mask: Packed, chunks: int) -> list[list[range]]:
    dealt: list[list[range]] = [[] for _ in range(chunks)]
    least = [(0, 0, chunk) for chunk in range(chunks)]
    documents, work = _documents(mask), mask.work_of_documents
    for index in np.lexsort((-np.array(mask.lengths), -work)):
        done, tokens, chunk = heapq.heappop(least)
        dealt[chunk].append(documents[index])
        heapq.heappush(least, (done + int(work[index]), tokens + len(documents[index]), chunk))
    return dealt


def _blocks(mask: Packed, chunks: int) -> list[list[range]]:
    count = min(BLOCKS_EACH * chunks, mask.seqlen)
    count -= count % chunks if count > chunks else 0
    dealt: list[list[range]] = [[] for _ in range(chunks)]
    blocks = [piece(index, count, mask.seqlen) for index in range(count)]
    first, stop = mask.sees(np.arange(mask.seqlen))
    work = np.add.reduceat(stop - first, [block.start for block in blocks])
    for index, block in enumerate(np.argsort(-work, kind="stable")):
        turn, place = divmod(index, chunks)
        dealt[chunks - 1 - place if turn % 2 else place].append(blocks[block])
    return dealt


DEALERS: dict[str, Callable[[Packed, int], list[list[range]]]] = {
    "zigzag_documents": _zigzag_documents,
    "whole_documents": _whole_documents,
    "blocks": _blocks,
}
"""The layouts that know the documents of a pack: (pack, chunks) -> the runs of positions of each chunk."""
