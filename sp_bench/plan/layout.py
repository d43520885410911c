"""Layouts: which tokens a rank owns.

A layout cuts the sequence into one chunk per rank, or per group of ranks that split its heads. Chunk i holds
`ranges(i, ...)`, in that order. If seqlen is not a multiple of the pieces, the first pieces have one token more.

    contiguous  i*S .. (i+1)*S - 1                 Ring Attention, Liu et al. 2023; causal, low ranks have little work
    striped     i, i + n, i + 2n, ...              Striped Attention, Brandon et al. 2023, section 3
    zigzag      pieces i and 2n-1-i of 2n pieces   Zhu 2024 (zigzag blocking), Llama 3
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np

from sp_bench.errors import RequestError

Positions = tuple[range, ...]
"""Global token positions of a chunk, in its order and ascending; no range is empty."""


@dataclass(frozen=True)
class Layout:
    """One way to distribute the tokens over ranks."""

    name: str
    pieces: int
    """How many pieces of the sequence make a chunk: 1, or 2 with the second counted from the end."""
    ranges: Callable[[int, int, int], Positions]
    """(chunk, chunks, seqlen) -> the global positions of the chunk's tokens."""
    head_parallel: int = 1
    """How many consecutive ranks split a chunk's heads (the head-parallel degree). Each owns a run of its tokens."""

    def positions(self, rank: int, n: int, seqlen: int) -> Positions:
        """The global positions of the tokens that `rank` of `n` owns, in its own order."""
        chunk = self.ranges(rank // self.head_parallel, n // self.head_parallel, seqlen)
        if self.head_parallel == 1:
            return chunk
        run = self.run(rank, n, seqlen)
        return _taken(chunk, run.start, len(run))

    def run(self, rank: int, n: int, seqlen: int) -> range:
        """The indices within its chunk of the tokens that a rank owns."""
        degree = self.head_parallel
        place, chunk = rank % degree, self.chunk_tokens(rank // degree, n // degree, seqlen)
        base, longer = divmod(chunk, degree)
        start = place * base + min(place, longer)
        return range(start, start + base + (place < longer))

    def tokens(self, rank, n: int, seqlen: int):
        """How many tokens each of one or an array of ranks owns; a single number where all own the same."""
        chunk = self.chunk_tokens(rank // self.head_parallel, n // self.head_parallel, seqlen)
        if self.head_parallel == 1 or seqlen % n == 0:
            return chunk if seqlen % n else seqlen // n
        return chunk // self.head_parallel + 1 * (rank % self.head_parallel < chunk % self.head_parallel)

    def chunk_tokens(self, chunk, chunks: int, seqlen: int):
        """How many tokens each of one or an array of chunks has; a single number where all have the same."""
        if seqlen % chunks == 0 and not self.boundaries(chunks, seqlen):
            return seqlen // chunks
        base, longer = divmod(seqlen, chunks * self.pieces)
        tokens = self.pieces * base + 1 * (chunk < longer)
        return tokens if self.pieces == 1 else tokens + 1 * (2 * chunks - 1 - chunk < longer)

    def is_even(self, n: int, seqlen: int) -> bool:
        """Whether all ranks own as many tokens, in chunks of one size."""
        return seqlen % n == 0 and not self.boundaries(n // self.head_parallel, seqlen)

    def most(self, n: int, seqlen: int) -> int:
        """Tokens of the rank that owns most."""
        return -(-seqlen // n)

    def largest(self, n: int, seqlen: int) -> int:
        """Tokens of the largest chunk."""
        return -(-seqlen * self.head_parallel // n)

    def gives_all_work(self, n: int, seqlen: int) -> bool:
        """Whether every chunk has a token. Each query sees its own key, so that then every rank has work."""
        return seqlen >= n // self.head_parallel

    @property
    def of_history(self) -> Layout:
        """The layout of tokens that were there before."""
        return self

    def boundaries(self, chunks: int, seqlen: int) -> Sequence[int]:
        """The chunks whose piece lengths may differ from those of the chunk before; none where all are alike."""
        longer = seqlen % (chunks * self.pieces)
        first = longer if longer < chunks else (2 * chunks - longer) % chunks
        return (first,) if first else ()

    def refuse(self, n: int, seqlen: int, key: str = "seqlen") -> None:
        """Raise RequestError where a length, that of `key`, leaves a piece or a rank without a token."""
        least = n // self.head_parallel * max(self.pieces, self.head_parallel)
        if seqlen < least:
            pieces = f"each of {self.pieces} pieces of every chunk" if self.pieces > 1 else "every chunk"
            raise RequestError(
                f"{key}={seqlen}",
                f"the {self.name} layout for {n} ranks has at least a token in {pieces} and on every rank",
                f"{key}={least} or more would work",
            )


class Cut(NamedTuple):
    """A run of tokens, by their number, and the position of the first of them."""

    tokens: range
    position: int


Cuts = tuple[Cut, ...]
"""Disjoint, ascending by number; tokens in none of them are left out."""


def joined_cuts(cuts: Iterable[Cut]) -> Cuts:
    """The cuts that have tokens, ascending, with those as one that are neighbours on both sides."""
    joined: list[Cut] = []
    for tokens, position in sorted((cut for cut in cuts if cut.tokens), key=lambda cut: cut.tokens.start):
        last = joined[-1] if joined else None
        if last and (last.tokens.stop, last.position + len(last.tokens)) == (tokens.start, position):
            joined[-1] = Cut(range(last.tokens.start, tokens.stop), last.position)
        else:
            joined.append(Cut(tokens, position))
    return tuple(joined)


def placed(runs: Iterable[range], cuts: Cuts) -> Positions:
    """The positions, ascending, of runs of tokens by number."""
    starts, positions = [cut.tokens.start for cut in cuts], []
    for run in filter(None, runs):
        for tokens, position in cuts[max(bisect_right(starts, run.start) - 1, 0) : bisect_right(starts, run[-1])]:
            first, behind = (-(-(edge - run.start) // run.step) for edge in (tokens.start, tokens.stop))
            part, ahead = run[max(first, 0) : max(behind, 0)], position - tokens.start
            positions.append(range(part.start + ahead, part.stop + ahead, part.step))
    return tuple(sorted(filter(None, positions), key=lambda run: run.start))


@dataclass(frozen=True)
class Shards:
    """The tokens of one side of an attention, its queries or its keys, as a layout assigns them to `n` ranks.

    Each of the `stretches` is assigned on its own, one after the other: keys may be a history and then the keys of the
    queries' own tokens, so that a rank has these where it has the queries. A stretch but the last may be too short for
    every rank to have some of it.
    """

    layout: Layout
    n: int
    stretches: tuple[int, ...]
    """Tokens of each stretch."""
    cuts: Cuts = ()
    """The tokens of all stretches, numbered as they are assigned, that are part of it, with their positions; without
    any, all of them in this order. A rank has its tokens in the order of their positions."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.n, self.stretches, self.cuts))

    def __hash__(self) -> int:  # of an assigned layout it takes long, and is asked for again and again
        return self._hash

    def __reduce__(self):  # hashes differ from process to process
        return type(self), (self.layout, self.n, self.stretches, self.cuts)

    @classmethod
    def of(cls, layout: Layout, n: int, seqlen: int, history: int = 0) -> Self:
        """The shards of `seqlen` tokens, of which the first `history` are assigned on their own."""
        return cls(layout, n, (history, seqlen - history) if history else (seqlen,))

    @property
    def seqlen(self) -> int:
        """Tokens that are part of it."""
        return sum(len(cut.tokens) for cut in self.cuts) if self.cuts else sum(self.stretches)

    @property
    def chunks(self) -> int:
        """How many layout chunks there are."""
        return self.n // self.layout.head_parallel

    @property
    def in_runs(self) -> bool:
        """Whether the tokens of a rank lie in one run in its chunk."""
        return len(self.stretches) == 1 and not self.cuts

    def tokens(self, rank) -> Any:
        """How many tokens each of one or an array of ranks owns; a single number where all own the same."""
        if self.cuts or (isinstance(rank, np.ndarray) and not self.is_even):
            return _of(self._rank_tokens, rank)
        return sum(layout.tokens(rank, self.n, seqlen) for layout, seqlen in self._assigned)

    def chunk_tokens(self, chunk) -> Any:
        """How many tokens each of one or an array of chunks has; a single number where all have the same."""
        if self.cuts:
            return _of(self._cut_chunk_tokens, chunk)
        return sum(layout.chunk_tokens(chunk, self.chunks, seqlen) for layout, seqlen in self._assigned)

    def positions(self, rank: int) -> Positions:
        """The positions of the tokens that a rank owns, in its own order."""
        return self._one_after_the_other(lambda layout, seqlen: layout.positions(rank, self.n, seqlen))

    def chunk_positions(self, chunk: int) -> Positions:
        """The positions of a chunk's tokens, in its order, ascending."""
        return self._one_after_the_other(lambda layout, seqlen: layout.ranges(chunk, self.chunks, seqlen))

    def runs(self, rank: int) -> tuple[range, ...]:
        """The indices within its chunk of the tokens that a rank owns: a run of each stretch, or of what is left."""
        degree = self.layout.head_parallel
        if self.cuts:
            return _rows_among(self.positions(rank), self.chunk_positions(rank // degree))
        chunk = [layout.chunk_tokens(rank // degree, self.chunks, seqlen) for layout, seqlen in self._assigned]
        runs = [layout.run(rank, self.n, seqlen) for layout, seqlen in self._assigned]
        starts = accumulate(chunk, initial=0)
        return tuple(range(start + run.start, start + run.stop) for start, run in zip(starts, runs, strict=False))

    @cached_property
    def is_even(self) -> bool:
        """Whether all ranks own as many tokens, in chunks of one size."""
        if self.cuts:
            return len({*self._rank_tokens.tolist()}) == len({*self._cut_chunk_tokens.tolist()}) == 1
        return all(layout.is_even(self.n, seqlen) for layout, seqlen in self._assigned)

    @cached_property
    def most(self) -> int:
        """Tokens of the rank that owns most."""
        if self.in_runs:
            return self.layout.most(self.n, self.stretches[0])
        return max(int(self.tokens(rank)) for rank in range(self.n))

    @cached_property
    def largest(self) -> int:
        """Tokens of the largest chunk."""
        if self.in_runs:
            return self.layout.largest(self.n, self.stretches[0])
        return max(int(self.chunk_tokens(chunk)) for chunk in range(self.chunks))

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """The chunks at which the lengths of pieces change: those before each have one token more somewhere."""
        return tuple(chunk for layout, seqlen in self._assigned for chunk in layout.boundaries(self.chunks, seqlen))

    @cached_property
    def _assigned(self) -> tuple[tuple[Layout, int], ...]:
        """The layout and the tokens of each stretch."""
        *before, last = self.stretches
        return (*((self.layout.of_history, seqlen) for seqlen in before), (self.layout, last))

    @cached_property
    def _rank_tokens(self) -> np.ndarray:
        """How many tokens each rank owns: (n,). Costs of a plan ask for them once for each of its operations."""
        if self.cuts:
            return np.array([sum(map(len, self.positions(rank))) for rank in range(self.n)])
        every = sum(layout.tokens(np.arange(self.n), self.n, seqlen) for layout, seqlen in self._assigned)
        return np.broadcast_to(every, self.n)

    @cached_property
    def _cut_chunk_tokens(self) -> np.ndarray:
        return self._rank_tokens.reshape(self.chunks, -1).sum(axis=1)

    def refuse(self, key: str = "seqlen") -> None:
        """Raise RequestError where the length of the last stretch, called `key`, leaves a rank without a token."""
        self.layout.refuse(self.n, self.stretches[-1], key)

    def _one_after_the_other(self, assigned: Callable[[Layout, int], Positions]) -> Positions:
        if self.in_runs:
            return tuple(filter(None, assigned(self.layout, self.seqlen)))
        starts = accumulate(self.stretches, initial=0)
        moved = (
            range(run.start + start, run.stop + start, run.step)
            for start, (layout, seqlen) in zip(starts, self._assigned, strict=False)
            for run in assigned(layout, seqlen)
        )
        return placed(moved, self.cuts) if self.cuts else tuple(filter(None, moved))


def _of(counts: np.ndarray, index) -> Any:
    """The counts of one or an array of owners."""
    return int(counts[index]) if isinstance(index, int) else counts[index]


def _rows_among(positions: Positions, chunk: Positions) -> tuple[range, ...]:
    """The indices within a chunk of some of its positions, neighbours as one run."""
    starts, before = [run.start for run in chunk], [0, *accumulate(map(len, chunk))]
    rows: list[range] = []
    for run in positions:
        at = bisect_right(starts, run.start) - 1
        first = before[at] + (run.start - chunk[at].start) // chunk[at].step
        if rows and rows[-1].stop == first:
            rows[-1] = range(rows[-1].start, first + len(run))
        else:
            rows.append(range(first, first + len(run)))
    return tuple(rows) or (range(0),)


def _taken(ranges: Sequence[range], start: int, size: int) -> Positions:
    """The elements start <= i < start + size of the concatenated ranges."""
    pieces = []
    for piece in ranges:
        pieces.append(piece[max(start, 0) : max(start + size, 0)])
        start -= len(piece)
    return tuple(filter(None, pieces))


def piece(index: int, pieces: int, seqlen: int) -> range:
    """Piece `index` of `pieces` consecutive runs of tokens; the first seqlen % pieces of them have one token more."""
    base, longer = divmod(seqlen, pieces)
    start = index * base + min(index, longer)
    return range(start, start + base + (index < longer))


def _contiguous(chunk: int, chunks: int, seqlen: int) -> Positions:
    return (piece(chunk, chunks, seqlen),)


def _striped(chunk: int, chunks: int, seqlen: int) -> Positions:
    return (range(chunk, seqlen, chunks),)


def _zigzag(chunk: int, chunks: int, seqlen: int) -> Positions:
    return tuple(filter(None, (piece(i, 2 * chunks, seqlen) for i in (chunk, 2 * chunks - 1 - chunk))))


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("contiguous", 1, _contiguous),
        Layout("striped", 1, _striped),
        Layout("zigzag", 2, _zigzag),
    )
}
