"""Orders of a Mesh-Attention tile that need little memory: row by row, or column by column.

Chen et al. leave it to future work to release KV chunks as columns finish. Here one side of the tile is held and the
other one streams by. `rows` gathers all KV chunks while it computes row 0 with them; then it takes a row at a time:
receives Q#u, computes its b blocks, and sends O#u on while the next row is computed. Two buffers of Q are enough, and
three accumulators of O: of the own row, of the row in work and of the row on its way. `columns` is the same with Q held
and KV streaming, backward with dKV. Partials of the side that is held are complete in the last line, and each leaves
as soon as it is.

Peak memory, in chunks of N/n tokens x heads * head_dim elements in bf16, statistics apart, a and b at least 4,
k = kv_heads / heads, accumulators in fp32 (2 chunks each):
    rows     forward   2k b + 12                KV; 3 of Q; O: 3 accumulators, 1 arriving, 1 cast to be sent, 1 result
             backward  6k b + 6k + 18           KV, dKV; 3 of OdOQ (3 each); dQ as O; dKV arriving, cast, result
    columns  forward   3a + 6k + 3              Q and O accumulators; 3 of KV; O arriving, cast, result
             backward  5a + 24k + 3             OdOQ and dQ; 3 of KV, dKV as O above; dQ arriving, cast, result
A schedule that keeps what it has received until the end holds 3a + 2k b and 5a + 6k b instead, and the same constants.

Both send what the paper's order sends. They start with one line of blocks while the held side is gathered, and end with
the held side's partials, so that less is hidden where transfers are long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sp_bench.methods.mesh_times import Block, Hop, Move, Tensors
from sp_bench.plan import Tensor

ORDERS = ("rows", "columns")
"""The side that streams by."""


class _Side(NamedTuple):
    """One side of a tile."""

    lines: int
    gathered: Tensor
    reduced: Tensor | None
    """The tensor of its partials; None forward for columns."""


def lean_order(order: str, a: int, b: int, tensors: Tensors) -> Iterator[Move]:
    """The steps of an a x b tile in one of ORDERS."""
    rows, columns = _Side(a, tensors.q, tensors.o), _Side(b, tensors.kv, tensors.dkv)
    streams, held = (rows, columns) if order == "rows" else (columns, rows)

    def block(line: int, i: int) -> tuple[Block, ...]:
        return (Block(0, line, i) if order == "rows" else Block(0, i, line),)

    def hop(tensor: Tensor | None, wanted: bool = True) -> Iterator[Move]:
        if tensor and wanted:
            yield Hop(0, tensor), ()

    last = streams.lines - 1
    for i in range(held.lines):
        yield from hop(held.gathered, i + 1 < held.lines)
        yield from hop(streams.gathered, i + 1 == held.lines and last > 0)
        yield None, block(0, i)
        yield from hop(held.reduced, last == 0 and i > 0)
    for line in range(1, streams.lines):
        yield from hop(streams.reduced, line > 1)
        yield from hop(streams.gathered, line < last)
        for i in (*range(1, held.lines), 0):
            yield None, block(line, i)
            yield from hop(held.reduced, line == last and i > 0)
    yield from hop(streams.reduced, last > 0)
