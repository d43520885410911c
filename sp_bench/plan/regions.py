"""Regions: the rectangles of a block that are computed, of kinds that every kernel supports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def stacks(regions: Iterable[Region], alike: Callable[[Region], object]) -> list[list[Region]]:
    """Regions that one call for variable lengths can take together: alike, no two with a common query or key.

    Without STRICT ones (Region.plain).
    """
    groups: dict[object, list[list[Region]]] = {}
    for region in sorted((region.plain for region in regions), key=lambda region: (region.q.start, region.kv.start)):
        found = groups.setdefault(alike(region), [])
        for stack in found:
            if stack[-1].q.stop <= region.q.start and all(_apart(region.kv, other.kv) for other in stack):
                stack.append(region)
                break
        else:
            found.append([region])
    return [stack for found in groups.values() for stack in found]


def _apart(one: range, other: range) -> bool:
    return one.stop <= other.start or other.stop <= one.start
