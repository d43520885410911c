"""Masks: which keys a query sees, and what is left to compute between two chunks of tokens.

A mask is a rule about global token positions. Of the block of a query chunk and a key chunk it leaves a few *regions*:
rectangles of a kind that every kernel supports (plan.regions). Blocks of one class have the same (plan.blocks).

    full     every key
    causal   keys at or before the query's own position. Blocks with the query chunk below, equal to and above the key
             chunk are: contiguous none, causal, full; striped strict, causal, causal (Striped Attention, Brandon et al.
             2023, section 3); zigzag half, causal, half (Zhu 2024)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from sp_bench.errors import RequestError, impossible, unknown
from sp_bench.plan.assignments import ASSIGNMENTS
from sp_bench.plan.blocks import Blocks, JointBlocks
from sp_bench.plan.layout import LAYOUTS, Layout, Positions, Shards
from sp_bench.plan.regions import Region, RegionKind, Regions, filled, merged, staircase

WHOLE = "whole sequences"
"""The class of a causal mask, and of none: both were measured, and are about as far off."""


@dataclass(frozen=True)
class Mask(ABC):
    """A rule that says which keys each query sees."""

    name: ClassVar[str]
    sends_unseen: ClassVar[bool] = True
    """Whether plans also send what no query of the receiver sees, as the papers' formulas have it."""
    in_pieces: ClassVar[bool] = False
    """Whether a block may have many small regions, which kernels take together where they can."""
    balanced: ClassVar[tuple[str, ...]] = ()
    """The layouts that give all ranks equal work: of those with the same blocks one, the first of equally fast ones.
    Empty where that depends on the mask's numbers."""

    @property
    def held(self) -> int:
        """How many keys all ranks hold beside those that are assigned (Joint)."""
        return 0

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
            whole = (each for each in among or LAYOUTS if each in LAYOUTS)
            raise impossible(f"method.layout={name}", rule, whole, ", or mask=document,")
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
        return filled([Region(RegionKind.FULL, range(_count(q)), range(_count(kv)))])

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
        all_regions: list[Region] = []
        before = _numbered(kv)
        if q == kv[-len(q) :]:
            all_regions = [Region(RegionKind.CAUSAL, range(_count(q)), range(_count(kv) - _count(q), _count(kv)))]
            before = before[: -len(q)]
        for (rows, queries), (columns, keys) in product(_numbered(q), before):
            all_regions += staircase(rows, queries, columns, keys)
        return merged(filled(all_regions))

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

    held: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]

    def blocks(self, layout: Layout, n: int, seqlen: int, kv_seqlen: int | None = None) -> Blocks:
        return JointBlocks(self, layout, n, seqlen, seqlen if kv_seqlen is None else kv_seqlen)

    def relation(self, q_chunk, kv_chunk) -> Any:
        """1 for queries with their own keys, else 0."""
        return 1 * (q_chunk == kv_chunk)


def _count(positions: Positions) -> int:
    return sum(map(len, positions))


def _numbered(positions: Positions) -> list[tuple[range, range]]:
    """(indices in the chunk, positions) of each run of positions."""
    numbered, first = [], 0
    for run in positions:
        numbered.append((range(first, first + len(run)), run))
        first += len(run)
    return numbered


FULL, CAUSAL = Full(), Causal()
MASKS: Mapping[str, WholeMask] = {mask.name: mask for mask in (FULL, CAUSAL)}
"""The masks of a whole sequence by name. Those of documents and windows have numbers: sp_bench.plan.documents."""


def mask_named(name: str) -> Mask:
    """The mask of that name. Raises RequestError for an unknown name; its message has the nearest one."""
    if name not in MASKS:
        raise unknown("mask", name, MASKS)
    return MASKS[name]
