"""Schedules of a Mesh-Attention tile that are searched for, beside the paper's greedy ones (methods/mesh.py).

Algorithms 2 and 3 receive everything before they send, and count a hop in whole blocks. Where blocks and transfers take
about equally long, neither is hidden well by that. Here the order of the transfers is searched for: from the greedy
order, one hop after the other is taken to another place while that shortens the step of a rank. Blocks follow from the
order: of those that are ready, the one that is needed first by a hop.

All ranks do the same, so one rank tells the time of all: a hop starts when the lane is free and what it sends is there,
a block when its chunks are, and what a hop brings is folded before the next one sends it on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

EVALUATIONS = 400_000
"""Blocks that all orders tried may have together: about half a second."""

FEW_HOPS = 5
"""Of so many hops, all orders are tried."""


class Placed(NamedTuple):
    """What an order of transfers comes to."""

    end_s: float
    transfers: list[float]
    """When each hop starts."""
    blocks: list[tuple[float, tuple[int, int]]]
    """When each block ends, in the order of execution."""


@dataclass(frozen=True)
class Tensors:
    """What travels in one phase: gathered by rows and columns of the tile, and reduced by rows and columns, if so."""

    q: str
    kv: str
    o: str
    dkv: str | None
    """None in a forward."""


@dataclass(frozen=True)
class TileTimes:
    """A tile, and the seconds of a block and of a hop of each tensor."""

    a: int
    b: int
    tensors: Tensors
    block_s: float
    hop_s: Mapping[str, float]

    def allowed(self, order: Sequence[str]) -> bool:
        """Whether each hop sends what can be there: rows that saw all columns, columns that saw all rows."""
        names, done = self.tensors, dict.fromkeys(self.hop_s, 0)
        for name in order:
            if name == names.o:
                there = done[names.kv] == self.b - 1 and done[names.q] > done[name]
            elif name == names.dkv:
                there = done[names.q] == self.a - 1 and done[names.kv] > done[name]
            else:
                there = True
            if not there:
                return False
            done[name] += 1
        return True

    def place(self, order: Sequence[str]) -> Placed:
        """When everything happens if hops go in this order."""
        return _Placing(self, order).result()


class _Placing:
    """One rank's time, hop after hop."""

    def __init__(self, times: TileTimes, order: Sequence[str]) -> None:
        self._times, self._order = times, order
        names = times.tensors
        self._lane_s = self._now_s = 0.0
        self._left = {"row": [times.b] * times.a, "column": [times.a] * times.b}
        self._needed = {"row": _places(order, names.o, times.a), "column": _places(order, names.dkv, times.b)}
        self._rows, self._columns = [0.0], [0.0]
        self._ready: list[tuple[tuple[int, int, int, int], tuple[int, int]]] = []
        self._coming: list[tuple[float, tuple[int, int]]] = []
        self._blocks: list[tuple[float, tuple[int, int]]] = []
        self._comes(0.0, 0, 0)

    def result(self) -> Placed:
        names, starts = self._times.tensors, []
        sent = {names.o: 0, names.dkv: 0}
        for name in self._order:
            if name in sent:
                lines = self._left["row" if name == names.o else "column"]
                while lines[sent[name] + 1]:
                    self._compute()
                while self._now_s < self._lane_s and self._compute_before(self._lane_s):
                    pass
                # What the last hop brought is folded between two blocks.
                start = max(self._lane_s, self._now_s if sent[name] else self._done_s(name, sent[name] + 1))
                sent[name] += 1
            else:
                start = self._lane_s
            starts.append(start)
            self._lane_s = start + self._times.hop_s[name]
            if name == names.q:
                self._rows.append(self._lane_s)
                for v, column_s in enumerate(self._columns):
                    self._comes(max(self._lane_s, column_s), len(self._rows) - 1, v)
            elif name == names.kv:
                self._columns.append(self._lane_s)
                for u, row_s in enumerate(self._rows):
                    self._comes(max(self._lane_s, row_s), u, len(self._columns) - 1)
        while self._coming or self._ready:
            self._compute()
        return Placed(max(self._lane_s, self._now_s), starts, self._blocks)

    def _done_s(self, name: str, line: int) -> float:
        """When the blocks of a row or column have ended."""
        axis = 0 if name == self._times.tensors.o else 1
        return next(at for at, block in reversed(self._blocks) if block[axis] == line)

    def _comes(self, at_s: float, u: int, v: int) -> None:
        heapq.heappush(self._coming, (at_s, (u, v)))

    def _compute_before(self, end_s: float) -> bool:
        """Compute a block that can start before that; whether there was one."""
        self._gather()
        if not self._ready and (not self._coming or self._coming[0][0] >= end_s):
            return False
        self._compute()
        return True

    def _compute(self) -> None:
        """Compute the block that is needed first among those that are ready."""
        self._gather()
        if not self._ready:
            self._now_s = self._coming[0][0]
            self._gather()
        _, (u, v) = heapq.heappop(self._ready)
        self._now_s += self._times.block_s
        self._blocks.append((self._now_s, (u, v)))
        self._left["row"][u] -= 1
        self._left["column"][v] -= 1

    def _gather(self) -> None:
        while self._coming and self._coming[0][0] <= self._now_s:
            _, (u, v) = heapq.heappop(self._coming)
            row, column = self._needed["row"][u], self._needed["column"][v]
            heapq.heappush(self._ready, ((min(row, column), max(row, column), u, v), (u, v)))


