"""Blocks: the classes of blocks between the chunks of a layout, and what is computed of each.

A problem has only a few classes. That of a pair of ranks follows by arithmetic, so that no object is held for each of
the n x n pairs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sp_bench.plan.layout import Layout, Positions, Shards
from sp_bench.plan.regions import Region, RegionKind, Regions, filled

if TYPE_CHECKING:
    from sp_bench.plan.mask import WholeMask


class Part(NamedTuple):
    """The part of a chunk's rows that a block has."""

    share: float
    sliced: bool
    """Whether it is not the whole chunk. The first row of a strict block, and its last key, are no part of it."""


@dataclass(frozen=True)
class Blocks:
    """The classes of blocks between the chunks of a layout, and which class each pair of ranks has.

    A class is the relation of two chunks (`WholeMask.relation`) and, where chunks differ in size, the sizes of both:
    chunks before one of `Shards.boundaries` have one token more in one of their pieces. A history, which all queries
    see, is in each block of the same relation alike.
    """

    mask: WholeMask
    layout: Layout
    n: int
    seqlen: int
    kv_seqlen: int

    @cached_property
    def queries(self) -> Shards:
        """The tokens of queries as they are assigned."""
        return Shards(self.layout, self.n, (self.seqlen,))

    @cached_property
    def keys(self) -> Shards:
        """The tokens of keys as they are assigned."""
        return self.mask.keys(self.layout, self.n, self.seqlen, self.kv_seqlen)

    def of(self, q_rank, kv_rank) -> Any:
        """The class of the block between the layout chunks of two ranks, or of two arrays of ranks."""
        degree = self.layout.head_parallel
        q, kv = (q_rank // degree, kv_rank // degree) if degree > 1 else (q_rank, kv_rank)
        kind = self.mask.relation(q, kv)
        for chunk, boundaries in zip((q, kv), self._boundaries, strict=True):
            for boundary in boundaries:
                kind = 2 * kind + (chunk >= boundary)
        return kind

    @property
    def numbering(self) -> Hashable:
        """Blocks with the same one have the same `of`."""
        return self.mask, self.n, self.layout.head_parallel, self._boundaries

    def regions_of(self, kind: int) -> Regions:
        """The regions of a class; empty for one that no pair of ranks has."""
        return self._regions[kind]

    def find(self, kinds: Iterable[int]) -> None:
        """Find the regions of some classes that will be asked for, all at once where that is faster."""

    def held_of(self, kind: int) -> Regions:
        """The regions of a class with keys that all ranks hold."""
        return ()

    @property
    def classes(self) -> int:
        """How many classes there may be: `of` is below this."""
        return len(self._regions)

    @cached_property
    def _regions(self) -> tuple[Regions, ...]:
        by_kind = {
            kind: self.mask.regions(self._queries(q), self.keys.chunk_positions(kv))
            for kind, (q, kv) in self._examples.items()
        }
        return tuple(by_kind.get(kind, ()) for kind in range(1 + max(by_kind)))

    @cached_property
    def rows_seen(self) -> tuple[range, ...]:
        """For each class, the range from the first to the last query that sees a key; all queries if none does."""
        by_kind = []
        for kind, regions in enumerate(self._regions):
            rows = [region.q for region in regions]
            if rows:
                by_kind.append(range(min(r.start for r in rows), max(r.stop for r in rows)))
            else:
                q, _ = self._examples.get(kind, (0, 0))
                by_kind.append(range(self.queries.chunk_tokens(q)))
        return tuple(by_kind)

    def count_seen(self, kind) -> Any:
        """How many queries `rows_seen` has for a class, or for each of an array of them."""
        return self._counts_seen[kind] if isinstance(kind, np.ndarray) else len(self.rows_seen[kind])

    @cached_property
    def _counts_seen(self) -> np.ndarray:
        return np.array([len(rows) for rows in self.rows_seen])

    def parts(self, *, keys: bool) -> Sequence[Part]:
        """For each class, the part of a query chunk's rows, or of a chunk's `keys`, that the block has."""
        by_kind, side = [], self.keys if keys else self.queries
        for kind, regions in enumerate(self._regions):
            example = self._examples.get(kind)
            whole = side.chunk_tokens(example[keys]) if example else 1
            runs = [region.kv if keys else region.q for region in regions]
            seen = max((run.stop for run in runs), default=whole) - min((run.start for run in runs), default=0)
            strict = any(region.kind is RegionKind.STRICT for region in regions)
            by_kind.append(Part(seen / whole, strict or seen < whole))
        return by_kind

    @cached_property
    def pairs(self) -> Sequence[int]:
        """How many (query, key) pairs of each class are computed."""
        return tuple(sum(region.pairs for region in regions) for regions in self._regions)

    @cached_property
    def computes(self) -> Sequence[bool]:
        """Whether any pair of each class is computed."""
        return tuple(pairs > 0 for pairs in self.pairs)

    @cached_property
    def narrows(self) -> bool:
        """Whether some block computes only a part of its chunks' rows or keys."""
        for kind, (q, kv) in self._examples.items():
            whole = (range(self.queries.chunk_tokens(q)), range(self.keys.chunk_tokens(kv)))
            if any(r.kind is RegionKind.STRICT or (r.q, r.kv) != whole for r in self._regions[kind]):
                return True
        return False

    @cached_property
    def skips_queries(self) -> bool:
        """Whether some block needs only some of its query rows."""
        rows = ((self.count_seen(kind), q) for kind, (q, _) in self._examples.items())
        return any(seen < self.queries.chunk_tokens(q) for seen, q in rows)

    @property
    def chunks(self) -> int:
        """How many layout chunks there are."""
        return self.n // self.layout.head_parallel

    @cached_property
    def _boundaries(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of queries and of keys."""
        return self.queries.boundaries, self.keys.boundaries

    @cached_property
    def _examples(self) -> Mapping[int, tuple[int, int]]:
        """A (query chunk, key chunk) of each class: every class occurs among the first and last chunks of each size."""
        edges = {0, 1, self.chunks - 1}
        for boundary in (0, *(each for side in self._boundaries for each in side)):
            edges |= {boundary - 2, boundary - 1, boundary, boundary + 1}
        chunks, step = sorted(edges & set(range(self.chunks))), self.layout.head_parallel
        return {int(self.of(q * step, kv * step)): (q, kv) for q, kv in product(chunks, repeat=2)}

    def _queries(self, chunk: int) -> Positions:
        """The positions of a chunk's queries among the keys."""
        return self.mask.among_keys(self.queries.chunk_positions(chunk), self.seqlen, self.kv_seqlen)


@dataclass(frozen=True)
class PairBlocks(Blocks):
    """Blocks of which each pair of chunks is a class of its own, whose regions are found when they are asked for."""

    found: dict[int, Regions] = field(default_factory=dict, compare=False, repr=False)

    skips_queries = False  # pyright: ignore[reportAssignmentType]
    """All rows of a chunk travel together."""

    def of(self, q_rank, kv_rank):
        degree = self.layout.head_parallel
        q, kv = (q_rank // degree, kv_rank // degree) if degree > 1 else (q_rank, kv_rank)
        return q * self.chunks + kv

    @property
    def classes(self) -> int:
        return self.chunks**2

    def parts(self, *, keys: bool) -> Sequence[Part]:
        """Whole chunks: a kernel for variable lengths returns all rows."""
        return [Part(1.0, False)] * self.classes


@dataclass(frozen=True)
class JointBlocks(Blocks):
    """Blocks of which those of queries with their own keys have a region more, of keys that all ranks hold."""

    def held_of(self, kind: int) -> Regions:
        q, kv = self._examples.get(kind, (0, 1))
        queries = range(self.queries.chunk_tokens(q))
        return filled([Region(RegionKind.FULL, queries, range(self.mask.held))]) if q == kv else ()

    @cached_property
    def pairs(self) -> Sequence[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(
            sum(region.pairs for region in (*self.regions_of(kind), *self.held_of(kind)))
            for kind in range(self.classes)
        )
