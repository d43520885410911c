"""Kernel calls for variable lengths: how long one takes that computes many pieces, each of one document.

A call takes as long as its pieces, each at the rate of its size on a device that the others fill too, divided by what
was measured of such calls (KernelTable.variable), and at least as long as the shortest that was measured
(KernelTable.variable_least_s). A call of a single piece is one of a plain block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from sp_bench.cluster.kernel_table import KernelTable
from sp_bench.plan.memo import keep
from sp_bench.plan.pack_blocks import PackBlocks

MOSTLY_FULL = 0.75
"""Pieces that compute at least this share of the pairs of their queries and keys go by the rates of full blocks."""
LENGTHS_AN_OCTAVE = 2
"""Documents are taken together whose lengths are in the same half of an octave: their pieces are about as large."""
MOST_CELLS = 1 << 25
"""Most groups of documents times calls: above it, documents of all lengths are one group."""
FEW_KERNELS = 8
"""The seconds of blocks are kept for so many kernels: of both phases, with some numbers of heads."""


class Kernel(NamedTuple):
    """The kernel that computes the pieces: a table's kernel in one phase, on blocks of so many heads."""

    table: KernelTable
    phase: str
    batch_heads: int
    flops_per_pair: int
    """FLOPs of a (query, key) pair of a head."""
    dtype: str

    def pieces_s(self, mask: str, q_tokens, kv_tokens, pairs, whole) -> np.ndarray:
        """Seconds of pieces of a call, before what calls for variable lengths take longer: as many as `pairs`.

        `mask` is full or causal, `whole` the queries (backward: keys) of all pieces of the call, which fill the device.
        """
        outer = q_tokens if self.phase == "forward" else kv_tokens
        heads = self.batch_heads * np.maximum(1, np.round(whole / outer))
        rates = self.table.flops_per_s_of(self.phase, mask, q_tokens, kv_tokens, batch_heads=heads, dtype=self.dtype)
        return self.batch_heads * self.flops_per_pair * pairs / rates

    def factor(self, mask: str) -> float:
        """The rate of a call of several pieces over that of its pieces."""
        return self.table.variable.get(f"{self.phase}_{mask}", 1.0)

    def idle_s(self, pieces, tokens, longest):
        """Seconds of thread blocks without work (KernelTable.idle_blocks_s)."""
        return self.table.idle_blocks_s(self.phase, pieces, tokens, longest, self.batch_heads)

    def call_s(self, alone_s, several_s, pieces, tokens, longest) -> np.ndarray:
        """Seconds of calls of so many `pieces` of so many `tokens` together, along what thread blocks split.

        `alone_s` are those of their pieces, `several_s` the same by `factor`: both of one piece and of several.
        """
        idle_s = self.idle_s(pieces, tokens, longest)
        least_s = self.table.variable_least_s.get(self.phase, 0.0)
        return np.where(pieces > 1, np.maximum(several_s + idle_s, least_s), alone_s)


class Pieces(NamedTuple):
    """Pieces of calls, alike ones of a call together: (groups,) each."""

    call: np.ndarray
    """The call of each group, by its number."""
    pieces: np.ndarray
    """The number of pieces of each group."""
    q_tokens: np.ndarray
    """The mean queries of a piece."""
    kv_tokens: np.ndarray