def _places(order: Sequence[str], name: str | None, lines: int) -> list[int]:
    """For each row or column, the place of the hop that sends it; the own one, #0, is sent by none."""
    hops = [i for i, each in enumerate(order) if each == name]
    return [len(order), *hops] if hops else [len(order)] * lines


def search(times: TileTimes, greedy: Sequence[str]) -> tuple[list[str], Placed]:
    """The best order found, and what it comes to; never worse than the greedy one."""
    tries = max(8, EVALUATIONS // (times.a * times.b))
    best, order = times.place(greedy), list(greedy)
    for start in _every(times, greedy) if len(greedy) <= FEW_HOPS else _starts(times):
        if (placed := times.place(start)).end_s < best.end_s:
            best, order = placed, start
    improved = True
    while improved and tries > 0:
        improved = False
        for other in _moved(order):
            if not times.allowed(other):
                continue
            tries -= 1
            if (placed := times.place(other)).end_s < best.end_s * (1 - 1e-9):
                best, order, improved = placed, other, True
                break
            if tries <= 0:
                break
    return order, best


def _every(times: TileTimes, order: Sequence[str]) -> Iterator[list[str]]:
    """All allowed orders of these hops, on every rank in the same order."""
    return (list(other) for other in dict.fromkeys(permutations(order)) if times.allowed(other))


def _starts(times: TileTimes) -> Iterator[list[str]]:
    """All rows first, or all columns first, and what is then complete sent as soon as it is."""
    names, a, b = times.tensors, times.a - 1, times.b - 1
    if names.dkv is None:
        yield [names.q] * a + [names.kv] * b + [names.o] * a
        yield [names.kv] * b + [names.q] * a + [names.o] * a
        yield [names.kv] * b + [names.q, names.o] * a
        return
    yield [names.q] * a + [names.kv, names.dkv] * b + [names.o] * a
    yield [names.kv] * b + [names.q, names.o] * a + [names.dkv] * b


def _moved(order: Sequence[str]) -> Iterator[list[str]]:
    """Every order with one hop elsewhere, near places first."""
    for distance in range(1, len(order)):
        for i in range(len(order) - distance):
            j = i + distance
            if order[i] != order[j]:
                yield [*order[:i], *order[i + 1 : j + 1], order[i], *order[j + 1 :]]
                yield [*order[:i], order[j], *order[i:j], *order[j + 1 :]]


def steps_of(order: Sequence[str], placed: Placed) -> Iterator[tuple[str, tuple[tuple[int, int], ...]]]:
    """(transfer, the blocks that end while it is the last one that has started), in order.

    A block that is under way when a hop starts comes after it in the plan, so that the hop needn't wait for a buffer
    that the block reads.
    """
    starts = [-math.inf, *placed.transfers, math.inf]
    for name, start, end in zip(["", *order], starts, starts[1:], strict=False):
        blocks = tuple(block for at, block in placed.blocks if start < at <= end)
        if name or blocks:
            yield name, blocks
