"""Masks: which keys a query sees, and what is left to compute between two chunks of tokens.

A mask is a rule about global token positions. Of the block of a query chunk and a key chunk it leaves a few *regions*:
rectangles of a kind that every kernel supports. A problem has only a few classes of blocks. The class of a pair of
ranks follows by arithmetic (`Blocks`), so that no object is held for each of the n x n pairs.

    full     every key
    causal   keys at or before the query's own position. Blocks with the query chunk below, equal to and above the key
             chunk are: contiguous none, causal, full; striped strict, causal, causal (Striped Attention, Brandon et al.
             2023, section 3); zigzag half, causal, half (Zhu 2024)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, NamedTuple

from sp_bench.errors import RequestError, unknown
from sp_bench.plan.assignments import ASSIGNMENTS
from sp_bench.plan.layout import LAYOUTS, Layout, Positions, Shards
from sp_bench.plan.regions import Region, RegionKind, Regions

WHOLE = "whole sequences"
"""The class of a causal mask, and of none: both were measured, and are about as far off."""


@dataclass(frozen=True)
class Mask(ABC):
    """A rule that says which keys each query sees."""

    name: ClassVar[str]
    sends_unseen: ClassVar[bool] = True
    """Whether plans also send what no query of the receiver sees, as the papers' formulas have it."""
    held: ClassVar[int] = 0
    """How many keys all ranks hold beside those that are assigned (Joint)."""
    in_pieces: ClassVar[bool] = False
    """Whether a block may have many small regions, which kernels take together where they can."""
    balanced: ClassVar[tuple[str, ...]] = ()
    """The layouts that give all ranks equal work: of those with the same blocks one, the first of equally fast ones.
    Empty where that depends on the mask's numbers."""

    @property
    def measured_as(self) -> str:
        """The class of masks whose measurements say how far simulations of this one are off (point.backing)."""
        return f"mask={self.name}"

    @property
    def unlimited(self) -> Mask | None:
        """The mask without its window or chunks, as layers have it that see all; None if it has neither."""
        return None

    @abstractmethod
    def regions(self, q: Positions, kv: Positions) -> Regions:
        """The regions between query and key chunks at these global positions; both ascending."""

    @abstractmethod
    def blocks(self, layout: Layout, n: int, seqlen: int, kv_seqlen: int | None = None) -> Blocks:
        """The classes of blocks of `n` ranks; `kv_seqlen` is the number of keys, by default that of queries."""

    @abstractmethod
    def layout(self, name: str, n: int = 1, among: Sequence[str] = ()) -> Layout:
        """The layout of that name; `auto` is the one, `among` those that a method takes, that gives n ranks equal work.

        Raises RequestError for an unknown name; its message has the nearest one.
        """

    @abstractmethod
    def pairs(self, seqlen: int, kv_seqlen: int | None = None) -> float:
        """(query, key) pairs of a sequence, as MFU counts them; by default there are as many keys as queries."""

    @abstractmethod
    def refuse(self, seqlen: int, kv_seqlen: int | None = None) -> None:
        """Raise RequestError for a sequence, or a number of keys, that the mask doesn't fit."""

    def history(self, seqlen: int, kv_seqlen: int) -> int:
        """The position of the first query among the keys: how many come before all queries, assigned on their own."""
        return 0

    def keys(self, layout: Layout, n: int, seqlen: int, kv_seqlen: int) -> Shards:
        """The keys that queries see, as they are assigned where queries have this layout: a history on its own."""
        return Shards.of(layout, n, kv_seqlen, self.history(seqlen, kv_seqlen))

    def among_keys(self, queries: Positions, seqlen: int, kv_seqlen: int) -> Positions:
        """The positions of queries among the keys, of those among queries."""
        ahead = self.history(seqlen, kv_seqlen)
        return tuple(range(run.start + ahead, run.stop + ahead, run.step) for run in queries)

    def scaled(self, seqlen: int, unit: int = 1) -> Mask:
        """The same mask for a shorter sequence, its documents in multiples of `unit`."""
        return self


