"""A search for schedules of a Mesh-Attention tile that are faster than the paper's greedy ones (methods/mesh.py).

Algorithms 2 and 3 receive everything before they send, and count a hop in whole blocks. This hides little where blocks
and transfers take about equally long. The search starts from the greedy order of transfers and moves one hop at a time
while this shortens the phase. The order of blocks follows: of the ready blocks, the one that a hop needs first.

With several `slices` of the heads the tile is computed once per slice, each a few hops behind the one before. While the
first chunks of a slice arrive or its last partials leave, another slice has blocks to compute.

All ranks do the same, so the times of one rank are those of all. A hop starts when the lane is free and its tensor is
ready, a block when its chunks are. The arrival of a hop is folded before the next hop sends it on.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from sp_bench.methods.mesh_bounds import busy_s, least_s
from sp_bench.methods.mesh_times import Block, Hop, TileTimes
from sp_bench.plan import Tensor

EVALUATIONS = 200_000
"""Most blocks placed while hops are moved, summed over the orders tried: about half a second. Starts take as long."""

FEW_HOPS = 5
"""Up to this many hops of a slice, all orders are tried."""
FEW_LAGS = 12
"""About how many distances between slices are tried."""
CLOSE = 5e-4
"""The search ends with an order whose time is at most this share above a bound on all orders."""
LONG_SIDE = 128
"""For tiles with a longer side, the bound takes longer than the search that it may end."""
ROUNDING = 1e-9
"""A smaller relative difference of two times is none."""


class Placed(NamedTuple):
    """The timing of an order of transfers, in seconds."""

    end_s: float
    transfers: list[float]
    """The start of each hop."""
    blocks: list[tuple[float, Block]]
    """(end, block) in the order of execution."""


def place(times: TileTimes, order: Sequence[Hop]) -> Placed:
    """The timing if hops go in this order."""
    placed = place_within(times, order, math.inf)
    assert placed
    return placed


def place_within(times: TileTimes, order: Sequence[Hop], limit_s: float) -> Placed | None:
    """The timing if hops go in this order; None, found out early, if it doesn't end before `limit_s`."""
    return _Placing(times, order).result(limit_s)


class _Placing:
    """Simulates one rank for one order of hops."""

    def __init__(self, times: TileTimes, order: Sequence[Hop]) -> None:
        self._times, self._order = times, order
        names, slices = times.tensors, range(times.slices)
        self._lane_s = self._now_s = 0.0
        self._left = {"row": [[times.b] * times.a for _ in slices], "column": [[times.a] * times.b for _ in slices]}
        self._needed = {
            "row": [_places(order, Hop(i, names.o), times.a) for i in slices],
            "column": [_places(order, Hop(i, names.dkv) if names.dkv else None, times.b) for i in slices],
        }
        self._rows, self._columns = ([[0.0] for _ in slices] for _ in range(2))
        self._ready: list[tuple[tuple[int, int], Block]] = []
        self._coming: list[tuple[float, Block]] = []
        self._blocks: list[tuple[float, Block]] = []
        for i in slices:
            self._comes(0.0, Block(i, 0, 0))

    def result(self, limit_s: float) -> Placed | None:
        names, starts = self._times.tensors, []
        sent = Counter[Hop]()
        hops_left_s = sum(self._times.hop_s[name] for _, name in self._order)
        blocks = self._times.a * self._times.b * self._times.slices
        for hop in self._order:
            blocks_left_s = (blocks - len(self._blocks)) * self._times.block_s
            if max(self._lane_s + hops_left_s, self._now_s + blocks_left_s) >= limit_s:
                return None
            i, name = hop
            hops_left_s -= self._times.hop_s[name]
            if name in (names.o, names.dkv):
                lines = self._left["row" if name == names.o else "column"][i]
                while lines[sent[hop] + 1]:
                    self._compute()
                while self._now_s < self._lane_s and self._compute_before(self._lane_s):
                    pass
                # The arrival of the last hop is folded between two blocks.
                start = max(self._lane_s, self._now_s if sent[hop] else self._done_s(hop, 1))
                sent[hop] += 1
            else:
                start = self._lane_s
            starts.append(start)
            self._lane_s = start + self._times.hop_s[name]
            rows, columns = self._rows[i], self._columns[i]
            if name == names.q:
                rows.append(self._lane_s)
                for v, column_s in enumerate(columns):
                    self._comes(max(self._lane_s, column_s), Block(i, len(rows) - 1, v))
            elif name == names.kv:
                columns.append(self._lane_s)
                for u, row_s in enumerate(rows):
                    self._comes(max(self._lane_s, row_s), Block(i, u, len(columns) - 1))
        while self._coming or self._ready:
            self._compute()
        end_s = max(self._lane_s, self._now_s)
        return Placed(end_s, starts, self._blocks) if end_s < limit_s else None

    def _done_s(self, hop: Hop, line: int) -> float:
        """The end of the last block of a row or column."""
        of_row = hop.tensor == self._times.tensors.o
        ended = reversed(self._blocks)
        return next(at for at, (i, u, v) in ended if i == hop.slice and (u if of_row else v) == line)

    def _comes(self, at_s: float, block: Block) -> None:
        heapq.heappush(self._coming, (at_s, block))

    def _compute_before(self, end_s: float) -> bool:
        """Compute a block that can start before `end_s`. Returns whether there was one."""
        self._gather()
        if not self._ready and (not self._coming or self._coming[0][0] >= end_s):
            return False
        self._compute()
        return True

    def _compute(self) -> None:
        """Compute the ready block that a hop needs first."""
        self._gather()
        if not self._ready:
            self._now_s = self._coming[0][0]
            self._gather()
        _, block = heapq.heappop(self._ready)
        self._now_s += self._times.block_s
        self._blocks.append((self._now_s, block))
        self._left["row"][block.slice][block.u] -= 1
        self._left["column"][block.slice][block.v] -= 1

    def _gather(self) -> None:
        while self._coming and self._coming[0][0] <= self._now_s:
            _, block = heapq.heappop(self._coming)
            row, column = self._needed["row"][block.slice][block.u], self._needed["column"][block.slice][block.v]
            heapq.heappush(self._ready, ((min(row, column), max(row, column)), block))