def calls_s(kernel: Kernel, pieces: Pieces, pairs: np.ndarray) -> np.ndarray:
    """Seconds of calls with so many (query, key) pairs each, without their launches: (calls,).

    A call's pairs are its pieces' in proportion to queries x keys.
    """
    call, count, q_tokens, kv_tokens = pieces
    outer = q_tokens if kernel.phase == "forward" else kv_tokens

    def summed(of_pieces: np.ndarray) -> np.ndarray:
        return np.bincount(call, of_pieces, pairs.size)

    square, whole, number = (summed(each) for each in (count * q_tokens * kv_tokens, count * outer, count))
    longest = np.zeros(pairs.size)
    np.maximum.at(longest, call, outer)
    share = np.divide(pairs, square, out=np.zeros(pairs.size), where=square > 0)[call]
    alone, several = np.zeros(call.size), np.zeros(call.size)
    for mask, which in (("full", share >= MOSTLY_FULL), ("causal", share < MOSTLY_FULL)):
        q, kv = q_tokens[which], kv_tokens[which]
        alone[which] = kernel.pieces_s(mask, q, kv, share[which] * count[which] * q * kv, whole[call[which]])
        several[which] = alone[which] / kernel.factor(mask)
    return np.where(pairs > 0, kernel.call_s(summed(alone), summed(several), number, whole, longest), 0.0)


def blocks_s(kernel: Kernel, blocks: PackBlocks) -> np.ndarray:
    """Seconds of the kernel call of each block of a pack, without launches: (classes,)."""
    known = _KNOWN_S.setdefault(blocks, {})
    return known[kernel] if kernel in known else keep(known, kernel, _blocks_s(kernel, blocks), FEW_KERNELS)


_KNOWN_S: WeakKeyDictionary[PackBlocks, dict[Kernel, np.ndarray]] = WeakKeyDictionary()
"""Seconds of blocks as long as these are in use."""


def _blocks_s(kernel: Kernel, blocks: PackBlocks) -> np.ndarray:
    computed = np.flatnonzero(blocks.pairs > 0)
    seconds, number = np.zeros(blocks.classes), np.full(blocks.classes, -1)
    number[computed] = np.arange(computed.size)
    groups = []
    for queries, keys in _by_length(blocks, computed.size):
        asking, asked = (queries > 0).astype(float), (keys > 0).astype(float)
        count = (asking.T @ asked).ravel()
        filled = np.flatnonzero((count > 0) & (number >= 0))
        sums = (queries.T @ asked, asking.T @ keys)
        q_tokens, kv_tokens = (each.ravel()[filled] / count[filled] for each in sums)
        groups.append(Pieces(number[filled], count[filled], q_tokens, kv_tokens))
    pieces = Pieces(*map(np.concatenate, zip(*groups, strict=True)))
    seconds[computed] = calls_s(kernel, pieces, blocks.pairs[computed].astype(float))
    return seconds


def joined_s(kernel: Kernel, blocks: PackBlocks, queries: np.ndarray, keys: np.ndarray, parts: int = 1) -> np.ndarray:
    """Seconds of one call each of a query chunk with several key chunks, without launches: (calls,).

    queries: (calls,), keys: (key chunks, calls). `parts` equal parts of each document's queries have a call each.
    """
    of_queries, of_keys = blocks.tokens_of_documents.astype(float), blocks.keys_of_documents.astype(float)
    calls = np.arange(queries.size)
    among = np.zeros((blocks.chunks, queries.size))
    np.add.at(among, (keys, calls[None, :]), 1.0)
    q_tokens, kv_tokens = of_queries[:, queries] / parts, of_keys @ among
    pairs = blocks.pairs.reshape(blocks.chunks, -1)[queries[None, :], keys].sum(axis=0).astype(float)
    document, call = np.nonzero((q_tokens > 0) & (kv_tokens > 0) & (pairs > 0))
    at = document, call
    pieces = Pieces(call, np.ones(call.size), q_tokens[at], kv_tokens[at])
    return parts * calls_s(kernel, pieces, pairs / parts)


def _by_length(blocks: PackBlocks, calls: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Queries and keys of documents in chunks, (documents, chunks) each, of about one length at a time."""
    queries, keys = blocks.tokens_of_documents.astype(float), blocks.keys_of_documents.astype(float)
    length = np.floor(LENGTHS_AN_OCTAVE * np.log2(np.array(blocks.mask.lengths)))
    if np.unique(length).size * calls > MOST_CELLS:
        length[:] = 0
    for each in np.unique(length):
        yield queries[length == each], keys[length == each]
