"""Sighted: which queries of every chunk see which keys of every other, of all pairs of chunks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sp_bench.plan.intervals import Sight, distinct_below
from sp_bench.plan.runs import Runs, in_runs


class Moves(NamedTuple):
    """Keys that the last query of a stretch sees more or fewer of than the first one: (moves,) each."""

    stretch: np.ndarray
    chunk: np.ndarray
    """The chunk of keys."""
    by: np.ndarray
    """How many more keys of it."""


@dataclass(frozen=True, eq=False)
class Sighted:
    """Keys of every chunk that the queries of every chunk see, by stretches of queries along which these stay, or move
    on by a key a query. Stretches are in the order of their chunks, and of their rows.
    """

    first: np.ndarray
    """The first stretch of each chunk, and how many there are: (chunks + 1,)."""
    position: np.ndarray
    """The position of the first query: (stretches,)."""
    row: np.ndarray
    """Its row in its chunk: (stretches,)."""
    tokens: np.ndarray
    """How many queries there are: (stretches,)."""
    below: np.ndarray
    """How many keys of each chunk are below some positions: (positions, chunks)."""
    ends: np.ndarray
    """Rows of `below`, for the first key that the first query of a stretch sees and for the one behind the last: (2,
    stretches).
    """
    moves: Moves
    """Those of keys of two chunks at most, each stretch."""

    @property
    def pairs(self) -> np.ndarray:
        """Pairs of a query and a key that it sees: (chunks, chunks), by query and key chunk."""
        return self._sums[0]

    @property
    def queries(self) -> np.ndarray:
        """Queries that see a key: (chunks, chunks), by query and key chunk."""
        return self._sums[1]

    def rows(self, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs of queries of one chunk that see a key of another: (the position of the first, its row, how many)."""
        low, high = self.first[queries : queries + 2]
        seen = self._seen(slice(low, high), keys).astype(np.int64)
        last_seen = seen.copy()
        moves = slice(*np.searchsorted(self.moves.stretch, (low, high)))
        stretch, chunk, by = (each[moves] for each in self.moves)
        last_seen[stretch[chunk == keys] - low] += by[chunk == keys]
        later, tokens = _that_see(self.tokens[low:high], seen, last_seen)
        some = tokens > 0
        return (self.position[low:high] + later)[some], (self.row[low:high] + later)[some], tokens[some]

    def _seen(self, stretches: np.ndarray | slice, chunk: np.ndarray | int) -> np.ndarray:
        """How many keys of a chunk the first queries of some stretches see: (stretches,)."""
        first, behind = self.ends[:, stretches]
        return self.below[behind, chunk] - self.below[first, chunk]

    @cached_property
    def _sums(self) -> tuple[np.ndarray, np.ndarray]:
        """(`pairs`, `queries`): as many for all queries of a stretch as for the first, and then what moves."""
        pairs, queries = np.zeros((2, self.first.size - 1, self.below.shape[1]), np.int64)
        for chunk, (low, high) in enumerate(pairwise(self.first.tolist())):  # few enough for a cache
            first, behind = (self.below.take(of, axis=0) for of in self.ends[:, low:high])
            seen = behind - first
            # np.add.reduceat takes four times as long, and so do products of whole numbers.
            pairs[chunk], queries[chunk] = (self.tokens[low:high] @ each.astype(float) for each in (seen, seen > 0))
        stretch, chunk, by = self.moves
        at_moves = np.searchsorted(self.first, stretch, "right") - 1, chunk
        tokens, seen = self.tokens[stretch], self._seen(stretch, chunk)
        np.add.at(pairs, at_moves, by * tokens // 2)
        np.add.at(queries, at_moves, _that_see(tokens, seen, seen + by)[1] - np.where(seen > 0, tokens, 0))
        return pairs, queries


def _that_see(tokens: np.ndarray, seen: np.ndarray, last_seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(whether the second query of a stretch is the first that sees a key, how many see one)."""
    none, last_none = seen <= 0, last_seen <= 0
    return none & ~last_none, np.where(none & last_none, 0, tokens - (none | last_none))


def sighted(mask: Sight, queries: Sequence[Runs], keys: Sequence[Runs]) -> Sighted:
    """The keys of some chunks that the queries of as many chunks see."""
    chunk, position, tokens = _stretches(mask, queries, keys)
    first = np.searchsorted(chunk, np.arange(len(queries) + 1))
    before = np.append(0, np.cumsum(tokens))
    row = before[:-1] - np.repeat(before[first[:-1]], np.diff(first))
    ends, last_ends = mask.sees(position), mask.sees(position + tokens - 1)
    below, of = distinct_below(keys, np.concatenate(ends))
    return Sighted(first, position, row, tokens, below, of.reshape(2, -1), _moves(keys, ends, last_ends))


def _stretches(mask: Sight, queries: Sequence[Runs], keys: Sequence[Runs]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the chunk of each stretch, the position of its first query, how many there are), by chunk and position."""
    chunk, start, stop = in_runs(queries)
    order = np.argsort(start, kind="stable")
    chunk, start, stop = chunk[order], start[order], stop[order]
    turns = mask.turns(start[0], stop[-1], np.concatenate(in_runs(keys)[1:]))
    begins = np.sort(np.concatenate([start, turns]), kind="stable")
    begins = begins[np.diff(begins, prepend=begins[0] - 1) > 0]
    run = np.searchsorted(start, begins, "right") - 1
    tokens = np.minimum(np.append(begins[1:], stop[-1]), stop[run]) - begins
    # What is no query lies before the first run, between two of them, or behind the last.
    some = np.flatnonzero((run >= 0) & (tokens > 0))
    of = chunk[run[some]].astype(np.min_scalar_type(len(queries)))  # small ones are sorted fast
    some = some[np.argsort(of, kind="stable")]
    return chunk[run[some]], begins[some], tokens[some]


def _moves(keys: Sequence[Runs], ends: Sequence[np.ndarray], last_ends: Sequence[np.ndarray]) -> Moves:
    """Between two turns each end of what is seen stays, or passes keys of one chunk alone."""
    owner, start, _ = in_runs(keys)
    by_position = np.argsort(start, kind="stable")
    owner, start = owner[by_position], start[by_position]
    moved = [last_end - end for end, last_end in zip(ends, last_ends, strict=True)]
    through = [owner[np.searchsorted(start, end, "right") - 1] for end in ends]
    both = (moved[0] > 0) & (moved[1] > 0) & (through[0] == through[1])  # as many keys come as go
    each = [np.flatnonzero((by > 0) & ~both) for by in moved]
    stretch = np.concatenate(each)
    order = np.argsort(stretch, kind="stable")
    chunk, by = (
        np.concatenate([sign * x[which] for x, which, sign in zip(of, each, signs, strict=True)])[order]
        for of, signs in ((through, (1, 1)), (moved, (-1, 1)))
    )
    return Moves(stretch[order], chunk, by)