def _places(order: Sequence[Hop], sent: Hop | None, lines: int) -> list[int]:
    """For each row or column, the place in the order of the hop that sends it. The own one, #0, is never sent."""
    hops = [place for place, hop in enumerate(order) if hop == sent]
    return [len(order), *hops] if hops else [len(order)] * lines


def search(times: TileTimes, greedy: Sequence[Tensor]) -> tuple[list[Hop], Placed]:
    """(order, its timing) of the best order found: never slower than the greedy order, one slice after another.

    It ends early with an order that no other beats by more than CLOSE (mesh_bounds.least_s).
    """
    tries = max(8, EVALUATIONS // (times.a * times.b * times.slices))
    order = _lagging(times, greedy, len(greedy))
    best, enough_s = place(times, order), busy_s(times) * (1 + CLOSE)
    if best.end_s > enough_s and max(times.a, times.b) <= LONG_SIDE:
        enough_s = least_s(times) * (1 + CLOSE)
    for start in _starts(times, greedy):
        if best.end_s <= enough_s:
            return order, best
        if placed := place_within(times, start, best.end_s * (1 - ROUNDING)):
            best, order = placed, start
    improved = True
    while improved and tries > 0 and best.end_s > enough_s:
        improved = False
        for other in _moved(order):
            if not times.allowed(other):
                continue
            tries -= 1
            if placed := place_within(times, other, best.end_s * (1 - ROUNDING)):
                best, order, improved = placed, other, True
                break
            if tries <= 0:
                break
    return order, best


def _starts(times: TileTimes, greedy: Sequence[Tensor]) -> Iterator[list[Hop]]:
    """Orders to start from: several orders of one slice, each with several distances between slices."""
    few = len(greedy) <= FEW_HOPS
    for order in _every(times, greedy) if few else (greedy, *_complete_first(times)):
        step = max(1, -(-len(order) // FEW_LAGS))
        for lag in range(step, len(order) + step, step) if times.slices > 1 else (0,):
            yield _lagging(times, order, lag)


def _lagging(times: TileTimes, order: Sequence[Tensor], lag: int) -> list[Hop]:
    """The order of all slices' hops, each slice `lag` hops behind the one before."""
    hops = [(i * lag + place, Hop(i, name)) for i in range(times.slices) for place, name in enumerate(order)]
    return [hop for _, hop in sorted(hops, key=lambda placed: (placed[0], placed[1].slice))]


def _every(times: TileTimes, order: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """All allowed orders of one slice's hops, in a deterministic sequence: every rank must find the same schedule."""
    for other in dict.fromkeys(permutations(order)):
        if times.allowed([Hop(0, name) for name in other]):
            yield list(other)


def _complete_first(times: TileTimes) -> Iterator[list[Tensor]]:
    """Orders that receive all rows first or all columns first, and send each complete partial at once."""
    names, a, b = times.tensors, times.a - 1, times.b - 1
    if names.dkv is None:
        yield [names.q] * a + [names.kv] * b + [names.o] * a
        yield [names.kv] * b + [names.q] * a + [names.o] * a
        yield [names.kv] * b + [names.q, names.o] * a
        return
    yield [names.q] * a + [names.kv, names.dkv] * b + [names.o] * a
    yield [names.kv] * b + [names.q, names.o] * a + [names.dkv] * b


def _moved(order: Sequence[Hop]) -> Iterator[list[Hop]]:
    """Every order with one hop moved, the shortest moves first."""
    for distance in range(1, len(order)):
        for i in range(len(order) - distance):
            j = i + distance
            if order[i] != order[j]:
                yield [*order[:i], *order[i + 1 : j + 1], order[i], *order[j + 1 :]]
                yield [*order[:i], order[j], *order[i:j], *order[j + 1 :]]


def steps_of(order: Sequence[Hop], placed: Placed) -> Iterator[tuple[Hop | None, tuple[Block, ...]]]:
    """(hop, the blocks that end after it starts and before the next hop starts), in order; hop is None at the start.

    A block that is running when a hop starts comes after it in the plan, so that the hop doesn't wait for a buffer that
    the block reads.
    """
    starts = [-math.inf, *placed.transfers, math.inf]
    for hop, start, end in zip([None, *order], starts, starts[1:], strict=False):
        blocks = tuple(block for at, block in placed.blocks if start < at <= end)
        if hop or blocks:
            yield hop, blocks
