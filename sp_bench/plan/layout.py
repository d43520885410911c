"""Layouts: which tokens a rank owns, and what a causal mask becomes between two chunks.

A layout cuts the sequence into one chunk for each rank. Chunk i holds `positions(i, ...)`, in that order. Between
query chunk i and key chunk j the causal mask has one of three forms, by whether i is below, equal to or above j, and
each form is a few rectangles ("regions") that a kernel can do without a dense mask.

    contiguous  i*S .. (i+1)*S - 1                 Ring Attention, Liu et al. 2023: ranks with low i have little to do
    striped     i, i + n, i + 2n, ...              Striped Attention, Brandon et al. 2023, section 3
    zigzag      pieces i and 2n-1-i of 2n pieces   Zhu 2024 (zigzag blocking), Llama 3
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from sp_bench.errors import RequestError, unknown


class Mask(Enum):
    """What a query token sees of a block of as many keys as queries."""

    FULL = "full"
    CAUSAL = "causal"
    """Keys up to and including the query's own index."""
    STRICT = "strict"
    """Keys below the query's own index: the first query sees none."""


def window(mask: Mask, rows: slice, columns: slice) -> tuple[slice, slice]:
    """The queries and keys, out of `rows` and `columns`, among which `mask` is plainly FULL or CAUSAL.

    STRICT is CAUSAL shifted by one token: the first query and the last key drop out.
    """
    if mask is Mask.STRICT:
        return slice(rows.start + 1, rows.stop), slice(columns.start, columns.stop - 1)
    return rows, columns


class Part(Enum):
    """Which tokens of a chunk take part."""

    WHOLE = "whole"
    FIRST = "first half"
    SECOND = "second half"

    def slice(self, tokens: int) -> slice:
        """The part as a slice of a chunk of `tokens` tokens."""
        half = tokens // 2
        return {Part.WHOLE: slice(0, tokens), Part.FIRST: slice(0, half), Part.SECOND: slice(half, tokens)}[self]

    def tokens(self, tokens: int) -> int:
        """How many of a chunk's `tokens` tokens the part has."""
        half = tokens // 2
        return tokens if self is Part.WHOLE else half if self is Part.FIRST else tokens - half


@dataclass(frozen=True)
class Region:
    """A rectangle of a block, with the mask inside it."""

    mask: Mask
    q: Part = Part.WHOLE
    kv: Part = Part.WHOLE

    def pairs(self, tokens: int) -> int:
        """How many (query, key) pairs the region computes in a block of `tokens` x `tokens`."""
        rows, columns = self.q.tokens(tokens), self.kv.tokens(tokens)
        if self.mask is Mask.FULL:
            return rows * columns
        return rows * (rows + 1) // 2 if self.mask is Mask.CAUSAL else rows * (rows - 1) // 2


Regions = tuple[Region, ...]


@dataclass(frozen=True)
class Layout:
    """One way to deal the tokens out. `below`, `equal` and `above` are the causal regions for i < j, i = j, i > j."""

    name: str
    pieces: int
    """How many pieces of the sequence a rank owns, each `seqlen / (pieces * n)` tokens."""
    below: Regions
    equal: Regions
    above: Regions
    ranges: Callable[[int, int, int], tuple[range, ...]]
    """(chunk, chunks, seqlen) -> the global token ids of the chunk, in its own order."""
    shared: int = 1
    """So many consecutive ranks own a chunk together, each an equal run of its tokens: those that split its heads."""

    def positions(self, rank: int, n: int, seqlen: int) -> tuple[range, ...]:
        """The global token ids that `rank` out of `n` owns, in its own order."""
        chunk = self.ranges(rank // self.shared, n // self.shared, seqlen)
        return chunk if self.shared == 1 else _run(chunk, rank % self.shared * (seqlen // n), seqlen // n)

    def order(self, q_rank, kv_rank):
        """0, 1 or 2: the chunk of `q_rank`'s tokens is below, equal to or above that of `kv_rank`'s (or of arrays)."""
        q, kv = q_rank // self.shared, kv_rank // self.shared
        return 1 + 1 * (q > kv) - 1 * (q < kv)

    def regions(self, q_rank: int, kv_rank: int, causal: bool) -> Regions:
        """What is computed between the chunks of two ranks' tokens; empty if fully masked."""
        return self.cases(causal)[self.order(q_rank, kv_rank)]

    def cases(self, causal: bool) -> tuple[Regions, Regions, Regions]:
        """The regions by `order`."""
        return (self.below, self.equal, self.above) if causal else (_FULL, _FULL, _FULL)

    def refuse(self, n: int, seqlen: int) -> None:
        """Raise RequestError where the sequence can't be dealt out evenly."""
        unit = math.lcm(self.pieces * n // self.shared, n)
        if seqlen % unit:
            low, high = seqlen // unit * unit, (seqlen // unit + 1) * unit
            raise RequestError(
                f"seqlen={seqlen}",
                f"the {self.name} layout cuts it into {unit} equal pieces for {n} ranks, so {unit} must divide it",
                f"seqlen={low} or {high} would work" if low else f"seqlen={high} would work",
            )


def _run(ranges: Sequence[range], start: int, size: int) -> tuple[range, ...]:
    """`size` elements from the `start`-th on of some ranges in a row."""
    found = []
    for piece in ranges:
        found.append(piece[max(start, 0) : max(start + size, 0)])
        start -= len(piece)
    return tuple(filter(None, found))


_FULL = (Region(Mask.FULL),)
_CAUSAL = (Region(Mask.CAUSAL),)


def _contiguous(chunk: int, n: int, seqlen: int) -> tuple[range, ...]:
    size = seqlen // n
    return (range(chunk * size, (chunk + 1) * size),)


def _striped(chunk: int, n: int, seqlen: int) -> tuple[range, ...]:
    return (range(chunk, seqlen, n),)


def _zigzag(chunk: int, n: int, seqlen: int) -> tuple[range, ...]:
    size = seqlen // (2 * n)
    mirror = 2 * n - 1 - chunk
    return range(chunk * size, (chunk + 1) * size), range(mirror * size, (mirror + 1) * size)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("contiguous", 1, below=(), equal=_CAUSAL, above=_FULL, ranges=_contiguous),
        Layout("striped", 1, below=(Region(Mask.STRICT),), equal=_CAUSAL, above=_CAUSAL, ranges=_striped),
        Layout(
            "zigzag",
            2,
            below=(Region(Mask.FULL, q=Part.SECOND),),
            equal=_CAUSAL,
            above=(Region(Mask.FULL, kv=Part.FIRST),),
            ranges=_zigzag,
        ),
    )
}


def layout_named(name: str, *, causal: bool) -> Layout:
    """The layout of that name; `auto` is the one that balances the work: striped if causal, else contiguous.

    Raises RequestError with the nearest name if there is none.
    """
    if name == "auto":
        name = "striped" if causal else "contiguous"
    if name not in LAYOUTS:
        raise unknown("method.layout", name, [*LAYOUTS, "auto"])
    return LAYOUTS[name]
