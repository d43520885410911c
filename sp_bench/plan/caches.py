"""The mask of a decode step: few new tokens of many sequences, each of which sees the cache of its own sequence.

The queries of all sequences are one sequence of rows, one behind the other, and so are the keys of all caches. Query
heads that share a key head are rows of it, as kernels for decoding have them (grouped queries as rows): a problem of
caches has as many heads as key heads, and `share` rows for each new token. Each cache is assigned to all ranks in runs,
its share of every sequence (KV parallelism of Helix, Bhatia et al. 2025, section 2); rows are assigned as a whole. So
the work of every rank is the same, whatever the lengths. Or each cache is assigned by pages in turn, so that ranks have
whole pages and differ by one, as in decode context parallelism of vLLM (cp_kv_cache_interleave_size). There may be
fewer rows than ranks, of which some then have none: all of them attend to all rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import ClassVar

import numpy as np

from sp_bench.errors import RequestError
from sp_bench.plan.blocks import PairBlocks
from sp_bench.plan.documents import OfLengths
from sp_bench.plan.layout import LAYOUTS, Layout, Positions, Shards, piece
from sp_bench.plan.regions import Region, RegionKind, Regions

KEYS_OF_ALL = 1024
"""About how many keys a rank has of all shortened caches together: several tiles of every kernel."""


@dataclass(frozen=True)
class Pages:
    """Pages of so many tokens, assigned to chunks in turn: chunk c has pages c, c + chunks, ..."""

    tokens: int

    def __call__(self, chunk: int, chunks: int, seqlen: int) -> Positions:
        """The positions of a chunk, a run for each page."""
        starts = range(chunk * self.tokens, seqlen, chunks * self.tokens)
        return tuple(range(start, min(start + self.tokens, seqlen)) for start in starts)

    def before(self, position, chunk, chunks: int):
        """How many of a chunk's tokens are before a position; both may be arrays."""
        rounds, rest = position // (chunks * self.tokens), position % (chunks * self.tokens)
        return rounds * self.tokens + np.clip(rest - chunk * self.tokens, 0, self.tokens)

    def most(self, chunks: int, seqlen: int) -> int:
        """The most pages that a chunk has, of which the last may not be full."""
        return -(-seqlen // (chunks * self.tokens))


@dataclass(frozen=True)
class Paged(Layout):
    """A layout by pages, for ranks that each have whole chunks."""

    ranges: Pages  # pyright: ignore[reportIncompatibleMethodOverride]

    def chunk_tokens(self, chunk, chunks: int, seqlen: int):
        tokens = self.ranges.before(seqlen, chunk, chunks)
        return int(tokens) if isinstance(chunk, int) else tokens

    def tokens(self, rank, n: int, seqlen: int):
        return self.chunk_tokens(rank, n, seqlen)

    def is_even(self, n: int, seqlen: int) -> bool:
        return seqlen % (n * self.ranges.tokens) == 0

    def most(self, n: int, seqlen: int) -> int:
        return self.chunk_tokens(0, n, seqlen)

    def largest(self, n: int, seqlen: int) -> int:
        return self.most(n, seqlen)

    def boundaries(self, chunks: int, seqlen: int) -> Sequence[int]:
        return range(1, chunks)

    def refuse(self, n: int, seqlen: int, key: str = "seqlen") -> None:
        """Take any number of tokens."""


@dataclass(frozen=True)
class Caches(OfLengths):
    """Sequences with a cache each; `lengths` are its keys, those of new tokens included.

    Raises RequestError for a cache that is shorter than its new tokens.
    """

    new: int = 1
    """New tokens of each sequence: one, or several that were guessed (speculative decoding)."""
    share: int = 1
    """Rows of each new token: the query heads that share a key head."""
    page: int | None = None
    """Tokens of a page, if each cache is assigned to ranks by pages in turn; None: each rank has a run of it."""
    left: int | None = None
    """How many keys before its own position a new token sees; None: all of its cache."""
    firsts: tuple[int, ...] = ()
    """The first key of its cache that each new token sees, where chunks of a mask begin between new tokens; empty: the
    first, or by `left`. Caches are alike then."""
    whole: tuple[int, ...] = ()
    """Keys of each cache as a layer has it that sees all, where `lengths` are those that a window or a chunk leaves."""

    name: ClassVar[str] = "caches"
    causal: ClassVar[bool] = True
    """A new token sees no key behind its own position."""
    __hash__ = OfLengths.__hash__
    balanced: ClassVar[tuple[str, ...]] = ("contiguous",)

    def __post_init__(self) -> None:
        for number, length in enumerate(self.lengths):
            if length < self.new:
                rule = f"a cache has the keys of its sequence's {self.new} new tokens, too"
                raise RequestError(f"sequence {number} with {length} keys", rule, f"{self.new} or more would work")

    def ends(self, left: int) -> Caches:
        """The last keys of each cache, of which a new token sees `left` before its own."""
        lengths = tuple(min(length, left + self.new) for length in self.lengths)
        return replace(self, lengths=lengths, left=left, whole=self.lengths)

    def chunked(self, tokens: int) -> Caches:
        """The end of each cache from where the chunk of so many tokens begins that its first new token is in. Each new
        token sees those up to its own of its chunk. The caches are alike.
        """
        positions = range(self.lengths[0] - self.new, self.lengths[0])
        begins = [position // tokens * tokens for position in positions]
        firsts = tuple(begin - begins[0] for begin in begins)
        lengths = tuple(length - begins[0] for length in self.lengths)
        return replace(self, lengths=lengths, firsts=firsts if any(firsts) else (), whole=self.lengths)

    @property
    def unlimited(self) -> Caches | None:
        """The caches of a layer that sees all; None if this one does."""
        return replace(self, lengths=self.whole, left=None, firsts=(), whole=()) if self.whole else None

    @property
    def limits(self) -> bool:
        """Whether some new token doesn't see all keys before its own."""
        return self.left is not None or bool(self.firsts)

    @property
    def rows(self) -> int:
        """Rows of each sequence."""
        return self.new * self.share

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return len(self.lengths) * self.new

    @property
    def seqlen(self) -> int:
        """Rows of all sequences."""
        return len(self.lengths) * self.rows

    @property
    def kv_seqlen(self) -> int:
        """Keys of all caches."""
        return sum(self.lengths)

    @property
    def pages(self) -> Pages | None:
        """The pages of every cache."""
        return None if self.page is None else Pages(self.page)

    def keys(self, layout: Layout, n: int, seqlen: int, kv_seqlen: int) -> Shards:
        return Shards(layout if self.pages is None else Paged("paged", 1, self.pages), n, self.lengths)

    def capacity(self, n: int) -> int:
        """Rows of keys for which the rank that holds most has room: those of its runs, or of all its pages."""
        if self.pages is None:
            return sum(len(piece(0, n, length)) for length in self.lengths)
        return sum(self.pages.most(n, length) for length in self.lengths) * self.pages.tokens

    def sees(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sequence, row = np.divmod(positions, self.rows)
        start, stop = self.edges[sequence], self.edges[sequence + 1] - self.new + 1 + row // self.share
        if self.firsts:
            return start + np.array(self.firsts)[row // self.share], stop
        return start if self.left is None else np.maximum(start, stop - 1 - self.left), stop

    def regions(self, q: Positions, kv: Positions) -> Regions:
        """The regions between rows and keys at these positions, of which each run of keys is of one cache.

        Runs of one cache lie one behind the other, and what a row sees of them are their first keys.
        """
        rows = np.concatenate([np.arange(run.start, run.stop, run.step) for run in q])
        sequence_of, (first, stop) = self.edges[rows // self.rows], self.sees(rows)
        of_runs, before = [], 0
        for sequence, runs in groupby(kv, lambda run: int(np.searchsorted(self.edges, run.start, side="right"))):
            of_cache = [*runs]
            lost, seen = (
                sum((np.clip(end - run.start, 0, len(run)) for run in of_cache), np.zeros(1, int))
                for end in (first, stop)
            )
            seen = np.where(sequence_of == self.edges[sequence - 1], seen, 0)
            at = 0
            for (start, count), same in groupby(zip(np.minimum(lost, seen).tolist(), seen.tolist(), strict=True)):
                size = len(list(same))
                if start < count:
                    keys = range(before + start, before + count)
                    of_runs.append(Region(RegionKind.FULL, range(at, at + size), keys))
                at += size
            before += sum(map(len, of_cache))
        return tuple(of_runs)

    def blocks(self, layout: Layout, n: int, seqlen: int, kv_seqlen: int | None = None) -> CacheBlocks:
        return CacheBlocks(self, layout, n, self.seqlen, self.kv_seqlen)

    def layout(self, name: str, n: int = 1, among: Sequence[str] = ()) -> Layout:
        """Contiguous: runs of each cache. Raises RequestError for any other."""
        if name not in ("auto", "contiguous"):
            rule = "every rank has a run of each cache"
            raise RequestError(f"method.layout={name}", rule, "contiguous, or auto, would work")
        return LAYOUTS["contiguous"]

    def pairs(self, seqlen: int, kv_seqlen: int | None = None) -> float:
        """(row, key) pairs: all that are seen."""
        if self.limits:
            first, stop = self.sees(np.arange(self.seqlen))
            return float((stop - first).sum())
        unseen = self.share * len(self.lengths) * self.new * (self.new - 1) // 2
        return float(self.rows * self.kv_seqlen - unseen)

    def refuse(self, seqlen: int, kv_seqlen: int | None = None) -> None:
        assert (seqlen, kv_seqlen or seqlen) == (self.seqlen, self.kv_seqlen), (
            "the workload makes the problem of its caches"
        )

    def refuse_ranks(self, n: int) -> None:
        """Raise RequestError for a cache that has no key for some of `n` ranks."""
        short = min(self.lengths)
        if self.page is not None and short <= (n - 1) * self.page:
            rule = f"each of gpus={n} ranks has a page of every cache, and one has {short} keys"
            works = f"{(n - 1) * self.page + 1} keys or more, shorter pages, or fewer GPUs, would work"
            raise RequestError(f"decode.page_tokens={self.page}", rule, works)
        if short < n:
            rule = f"each of gpus={n} ranks has a run of every cache"
            raise RequestError(f"a cache of {short} keys", rule, f"{n} keys or more, or fewer GPUs, would work")

    def shortened(self, n: int) -> Caches:
        """The same sequences with shorter caches, as unevenly assigned to `n` ranks, each rank with some keys of each.

        Pages stay as they are, since kernels take some sizes and not others: a rank has more than one of each cache.
        """
        each = max(1, KEYS_OF_ALL // len(self.lengths), 0 if self.page is None else self.page * 3 // 2)
        least = -(-self.new // n)  # as many keys as new tokens
        lengths = tuple((min(length // n, max(each, least)) * n + length % n) for length in self.lengths)
        left = None if self.left is None else max(lengths) - self.new
        # Where a chunk begins between new tokens, it does so among the last keys.
        firsts = tuple(first and first - self.lengths[0] + lengths[0] for first in self.firsts)
        return replace(self, lengths=lengths, left=left, firsts=firsts, whole=())


@dataclass(frozen=True)
class CacheBlocks(PairBlocks):
    """The blocks of caches. R rows of a chunk and K keys of another meet where they are of one sequence; arrays have an
    entry for each.
    """

    mask: Caches  # pyright: ignore[reportIncompatibleVariableOverride]

    narrows = False  # pyright: ignore[reportAssignmentType]
    """One call makes the results of all rows of a chunk, those that see no key there included."""

    @property
    def numbering(self) -> Hashable:
        return self.mask.name, self.n

    def regions_of(self, kind: int) -> Regions:
        if kind not in self.found:
            q, kv = divmod(int(kind), self.n)
            self.found[kind] = self.regions_between([q], kv)
        return self.found[kind]

    def regions_between(self, queries: Sequence[int], kv: int) -> Regions:
        """The regions between the rows of some chunks, end to end in this order, and the keys of a chunk."""
        rows = tuple(run for q in queries for run in self.queries.positions(q))
        return self.mask.regions(rows, self.keys.positions(kv)) if rows else ()

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows of each chunk, by new token: (n, tokens), tokens in the order of sequences."""
        chunk = np.empty(self.seqlen, np.int64)
        for rank in range(self.n):
            run = piece(rank, self.n, self.seqlen)
            chunk[run.start : run.stop] = rank
        token = np.arange(self.seqlen) // self.mask.share
        cells = np.bincount(chunk * self.mask.tokens + token, minlength=self.n * self.mask.tokens)
        return cells.reshape(self.n, self.mask.tokens)

    @cached_property
    def seen(self) -> np.ndarray:
        """Keys of each chunk that each new token sees: (tokens, n)."""
        return (self._before(self._stops) - self._before(self._firsts)).reshape(self.mask.tokens, self.n)

    @cached_property
    def _stops(self) -> np.ndarray:
        """The key behind the last that each new token sees of its cache: (sequences, new)."""
        return np.array(self.mask.lengths)[:, None] - self.mask.new + 1 + np.arange(self.mask.new)

    @property
    def _firsts(self) -> np.ndarray:
        """The first key that each new token sees of its cache: (sequences, new)."""
        if self.mask.firsts:
            return 0 * self._stops + np.array(self.mask.firsts)
        return 0 * self._stops if self.mask.left is None else np.maximum(self._stops - 1 - self.mask.left, 0)

    def _before(self, limit: np.ndarray) -> np.ndarray:
        """Keys of each chunk before a place in the cache of each new token: (sequences, new, n)."""
        mask, ranks = self.mask, np.arange(self.n)
        lengths = np.array(mask.lengths)
        if mask.pages:
            return mask.pages.before(limit[:, :, None], ranks, self.n)
        base, longer = np.divmod(lengths, self.n)
        first = ranks * base[:, None] + np.minimum(ranks, longer[:, None])
        size = base[:, None] + (ranks < longer[:, None])
        return np.clip(limit[:, :, None] - first[:, None], 0, size[:, None])

    @cached_property
    def pairs(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.rows @ self.seen).ravel()

    @cached_property
    def computes(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.pairs > 0

    @cached_property
    def rows_seen(self) -> tuple[range, ...]:
        sizes = [len(piece(rank, self.n, self.seqlen)) for rank in range(self.n)]
        return tuple(range(size) for size in sizes for _ in range(self.n))

    def work(self, queries: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows of each sequence in some chunks, (sequences,), keys of each that they see in each chunk of keys, all of
        them together, (sequences, n)).
        """
        shape = (len(self.mask.lengths), self.mask.new)
        rows = self.rows[np.asarray(queries)].sum(axis=0).reshape(shape)
        computed = (rows > 0)[:, :, None]
        stops, firsts = self._before(self._stops), self._before(self._firsts)
        most = int(stops.max(initial=0))
        keys = (stops * computed).max(axis=1) - np.where(computed, firsts, most).min(axis=1)
        return rows.sum(axis=1), np.maximum(keys, 0)

    def least_moved(self, per_query: float, per_key: float) -> float:
        """The least that any method moves between ranks, of so much for a row and for a key, all ranks together.

        A row and a key of its cache that is on another rank meet somewhere. Either the row leaves its rank, and a
        result comes back from wherever keys stay; or keys come to the row's rank. Of a sequence with R rows and a run
        of K keys that is min(per_query R, per_key K) for each of the other ranks; of several new tokens under a window
        or in chunks, of the keys that all of them see.
        """
        degree, rows = self.n - 1, self.mask.rows
        unseen = max(self.mask.firsts, default=0 if self.mask.left is None else self.mask.new - 1)
        keys = (max(length / self.n - unseen, 0.0) for length in self.mask.lengths)
        return sum(degree * min(per_query * rows, per_key * count) for count in keys)
