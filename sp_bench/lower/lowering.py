"""Lower a plan to one transport. The executor, the simulator and the memory account read the same lowering."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from sp_bench.lower.early import PrepostedReceive, pipelined_sends, preposted_receives
from sp_bench.lower.joined import read_in_place, side_by_side_rows
from sp_bench.lower.staging import (
    StagingBuffers,
    TensorSpec,
    chunk_specs,
    held_specs,
    packed_bytes,
    read_together,
    rows_specs,
    side_by_side,
    sliced_in_place,
    staging_buffers,
    unsummed_partials,
)
from sp_bench.lower.transports import NCCL, TransportKind
from sp_bench.plan.documents import Packed
from sp_bench.plan.memo import keep
from sp_bench.plan.ops import AllToAll, Chunk, Fused, Gathered, GroupCast, GroupReduce, Plan, RowCollective
from sp_bench.plan.problem import Problem
from sp_bench.plan.schedule import ReceiveBuffer, Schedule, Waits, schedule


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """All that executing a plan on a transport needs beyond the plan, the same on every rank. Keys are op indices."""

    problem: Problem
    transport: TransportKind
    waits: tuple[Waits, ...]
    """For each operation, the operations of other streams that must have ended before it (schedule.Schedule)."""
    buffer_free: tuple[Waits, ...]
    """For each operation, the part of `waits` after which the buffer that it writes is free."""
    receive_buffers: Mapping[int, ReceiveBuffer]
    """The buffer that each transfer receives into. A result that outlives the plan has none."""
    unsummed: frozenset[Chunk]
    """The partials that nothing is ever added to; they are held in the compute dtype."""
    together: frozenset[Chunk]
    """The gradients of keys that may stay in a kernel's result until a reduction packs them (staging.read_together)."""
    views: frozenset[Chunk]
    """The inputs and results that are views of a tensor with all heads (staging.sliced_in_place)."""
    staging_buffers: StagingBuffers
    """The buffers in which lanes pack, cast and unpack."""
    preposted: Mapping[int, PrepostedReceive]
    """Transfers whose receives are posted ahead of their turn."""
    pipelined: Mapping[int, int]
    """{transfer: the transfer before it on its lane}, where the first begins, tensor by tensor, during the second."""
    rows: tuple[tuple[ReceiveBuffer, ...], ...] = ()
    """Receive buffers that lie side by side in one allocation, in order (lower.joined)."""
    rows_received: Mapping[ReceiveBuffer, tuple[TensorSpec, ...]] = field(default_factory=dict)
    """Shape and dtype of the tensors of buffers for rows."""
    in_place: frozenset[tuple[int, bool]] = frozenset()
    """(fused block, whether its keys) whose chunks on that side lie end to end in their buffers."""

    def allocations(self) -> list[tuple[tuple[ReceiveBuffer, ...], tuple[TensorSpec, ...]]]:
        """The receive buffers that are allocated together, and the tensors to allocate for them."""
        rows = [(row, side_by_side(self.received_specs(row[0]), len(row))) for row in self.rows]
        others = dict.fromkeys(self.receive_buffers.values()).keys() - {buffer for row in self.rows for buffer in row}
        return [*rows, *(((buffer,), self.received_specs(buffer)) for buffer in sorted(others))]

    def received_specs(self, buffer: ReceiveBuffer) -> tuple[TensorSpec, ...]:
        """Shape and dtype of the tensors of a receive buffer, one per field; several chunks are side by side."""
        if buffer.of_rows:
            return self.rows_received[buffer]
        specs = chunk_specs(self.problem, buffer.tensor, wire=buffer.arriving)
        return specs if buffer.chunks == 1 else side_by_side(specs, buffer.chunks)

    def held_specs(self, chunk: Chunk) -> tuple[TensorSpec, ...]:
        """Shape and dtype of the tensors of a chunk as a rank holds it, one per field."""
        return held_specs(self.problem, chunk, self.unsummed)

    def casts(self, chunk: Chunk) -> bool:
        """Whether a chunk is cast before it is sent."""
        return self.problem.needs_cast(chunk.tensor, summed=chunk not in self.unsummed)

    def packed_bytes(self, op: AllToAll) -> tuple[int, int]:
        """(bytes that a rank packs before it sends, bytes that it unpacks after all pieces have arrived)."""
        return packed_bytes(op, self.problem, self.unsummed)


