"""Blocks of a Mesh-Attention tile in runs, for plan.fuse to make one kernel call of several: ours, not the paper's.

Algorithms 2 and 3 choose how many blocks overlap a transfer, and which one comes next. Here as many overlap it, of one
row (forward) or of one column (backward) where there are enough, and of chunks that were received one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

from sp_bench.methods.mesh_schedule import Block, Tile, first_bit, first_bits, own_last


class RowRuns(Tile):
    """A tile that computes runs of rows."""

    def compute_blocks(self, x: int, choose: Callable[[], Block | None]) -> tuple[Block, ...]:
        """At most x ready blocks, runs of rows first."""
        blocks = _runs(self, x, columns=False)
        return (*blocks, *super().compute_blocks(x - len(blocks), choose))


class ColumnRuns(Tile):
    """A tile that computes runs of columns until all chunks are there."""

    def compute_blocks(self, x: int, choose: Callable[[], Block | None]) -> tuple[Block, ...]:
        """At most x ready blocks, runs of columns first."""
        blocks = [] if self.received_all else _runs(self, x, columns=True)
        return (*blocks, *super().compute_blocks(x - len(blocks), choose))


def _runs(tile: Tile, x: int, *, columns: bool) -> list[Block]:
    """At most x blocks in runs, which are computed."""
    blocks: list[Block] = []
    while len(blocks) < x and (run := _next_run(tile, x - len(blocks), columns=columns)):
        blocks += map(tile.compute, run)
    return blocks


def _next_run(tile: Tile, most: int, *, columns: bool = False) -> list[Block]:
    """At most `most` ready blocks of one row (or column), (u, v), whose chunks were received one after the other.

    They are of the first row, in order of priority, that has as many, or of the one that has the most.
    """
    lines, left = (tile.columns, tile.unfinished_columns) if columns else (tile.rows, tile.unfinished_rows)
    along, across = tile.q_received, tile.kv_received
    if columns:
        along, across = across, along
    best: tuple[int, list[int]] = (0, [])
    for line in own_last(left & first_bits(along + 1)):
        run = _first_run(lines[line] & first_bits(across + 1), most)
        best = max(best, (line, run), key=lambda found: len(found[1]))
        if len(run) == most:
            break
    line, run = best
    return [(other, line) if columns else (line, other) for other in run]


def _first_run(bits: int, most: int) -> list[int]:
    """The longest run of neighbouring bits above the lowest, which is one by itself; at most its first `most`."""
    best = [0] if bits & 1 else []
    bits &= ~1
    while bits:
        first = first_bit(bits)
        length = first_bit(~(bits >> first))
        if min(length, most) > len(best):
            best = list(range(first, first + min(length, most)))
        bits &= ~(((1 << length) - 1) << first)
    return best
