"""The pairs of a block that its regions compute, by the definition of their kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from sp_bench.plan.regions import Region, RegionKind, Regions


def inside(region: Region) -> np.ndarray:
    """The pairs of a region that are computed, by the definition of its kind."""
    q, k = np.arange(len(region.q))[:, None], np.arange(len(region.kv))[None, :]
    return {RegionKind.FULL: q >= 0 * k, RegionKind.CAUSAL: k <= q, RegionKind.STRICT: k < q, RegionKind.UPPER: k >= q}[
        region.kind
    ]


def times_computed(regions: Regions, rows: int, columns: int) -> np.ndarray:
    """How often the regions compute each pair of a block."""
    times = np.zeros((rows, columns), int)
    for region in regions:
        times[region.q.start : region.q.stop, region.kv.start : region.kv.stop] += inside(region)
    return times


def regions_by_query(first: np.ndarray, stop: np.ndarray) -> Regions:
    """The regions of a block in which query x sees the keys first[x] <= y < stop[x], found query by query.

    first, stop: (queries,), neither falls. Queries whose ends both stay, or move on by a key a query, form a strip.
    """
    rows = [x for x in range(first.size) if stop[x] > first[x]]
    moves = [_move(first, stop, *pair) for pair in pairwise(rows)]
    moves = [
        -1 if move == (1, 1) and (1, 1) not in (*moves[max(i - 1, 0) : i], *moves[i + 1 : i + 2]) else move
        for i, move in enumerate(moves)
    ]
    found, at = list[Region](), 0
    while at < len(rows):
        move, last = (moves[at] if at < len(moves) else -1), at
        while move != -1 and last < len(moves) and moves[last] == move:
            last += 1
        falls, rises = (0, 0) if move == -1 else move  # pyright: ignore[reportGeneralTypeIssues]
        x = rows[at]
        found += _strip(range(x, x + last - at + 1), int(first[x]), int(stop[x]), falls, rises)
        at = last + 1
    return tuple(_joined(found))


def _move(first: np.ndarray, stop: np.ndarray, x: int, y: int) -> tuple[int, int] | int:
    moved = int(first[y] - first[x]), int(stop[y] - stop[x])
    return moved if y == x + 1 and max(moved) <= 1 else -1


def _strip(queries: range, first: int, stop: int, falls: int, rises: int) -> Iterator[Region]:
    """The regions of a strip: its first query sees first <= y < stop, and the ends move on by so many keys."""
    size = len(queries)
    if falls and rises:
        for at in range(0, size, stop - first):
            rows = queries[at : at + stop - first]
            lost, kept, won = first + at, first + at + len(rows), stop + at
            yield Region(RegionKind.UPPER, rows, range(lost, kept))
            if kept < won:
                yield Region(RegionKind.FULL, rows, range(kept, won))
            if len(rows) > 1:
                yield Region(RegionKind.CAUSAL, rows[1:], range(won, won + len(rows) - 1))
        return
    if rises:
        yield Region(RegionKind.CAUSAL, queries, range(stop - 1, stop - 1 + size))
        stop -= 1
    elif falls:
        yield Region(RegionKind.UPPER, queries, range(first, first + size))
        first += size
    if first < stop:
        yield Region(RegionKind.FULL, queries, range(first, stop))


def _joined(regions: Sequence[Region]) -> Iterator[Region]:
    """The regions with FULL ones joined that have the same keys and neighbouring queries."""
    open_ones: dict[tuple[int, int], Region] = {}
    for region in regions:
        if region.kind is not RegionKind.FULL:
            yield region
            continue
        keys = (region.kv.start, region.kv.stop)
        before = open_ones.get(keys)
        if before and before.q.stop == region.q.start:
            region = region._replace(q=range(before.q.start, region.q.stop))
        elif before:
            yield before
        open_ones[keys] = region
    yield from open_ones.values()
