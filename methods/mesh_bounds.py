"""A certified lower bound on the time of a Mesh-Attention tile, for any order of its hops and blocks.

The machine is that of mesh_search.py: a rank with a lane that carries one hop at a time and a stream that computes one
block at a time. The bound relaxes one thing: blocks count, but not which ones they are. After i Q and j KV chunks have
been received, (i + 1) (j + 1) blocks are unlocked. Before row x and column y of the partials leave, all blocks of the
first x rows and y columns that are sent must have been computed: x b + y a - x y of them. Every schedule of the tile is
one of the relaxed problem, with the same times, so that none is faster than the fastest relaxed one.

The relaxed problem is solved exactly by dynamic programming over how often each tensor has hopped, (i, j, x, y). For a
given order of hops, blocks are best computed as soon as any is unlocked. Two numbers then say all about the past: when
the lane is free, t, and when the unlocked blocks are done, f. If A blocks are unlocked, the U of them that a send needs
are done at max(t, f - (A - U) c), c the time of a block: from the last time the stream stood idle, which some receive
ended before t, until f it computes without a break. Less is better in both numbers, so that of each state only those
pairs are kept that no other beats in both.

No send needs block (0, 0), the only one that is there from the start. It is computed first, and then a send needs one
block more; or else the stream stands idle until the first receive has ended. The bound is the less of the two.

Folds, and waits for the end of a running block, are left out, which only lowers the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sp_bench.methods.mesh_times import Block, Hop, TileTimes
from sp_bench.plan import Tensor

State = tuple[int, int, int, int]
"""Hops of Q, KV, O (dQ) and dKV so far."""
Pair = tuple[float, float]
"""(when the lane is free, when all unlocked blocks are done), in seconds."""


def busy_s(times: TileTimes) -> float:
    """A bound that any order meets: all blocks, or all hops, without a wait, in seconds."""
    hops_s = sum(count * times.hop_s[name] for name, count in _hops(times).items())
    return times.slices * max(times.a * times.b * times.block_s, hops_s)


def least_s(times: TileTimes) -> float:
    """The bound in seconds. It is busy_s with several slices, whose blocks may take turns."""
    if times.slices > 1:
        return busy_s(times)
    hops = sum(_hops(times).values())
    return min(_fastest_s(times, hops, own_first) for own_first in (True, False))


def time_of(times: TileTimes, steps: Iterable[tuple[Hop | None, Sequence[Block]]]) -> float:
    """The seconds that steps take: each step's hop, and its blocks in their order, as soon as what they need is there.

    What a hop of a partial brings is folded before the tensor's next hop, and delays the blocks after it if it is late.
    """
    names, slices = times.tensors, range(times.slices)
    lane_s = now_s = 0.0
    rows, columns = ([[0.0] for _ in slices] for _ in range(2))
    brought_s: dict[Hop, float] = {}
    ends: dict[tuple[Tensor | None, int, int], float] = {}
    for hop, blocks in steps:
        if hop and hop.tensor in (names.o, names.dkv):
            first = hop not in brought_s
            now_s = max(now_s, brought_s.get(hop, 0.0))
            lane_s = max(lane_s, ends[hop.tensor, hop.slice, 1] if first else now_s) + times.hop_s[hop.tensor]
            brought_s[hop] = lane_s
        elif hop:
            lane_s += times.hop_s[hop.tensor]
            (rows if hop.tensor == names.q else columns)[hop.slice].append(lane_s)
        for i, u, v in blocks:
            now_s = max(now_s, rows[i][u], columns[i][v]) + times.block_s
            ends[names.o, i, u] = ends[names.dkv, i, v] = now_s
    return max(lane_s, now_s)


def _hops(times: TileTimes) -> dict[Tensor, int]:
    """How often each tensor hops, by slice."""
    names, a, b = times.tensors, times.a, times.b
    hops = {names.q: a - 1, names.kv: b - 1, names.o: a - 1}
    return hops | ({names.dkv: b - 1} if names.dkv else {})


def _fastest_s(times: TileTimes, hops: int, own_first: bool) -> float:
    """The time of the fastest relaxed schedule that computes block (0, 0) first, or nothing before a receive."""
    layer: dict[State, list[Pair]] = {(0, 0, 0, 0): [(0.0, times.block_s * own_first)]}
    for _ in range(hops):
        reached: dict[State, list[Pair]] = {}
        for state, pairs in layer.items():
            for after, hop_s in _moves(times, state):
                reached.setdefault(after, []).extend(
                    _later(times, state, after, hop_s, pair, own_first) for pair in pairs
                )
        layer = {state: _unbeaten(pairs) for state, pairs in reached.items()}
    return max(min(max(pair) for pairs in layer.values() for pair in pairs), times.a * times.b * times.block_s)


def _moves(times: TileTimes, state: State) -> Iterator[tuple[State, float]]:
    """The states after one more hop, with its seconds: rows leave once all columns are there, and columns likewise."""
    (i, j, x, y), names, seconds = state, times.tensors, times.hop_s
    rows, columns = times.a - 1, times.b - 1
    if i < rows:
        yield (i + 1, j, x, y), seconds[names.q]
    if j < columns:
        yield (i, j + 1, x, y), seconds[names.kv]
    if j == columns and x < i:
        yield (i, j, x + 1, y), seconds[names.o]
    if names.dkv and i == rows and y < j:
        yield (i, j, x, y + 1), seconds[names.dkv]


def _later(times: TileTimes, before: State, after: State, hop_s: float, pair: Pair, own_first: bool) -> Pair:
    (free_s, done_s), (i, j, x, y) = pair, after
    unlocked, needed = (i + 1) * (j + 1), x * times.b + y * times.a - x * y + own_first
    if before[:2] == after[:2]:
        return max(free_s, done_s - (unlocked - needed) * times.block_s) + hop_s, done_s
    free_s += hop_s
    waiting = before == (0, 0, 0, 0) and not own_first
    more = unlocked - (0 if waiting else (before[0] + 1) * (before[1] + 1))
    return free_s, max(done_s, free_s) + more * times.block_s


def _unbeaten(pairs: list[Pair]) -> list[Pair]:
    kept: list[Pair] = []
    for free_s, done_s in sorted(pairs):
        if not kept or done_s < kept[-1][1]:
            kept.append((free_s, done_s))
    return kept