_CACHE: WeakKeyDictionary[Plan, dict[tuple[Problem, TransportKind], Lowering]] = WeakKeyDictionary()
_OF_PACKS: WeakKeyDictionary[Plan, dict[Hashable, Lowering]] = WeakKeyDictionary()
"""The latest lowerings of packs, by Problem.but_for_documents and transport."""


def lower(plan: Plan, problem: Problem, transport: TransportKind = NCCL) -> Lowering:
    """The lowering of a plan for an assigned problem, cached. Raises PlanError as `dataflow` does.

    Transports differ in `preposted`, `pipelined`, `rows`, `in_place`, and the staging buffers of reduce-scatters
    and of results.
    """
    lowerings = _CACHE.setdefault(plan, {})
    if (problem, transport) not in lowerings:
        keep(lowerings, (problem, transport), _of_any_pack(plan, problem, transport))
    return lowerings[problem, transport]


def _of_any_pack(plan: Plan, problem: Problem, transport: TransportKind) -> Lowering:
    """A lowering, of packs that of another pack, with buffers of its own sizes: users lower each batch."""
    if not isinstance(problem.mask, Packed) or not plan.kinds.isdisjoint(_BY_DOCUMENTS):
        return _lowered(plan, problem, transport)
    known, kind = _OF_PACKS.setdefault(plan, {}), (problem.but_for_documents, transport)
    if kind in known:
        known[kind] = _resized(known[kind], plan, problem)
    else:
        keep(known, kind, _lowered(plan, problem, transport))
    return known[kind]


def _resized(alike: Lowering, plan: Plan, problem: Problem) -> Lowering:
    """The lowering for another pack, given that of one."""
    if alike.problem.largest_chunks == problem.largest_chunks:
        return replace(alike, problem=problem)
    staging = staging_buffers(plan, problem, alike.unsummed, alike.transport)
    return replace(alike, problem=problem, staging_buffers=staging)


_BY_DOCUMENTS = (GroupCast, GroupReduce, Gathered, Fused)
"""Operations of which what is needed depends on the documents."""


def _lowered(plan: Plan, problem: Problem, transport: TransportKind) -> Lowering:
    order, unsummed = schedule(plan), unsummed_partials(plan, problem)
    staging = staging_buffers(plan, problem, unsummed, transport)
    return Lowering(
        problem=problem,
        transport=transport,
        waits=order.waits,
        buffer_free=order.buffer_free,
        receive_buffers=order.receive_buffers,
        unsummed=unsummed,
        together=read_together(plan, unsummed),
        views=sliced_in_place(plan, problem, unsummed),
        staging_buffers=staging,
        preposted=preposted_receives(plan, order, staging) if transport.preposts else {},
        pipelined=pipelined_sends(plan, order) if transport.pipelines else {},
        rows=side_by_side_rows(plan, transport),
        rows_received=_rows_received(plan, problem, order),
        in_place=read_in_place(plan, transport),
    )


def _rows_received(plan: Plan, problem: Problem, order: Schedule) -> dict[ReceiveBuffer, tuple[TensorSpec, ...]]:
    """The tensors of each buffer for rows: as many rows as the transfer with most of those that share it."""
    by_buffer: dict[ReceiveBuffer, tuple[TensorSpec, ...]] = {}
    for index, op in plan.transfers:
        if isinstance(op, RowCollective):
            buffer = order.receive_buffers[index]
            by_buffer[buffer] = max(by_buffer.get(buffer, ()), rows_specs(problem, op, sent=False))
    return by_buffer
