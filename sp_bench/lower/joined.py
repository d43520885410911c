"""The places of the chunks that a fused block reads: side by side in one allocation, or to be copied together."""

from __future__ import annotations

from itertools import pairwise

from sp_bench.lower.transports import TransportKind
from sp_bench.plan.fuse import Slots
from sp_bench.plan.ops import Chunk, Fused, Plan
from sp_bench.plan.problem import Problem
from sp_bench.plan.schedule import ReceiveBuffer, schedule
from sp_bench.plan.tensors import Kind, Tensor
from sp_bench.plan.union import KernelCall, Pieces, tokens


def side_by_side_rows(plan: Plan, transport: TransportKind) -> tuple[tuple[ReceiveBuffer, ...], ...]:
    """The receive buffers that are allocated as one: all of a tensor of which fused blocks read several chunks.

    None where peers write to the buffers, as they know each by its own address.
    """
    if transport.lands:
        return ()
    fused = [op for op in plan.ops if isinstance(op, Fused)]
    read = {c[0].tensor for op in fused for c in (op.queries, op.keys) if len(c) > 1}
    rows: dict[Tensor, list[ReceiveBuffer]] = {}
    for buffer in dict.fromkeys(schedule(plan).receive_buffers.values()):
        if buffer.tensor in read and not buffer.arriving and buffer.chunks == 1 and not buffer.of_rows:
            rows.setdefault(buffer.tensor, []).append(buffer)
    return tuple(tuple(sorted(row)) for row in rows.values() if len(row) > 1)


def read_in_place(plan: Plan, transport: TransportKind) -> frozenset[tuple[int, bool]]:
    """(operation, whether its keys) of fused blocks whose chunks on that side lie end to end in their buffers."""
    slots, in_place = Slots(plan), set[tuple[int, bool]]()
    shared = {buffer for row in side_by_side_rows(plan, transport) for buffer in row}
    for index, op in plan if shared else ():
        if isinstance(op, Fused):
            in_place |= {
                (index, keys) for keys in (False, True) if _in_line(slots, index, op.keys if keys else op.queries)
            }
    return frozenset(in_place)


def _in_line(slots: Slots, index: int, chunks: tuple[Chunk, ...]) -> bool:
    places = [slots.of(index, chunk) for chunk in chunks]
    return len(chunks) > 1 and all(
        one and other and one.row == other.row and other.number == one.number + 1 and not one.gathered
        for one, other in pairwise(places)
    )


def copied_bytes(call: KernelCall, problem: Problem, op: Fused, *, in_place: tuple[bool, bool]) -> int:
    """Bytes of queries and keys that have to be copied together before a kernel call, as they don't lie end to end.

    `in_place` says of the operation's query chunks and of its key chunks whether they do. Statistics never do: their
    last dimension is that of the tokens.
    """
    sides = ((call.q, op.queries, in_place[0]), (call.kv, op.keys, in_place[1]))
    return sum(
        tokens(pieces) * problem.token_bytes(field, wire=False)
        for pieces, chunks, lies in sides
        if len(pieces) > 1
        for field in chunks[0].tensor.fields
        if field.kind is Kind.STATISTIC or not (lies and _whole(pieces, chunks, problem))
    )


def _whole(pieces: Pieces, chunks: tuple[Chunk, ...], problem: Problem) -> bool:
    """Whether the pieces are whole chunks, one after the other. All chunks of a fused plan are of one size."""
    size = problem.field_tokens(chunks[0].tensor.fields[0])
    return all(len(piece.rows) == size for piece in pieces) and all(
        after.chunk == before.chunk + 1 for before, after in pairwise(pieces)
    )