@dataclass(frozen=True)
class WholeMask(Mask):
    """A mask of one whole sequence, under which the blocks of any number of ranks have only a few classes."""

    flops_share: ClassVar[float]
    """The share of all N x N (query, key) pairs that MFU counts."""
    causal: ClassVar[bool]
    """Whether no query sees a key behind its own position."""

    @abstractmethod
    def relation(self, q_chunk, kv_chunk) -> Any:
        """A number from 0 to 2 for two chunks of one layout, or for two arrays of chunks.

        Pairs of chunks with the same relation and the same piece lengths have the same regions.
        """

    def blocks(self, layout: Layout, n: int, seqlen: int, kv_seqlen: int | None = None) -> Blocks:
        return Blocks(self, layout, n, seqlen, seqlen if kv_seqlen is None else kv_seqlen)

    def layout(self, name: str, n: int = 1, among: Sequence[str] = ()) -> Layout:
        name = self.balanced[0] if name == "auto" else name
        if name in ASSIGNMENTS:
            rule = f"assigns documents, and mask={self.name} has none"
            would_work = f"one of {', '.join(LAYOUTS)}, or mask=document, would work"
            raise RequestError(f"method.layout={name}", rule, would_work)
        if name not in LAYOUTS:
            raise unknown("method.layout", name, [*LAYOUTS, "auto"])
        return LAYOUTS[name]

    def pairs(self, seqlen: int, kv_seqlen: int | None = None) -> float:
        kv_seqlen = seqlen if kv_seqlen is None else kv_seqlen
        history = self.history(seqlen, kv_seqlen)
        return seqlen * history + self.flops_share * seqlen * (kv_seqlen - history)

    def refuse(self, seqlen: int, kv_seqlen: int | None = None) -> None:
        """Raise RequestError for other keys than queries, unless a mask says what queries see of them."""
        if kv_seqlen not in (None, seqlen):
            rule = f"mask={self.name} has as many keys as queries, seqlen={seqlen}"
            raise RequestError(f"kv_seqlen={kv_seqlen}", rule, f"kv_seqlen={seqlen} would work")


@dataclass(frozen=True)
class Full(WholeMask):
    """Every query sees every key."""

    name: ClassVar[str] = "full"
    measured_as: ClassVar[str] = WHOLE  # pyright: ignore[reportIncompatibleMethodOverride]
    flops_share: ClassVar[float] = 1.0
    causal: ClassVar[bool] = False
    balanced: ClassVar[tuple[str, ...]] = ("contiguous",)

    def regions(self, q: Positions, kv: Positions) -> Regions:
        return _filled([Region(RegionKind.FULL, range(_count(q)), range(_count(kv)))])

    def refuse(self, seqlen: int, kv_seqlen: int | None = None) -> None:
        """Take any number of queries and of keys."""

    def relation(self, q_chunk, kv_chunk) -> Any:
        return 0 * (q_chunk + kv_chunk)


@dataclass(frozen=True)
class Causal(WholeMask):
    """A query sees the keys up to its own position."""

    name: ClassVar[str] = "causal"
    measured_as: ClassVar[str] = WHOLE  # pyright: ignore[reportIncompatibleMethodOverride]
    flops_share: ClassVar[float] = 0.5
    causal: ClassVar[bool] = True
    balanced: ClassVar[tuple[str, ...]] = ("striped", "zigzag")

    def regions(self, q: Positions, kv: Positions) -> Regions:
        found: list[Region] = []
        before = _numbered(kv)
        if q == kv[-len(q) :]:
            found = [Region(RegionKind.CAUSAL, range(_count(q)), range(_count(kv) - _count(q), _count(kv)))]
            before = before[: -len(q)]
        for (rows, queries), (columns, keys) in product(_numbered(q), before):
            found += _staircase(rows, queries, columns, keys)
        return _merged(_filled(found))

    def refuse(self, seqlen: int, kv_seqlen: int | None = None) -> None:
        """Raise RequestError for fewer keys than queries, which are the last of the keys' tokens."""
        if kv_seqlen is not None and kv_seqlen < seqlen:
            rule = f"under mask=causal the queries are the last of the keys' tokens, and there are seqlen={seqlen}"
            raise RequestError(f"kv_seqlen={kv_seqlen}", rule, f"kv_seqlen={seqlen} or more, or mask=full, would work")

    def history(self, seqlen: int, kv_seqlen: int) -> int:
        return kv_seqlen - seqlen

    def relation(self, q_chunk, kv_chunk) -> Any:
        """0, 1 or 2: the query chunk is below, equal to or above the key chunk."""
        return 1 * (q_chunk >= kv_chunk) + (q_chunk > kv_chunk)


@dataclass(frozen=True)
class Joint(Full):
    """Every query sees every key that is assigned, and `held` more that all ranks hold whole, such as those of text.

    These are never sent. The block of queries with their own keys has them, too, wherever it is computed, so that each
    query sees them once.
    """

    held: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]

    def blocks(self, layout: Layout, n: int, seqlen: int, kv_seqlen: int | None = None) -> Blocks:
        return JointBlocks(self, layout, n, seqlen, seqlen if kv_seqlen is None else kv_seqlen)

    def relation(self, q_chunk, kv_chunk) -> Any:
        """1 for queries with their own keys, else 0."""
        return 1 * (q_chunk == kv_chunk)


def _count(positions: Positions) -> int:
    return sum(map(len, positions))


def _numbered(positions: Positions) -> list[tuple[range, range]]:
    """(indices in the chunk, positions) of each run of positions."""
    found, first = [], 0
    for run in positions:
        found.append((range(first, first + len(run)), run))
        first += len(run)
    return found


