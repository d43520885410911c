"""Tables of regions: those of packs of documents, of which a rank has thousands, as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, overload

import numpy as np

from sp_bench.plan.regions import Region, RegionKind
from sp_bench.plan.runs import whole_numbers

KINDS = (RegionKind.FULL, RegionKind.CAUSAL, RegionKind.UPPER, RegionKind.STRICT)


class Sizes(NamedTuple):
    """Regions as what their time depends on: (regions,) each."""

    kind: np.ndarray
    """0 for FULL, 1 for CAUSAL, 2 for UPPER; STRICT ones are CAUSAL (Region.plain)."""
    q_tokens: np.ndarray
    kv_tokens: np.ndarray
    pairs: np.ndarray


Rows = np.ndarray | range
"""Rows of a chunk: each of them, (rows,) int64, or the run that they are."""


@dataclass(frozen=True, eq=False)
class RegionTable(Sequence[Region]):
    """Regions, each of which becomes a Region when it is asked for: a Python object for each takes as long as to find
    them.
    """

    numbers: np.ndarray
    """(the place of the kind in KINDS, the first query, the one behind the last, the first key, the one behind the
    last) of each: (5, regions)."""

    def __len__(self) -> int:
        return self.numbers.shape[1]

    @overload
    def __getitem__(self, index: int) -> Region: ...
    @overload
    def __getitem__(self, index: slice) -> RegionTable: ...
    def __getitem__(self, index: int | slice) -> Region | RegionTable:
        if isinstance(index, slice):
            return RegionTable(self.numbers[:, index])
        kind, q_start, q_stop, kv_start, kv_stop = self.numbers[:, index].tolist()
        return Region(KINDS[kind], range(q_start, q_stop), range(kv_start, kv_stop))

    def __iter__(self) -> Iterator[Region]:
        kind, *ends = self.numbers.tolist()
        rows = zip(map(KINDS.__getitem__, kind), map(range, *ends[:2]), map(range, *ends[2:]), strict=True)
        return map(partial(tuple.__new__, Region), rows)  # a third of the time of calling Region

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RegionTable):
            return np.array_equal(self.numbers, other.numbers)
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def take(self, regions: np.ndarray) -> RegionTable:
        """Some of them, in this order."""
        return RegionTable(self.numbers.take(regions, axis=1))

    @property
    def kind(self) -> np.ndarray:
        """The place of each kind in KINDS: (regions,)."""
        return self.numbers[0]

    @property
    def q_tokens(self) -> np.ndarray:
        """Queries of each: (regions,)."""
        return self.numbers[2] - self.numbers[1]

    @property
    def kv_tokens(self) -> np.ndarray:
        """Keys of each: (regions,)."""
        return self.numbers[4] - self.numbers[3]

    @property
    def query_rows(self) -> Rows:
        """The queries of all regions one behind the other, those of UPPER ones backwards. Regions are of one kind."""
        return self._rows(1)

    @property
    def key_rows(self) -> Rows:
        """The keys, as `query_rows` has queries."""
        return self._rows(3)

    def starts(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """The starts of each region's queries, and of its keys, one behind the other, for each entry of a batch, and
        the last end: (batch * regions + 1,) int32 each.
        """
        queries, keys = (np.tile(each, batch).cumsum() for each in (self.q_tokens, self.kv_tokens))
        return np.append(0, queries).astype(np.int32), np.append(0, keys).astype(np.int32)

    def by_size(self, most: int) -> np.ndarray:
        """A number for each kind and size, (regions,), but for regions of more than `most` queries or keys one for
        each.
        """
        size = self.kind + len(KINDS) * (self.q_tokens + (most + 1) * self.kv_tokens)
        small = np.maximum(self.q_tokens, self.kv_tokens) <= most
        return np.where(small, size, -1 - np.arange(len(self)))

    def _rows(self, side: int) -> Rows:
        start, stop = self.numbers[side : side + 2]
        backwards = KINDS[int(self.kind[0])] is RegionKind.UPPER
        if not backwards and (start[1:] == stop[:-1]).all():
            return range(int(start[0]), int(stop[-1]))
        rows = whole_numbers(start, stop - start)
        return np.repeat(start + stop - 1, stop - start) - rows if backwards else rows

    @property
    def plain(self) -> RegionTable:
        """The same pairs without STRICT regions (Region.plain)."""
        strict = self.numbers[0] == KINDS.index(RegionKind.STRICT)
        if not strict.any():
            return self
        kind, q_start, q_stop, kv_start, kv_stop = self.numbers
        causal = np.where(strict, KINDS.index(RegionKind.CAUSAL), kind)
        return RegionTable(np.stack([causal, q_start + strict, q_stop, kv_start, kv_stop - strict]))


def table_of(regions: Iterable[Region]) -> RegionTable:
    """Regions as a table."""
    if isinstance(regions, RegionTable):
        return regions
    rows = [(KINDS.index(kind), q.start, q.stop, kv.start, kv.stop) for kind, q, kv in regions]
    return RegionTable(np.array(rows, np.int64).reshape(-1, 5).T)


def sizes_of(regions: Iterable[Region]) -> Sizes:
    """The sizes of regions, in their order."""
    table = table_of(regions).plain
    rows, columns = table.q_tokens.astype(float), table.kv_tokens.astype(float)
    return Sizes(table.kind.copy(), rows, columns, np.where(table.kind == 0, rows * columns, rows * (rows + 1) / 2))


def rows_seen(regions: Iterable[Region]) -> tuple[int, int]:
    """How many queries, and how many keys, are in some of the regions."""
    _, *ends = table_of(regions).numbers
    return _in_some(*ends[:2]), _in_some(*ends[2:])


def _in_some(start: np.ndarray, stop: np.ndarray) -> int:
    order = np.argsort(start)
    start, stop = start[order], np.maximum.accumulate(stop[order])
    return int(np.maximum(stop - np.maximum(start, np.append(0, stop[:-1])), 0).sum()) if start.size else 0


def by_keys(regions: Iterable[Region]) -> RegionTable:
    """The same pairs, with FULL regions of neighbouring queries that see the same first keys cut along their keys.

    Of queries that see more and more keys, each run of keys is then a region with all queries that see it. A backward
    kernel loops over the queries of a region, and is faster with more of them.
    """
    table = table_of(regions)
    is_full = table.kind == KINDS.index(RegionKind.FULL)
    full = np.flatnonzero(is_full)
    if full.size < 2:  # as of many blocks of short documents
        return table.take(np.argsort(is_full, kind="stable"))
    full = full[np.argsort(table.numbers[1, full], kind="stable")]
    kind, q_start, q_stop, kv_start, kv_stop = table.numbers[:, full]
    climbs = (q_stop[:-1] == q_start[1:]) & (kv_start[:-1] == kv_start[1:]) & (kv_stop[:-1] <= kv_stop[1:])
    begins = np.flatnonzero(np.append(True, ~climbs))
    last = np.repeat(q_stop[np.append(begins[1:], full.size) - 1], np.diff(np.append(begins, full.size)))
    first = np.append(kv_start[0], np.where(climbs, kv_stop[:-1], kv_start[1:]))
    cut = np.stack([kind, q_start, last, first, kv_stop])[:, kv_stop > first]
    return RegionTable(np.concatenate([np.delete(table.numbers, full, axis=1), cut], axis=1))


def stacks(regions: RegionTable, alike: np.ndarray, *, shared: bool = False) -> list[RegionTable]:
    """Regions that one call for variable lengths can take together: those with the same number, `alike`: (regions,).

    No two have a common query or key, unless these may be `shared`. Each goes, in the order of queries and keys, to the
    first stack that it fits.
    """
    if not len(regions):
        return []
    order = np.lexsort((regions.numbers[3], regions.numbers[1]))
    _, first, of = np.unique(alike[order], return_index=True, return_inverse=True)
    at_first = first[of]  # groups come in the order of their first regions
    by_group = np.argsort(at_first, kind="stable")
    ends = np.flatnonzero(np.diff(at_first[by_group])) + 1
    groups = [regions.take(each) for each in np.split(order[by_group], ends)]
    if shared:
        return groups
    return [group.take(np.array(stack)) for group in groups for stack in _first_fit(group)]


class _Stack:
    """The places of regions in a stack."""

    def __init__(self) -> None:
        self.places = list[int]()
        self._keys = list[tuple[int, int]]()
        self._queries_end = self._keys_end = 0

    def takes(self, q_start: int, kv_start: int, kv_stop: int) -> bool:
        """Whether none has a query or key of a region whose queries don't begin before theirs."""
        if q_start < self._queries_end:
            return False
        return kv_start >= self._keys_end or all(kv_stop <= start or stop <= kv_start for start, stop in self._keys)

    def add(self, place: int, q_stop: int, kv_start: int, kv_stop: int) -> None:
        """Add a region that it takes."""
        self.places.append(place)
        self._keys.append((kv_start, kv_stop))
        self._queries_end, self._keys_end = q_stop, max(self._keys_end, kv_stop)


def _first_fit(regions: RegionTable) -> Iterable[Sequence[int] | np.ndarray]:
    """The places of regions, in the order of queries, in each stack."""
    _, q_start, q_stop, kv_start, kv_stop = regions.numbers
    if (q_start[1:] >= q_stop[:-1]).all() and (kv_start[1:] >= np.maximum.accumulate(kv_stop)[:-1]).all():
        return [np.arange(len(regions))]
    found = list[_Stack]()
    for place, (begin, end, low, high) in enumerate(zip(*regions.numbers[1:].tolist(), strict=True)):
        stack = next((each for each in found if each.takes(begin, low, high)), None)
        if stack is None:
            found.append(stack := _Stack())
        stack.add(place, end, low, high)
    return [stack.places for stack in found]
