"""Layouts: which tokens a rank owns.

A layout cuts the sequence into one chunk for each rank, or for each group of ranks that split its heads. Chunk i holds
`ranges(i, ...)`, in that order. Where chunks don't divide the sequence, its first pieces have one token more.

    contiguous  i*S .. (i+1)*S - 1                 Ring Attention, Liu et al. 2023: ranks with low i have little to do
    striped     i, i + n, i + 2n, ...              Striped Attention, Brandon et al. 2023, section 3
    zigzag      pieces i and 2n-1-i of 2n pieces   Zhu 2024 (zigzag blocking), Llama 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sp_bench.errors import RequestError

Positions = tuple[range, ...]
"""Global token positions of a chunk, in its order and ascending; no range is empty."""


@dataclass(frozen=True)
class Layout:
    """One way to deal the tokens out."""

    name: str
    pieces: int
    """How many pieces of the sequence a chunk is made of: 1, or 2 with the second one counted from the end."""
    ranges: Callable[[int, int, int], Positions]
    """(chunk, chunks, seqlen) -> the global positions of the chunk's tokens."""
    head_parallel: int = 1
    """The head-parallel degree: how many consecutive ranks split a chunk's heads. Each owns a run of its tokens."""

    def positions(self, rank: int, n: int, seqlen: int) -> Positions:
        """The global positions of the tokens that `rank` out of `n` owns, in its own order."""
        chunk = self.ranges(rank // self.head_parallel, n // self.head_parallel, seqlen)
        if self.head_parallel == 1:
            return chunk
        run = self.run(rank, n, seqlen)
        return _taken(chunk, run.start, len(run))

    def run(self, rank: int, n: int, seqlen: int) -> range:
        """Which tokens of its chunk a rank owns, by their place in the chunk."""
        degree = self.head_parallel
        place, chunk = rank % degree, self.chunk_tokens(rank // degree, n // degree, seqlen)
        base, longer = divmod(chunk, degree)
        start = place * base + min(place, longer)
        return range(start, start + base + (place < longer))

    def tokens(self, rank, n: int, seqlen: int):
        """How many tokens a rank owns, or an array of ranks; a plain number where all own as many."""
        chunk = self.chunk_tokens(rank // self.head_parallel, n // self.head_parallel, seqlen)
        if self.head_parallel == 1 or seqlen % n == 0:
            return chunk if seqlen % n else seqlen // n
        return chunk // self.head_parallel + 1 * (rank % self.head_parallel < chunk % self.head_parallel)

    def chunk_tokens(self, chunk, chunks: int, seqlen: int):
        """How many tokens a chunk out of `chunks` has, or an array of them; a plain number where all have as many."""
        if seqlen % chunks == 0 and not self.boundary(chunks, seqlen):
            return seqlen // chunks
        base, longer = divmod(seqlen, chunks * self.pieces)
        tokens = self.pieces * base + 1 * (chunk < longer)
        return tokens if self.pieces == 1 else tokens + 1 * (2 * chunks - 1 - chunk < longer)

    def largest(self, n: int, seqlen: int) -> int:
        """Tokens of the largest chunk."""
        return -(-seqlen * self.head_parallel // n)

    def boundary(self, chunks: int, seqlen: int) -> int:
        """The first chunk whose pieces are not as long as chunk 0's; 0 where all chunks are alike."""
        longer = seqlen % (chunks * self.pieces)
        return longer if longer < chunks else (2 * chunks - longer) % chunks

    def refuse(self, n: int, seqlen: int) -> None:
        """Raise RequestError where there are fewer tokens than pieces to deal out."""
        least = n // self.head_parallel * max(self.pieces, self.head_parallel)
        if seqlen < least:
            pieces = f"each of {self.pieces} pieces of every chunk" if self.pieces > 1 else "every chunk"
            raise RequestError(
                f"seqlen={seqlen}",
                f"the {self.name} layout for {n} ranks has at least a token in {pieces} and on every rank",
                f"seqlen={least} or more would work",
            )


def _taken(ranges: Sequence[range], start: int, size: int) -> Positions:
    """`size` elements from the `start`-th on of some ranges in a row."""
    found = []
    for piece in ranges:
        found.append(piece[max(start, 0) : max(start + size, 0)])
        start -= len(piece)
    return tuple(filter(None, found))


def _piece(index: int, pieces: int, seqlen: int) -> range:
    """One of so many runs of consecutive tokens; the first ones are a token longer where they must."""
    base, longer = divmod(seqlen, pieces)
    start = index * base + min(index, longer)
    return range(start, start + base + (index < longer))


def _contiguous(chunk: int, chunks: int, seqlen: int) -> Positions:
    return (_piece(chunk, chunks, seqlen),)


def _striped(chunk: int, chunks: int, seqlen: int) -> Positions:
    return (range(chunk, seqlen, chunks),)


def _zigzag(chunk: int, chunks: int, seqlen: int) -> Positions:
    return _piece(chunk, 2 * chunks, seqlen), _piece(2 * chunks - 1 - chunk, 2 * chunks, seqlen)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("contiguous", 1, _contiguous),
        Layout("striped", 1, _striped),
        Layout("zigzag", 2, _zigzag),
    )
}