def _staircase(rows: range, queries: range, columns: range, keys: range) -> list[Region]:
    """The causal regions between two runs of positions of one stride.

    With positions a + s x and b + s y, query x sees key y where y <= x + (a - b) // s.
    """
    assert queries.step == keys.step or 1 in (len(queries), len(keys)), "runs of one stride"
    ahead = (queries.start - keys.start) // (queries.step if len(queries) > 1 else keys.step)
    if ahead == -1 and len(rows) == len(columns):
        return [Region(RegionKind.STRICT, rows, columns)]
    if ahead >= max(len(columns) - 1, 1) or keys[-1] < queries[0]:
        return [Region(RegionKind.FULL, rows, columns)]
    first = max(0, -ahead)
    """The first query that sees a key."""
    seen = min(max(ahead, 0), len(columns))
    """How many keys every query from `first` on sees."""
    square = max(0, min(len(rows) - first, len(columns) - seen))
    stairs, beside = rows[first : first + square], columns[seen : seen + square]
    return [
        Region(RegionKind.FULL, rows[first:], columns[:seen]),
        Region(RegionKind.CAUSAL, stairs, beside),
        Region(RegionKind.FULL, rows[first + square :], columns[seen:]),
    ]


def _filled(regions: Iterable[Region]) -> Regions:
    return tuple(region for region in regions if region.pairs > 0)


def _merged(regions: Regions) -> Regions:
    """The regions with adjacent FULL rectangles merged: kernels are faster on larger ones."""
    found: list[Region] = []
    for region in regions:
        joined = region
        for other in [r for r in found if r.kind is region.kind is RegionKind.FULL]:
            if other.q == joined.q and other.kv.stop == joined.kv.start:
                found.remove(other)
                joined = Region(RegionKind.FULL, joined.q, range(other.kv.start, joined.kv.stop))
            elif other.kv == joined.kv and other.q.stop == joined.q.start:
                found.remove(other)
                joined = Region(RegionKind.FULL, range(other.q.start, joined.q.stop), joined.kv)
        found.append(joined)
    return tuple(found)


FULL, CAUSAL = Full(), Causal()
MASKS: Mapping[str, WholeMask] = {mask.name: mask for mask in (FULL, CAUSAL)}
"""The masks of a whole sequence by name. Those of documents and windows have numbers: sp_bench.plan.documents."""


def mask_named(name: str) -> Mask:
    """The mask of that name. Raises RequestError for an unknown name; its message has the nearest one."""
    if name not in MASKS:
        raise unknown("mask", name, MASKS)
    return MASKS[name]


class Part(NamedTuple):
    """The part of a chunk's rows that a block has."""

    share: float
    sliced: bool
    """Whether it is not the whole chunk. The first row of a strict block, and its last key, are no part of it."""


@dataclass(frozen=True)
class Blocks:
    """The classes of blocks between the chunks of a layout, and which class each pair of ranks has.

    A class is the relation of two chunks (`Mask.relation`) and, where chunks differ in size, the sizes of both: chunks
    before one of `Shards.boundaries` have one token more in one of their pieces. A history, which all queries see, is
    in each block of the same relation alike.
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
        found = self.mask.relation(q, kv)
        for chunk, boundaries in zip((q, kv), self._boundaries, strict=True):
            for boundary in boundaries:
                found = 2 * found + (chunk >= boundary)
        return found

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
        found = {
            kind: self.mask.regions(self._queries(q), self.keys.chunk_positions(kv))
            for kind, (q, kv) in self._examples.items()
        }
        return tuple(found.get(kind, ()) for kind in range(1 + max(found)))

    @cached_property
    def rows_seen(self) -> tuple[range, ...]:
        """For each class, the range from the first to the last query that sees a key; all queries if none does."""
        found = []
        for kind, regions in enumerate(self._regions):
            rows = [region.q for region in regions]
            if rows:
                found.append(range(min(r.start for r in rows), max(r.stop for r in rows)))
            else:
                q, _ = self._examples.get(kind, (0, 0))
                found.append(range(self.queries.chunk_tokens(q)))
        return tuple(found)

    def parts(self, *, keys: bool) -> Sequence[Part]:
        """For each class, the part of a query chunk's rows, or of a chunk's `keys`, that the block has."""
        found, side = [], self.keys if keys else self.queries
        for kind, regions in enumerate(self._regions):
            example = self._examples.get(kind)
            whole = side.chunk_tokens(example[keys]) if example else 1
            runs = [region.kv if keys else region.q for region in regions]
            seen = max((run.stop for run in runs), default=whole) - min((run.start for run in runs), default=0)
            strict = any(region.kind is RegionKind.STRICT for region in regions)
            found.append(Part(seen / whole, strict or seen < whole))
        return found

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
        rows = ((len(self.rows_seen[kind]), q) for kind, (q, _) in self._examples.items())
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
class JointBlocks(Blocks):
    """Blocks of which those of queries with their own keys have a region more, of keys that all ranks hold."""

    def held_of(self, kind: int) -> Regions:
        q, kv = self._examples.get(kind, (0, 1))
        queries = range(self.queries.chunk_tokens(q))
        return _filled([Region(RegionKind.FULL, queries, range(self.mask.held))]) if q == kv else ()

    @cached_property
    def pairs(self) -> Sequence[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(
            sum(region.pairs for region in (*self.regions_of(kind), *self.held_of(kind)))
            for kind in range(self.classes)
        )
