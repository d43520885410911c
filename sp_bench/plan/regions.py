"""Regions: the rectangles of a block that are computed, of kinds that every kernel supports."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class RegionKind(Enum):
    """Which keys of a region its queries see."""

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


Regions = tuple[Region, ...]
"""The unmasked regions of a block; empty if all of it is masked."""
