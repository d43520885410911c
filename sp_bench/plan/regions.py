"""Regions: the rectangles of a block that are computed, of kinds that every kernel supports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple


class RegionKind(Enum):
    """The keys of a region that its queries see."""

    FULL = "full"
    CAUSAL = "causal"
    """Keys up to and including the query's own index. The region is square."""
    STRICT = "strict"
    """Keys below the query's own index, so that the first query sees none. The region is square."""
    UPPER = "upper"
    """Keys from the query's own index on. The region is square. It is what the far edge of a sliding window cuts."""


class Region(NamedTuple):
    """A rectangle of a block: a range of queries and a range of keys, as indices in their chunks."""

    kind: RegionKind
    q: range
    kv: range

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs are unmasked."""
        rows, columns = len(self.q), len(self.kv)
        if self.kind is RegionKind.FULL:
            return rows * columns
        return rows * (rows - 1) // 2 if self.kind is RegionKind.STRICT else rows * (rows + 1) // 2

    @property
    def plain(self) -> Region:
        """The same pairs without STRICT, which is CAUSAL without the first query and the last key."""
        if self.kind is RegionKind.STRICT:
            return Region(RegionKind.CAUSAL, self.q[1:], self.kv[:-1])
        return self


Regions = Sequence[Region]
"""The unmasked regions of a block; empty if all of it is masked."""


def staircase(rows: range, queries: range, columns: range, keys: range) -> list[Region]:
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


def filled(regions: Iterable[Region]) -> Regions:
    """The regions that have any pair."""
    return tuple(region for region in regions if region.pairs > 0)


def merged(regions: Regions) -> Regions:
    """The regions with adjacent FULL rectangles merged: kernels are faster on larger ones."""
    joined_regions: list[Region] = []
    for region in regions:
        joined = region
        for other in [r for r in joined_regions if r.kind is region.kind is RegionKind.FULL]:
            if other.q == joined.q and other.kv.stop == joined.kv.start:
                joined_regions.remove(other)
                joined = Region(RegionKind.FULL, joined.q, range(other.kv.start, joined.kv.stop))
            elif other.kv == joined.kv and other.q.stop == joined.q.start:
                joined_regions.remove(other)
                joined = Region(RegionKind.FULL, range(other.q.start, joined.q.stop), joined.kv)
        joined_regions.append(joined)
    return tuple(joined_regions)
