"""Lower a plan to one transport. The executor, the simulator and the account of memory all read the same lowering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from sp_bench.lower.early import PrepostedReceive, pipelined_sends, preposted_receives
from sp_bench.lower.schedule import ReceiveBuffer, Waits, schedule
from sp_bench.lower.staging import (
    StagingBuffers,
    TensorSpec,
    chunk_specs,
    packed_bytes,
    staging_buffers,
    unsummed_partials,
)
from sp_bench.lower.transports import NCCL, TransportKind
from sp_bench.plan.ops import AllToAll, Chunk, Plan
from sp_bench.plan.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """What executing a plan on a transport takes beyond the plan, the same on every rank. Operations go by index."""

    problem: Problem
    waits: tuple[Waits, ...]
    """For each operation, what must have ended on each other stream before it (schedule.Schedule)."""
    buffer_free: tuple[Waits, ...]
    """For each operation, the part of `waits` after which the buffer that it writes is free."""
    receive_buffers: Mapping[int, ReceiveBuffer]
    """By transfer, the buffer it receives into. A result that outlives the plan has none."""
    unsummed: frozenset[Chunk]
    """The partials that nothing is added to, which the compute dtype holds."""
    staging_buffers: StagingBuffers
    """The buffers in which lanes pack, cast and unpack."""
    preposted: Mapping[int, PrepostedReceive]
    """Transfers whose receives are posted ahead of their turn."""
    pipelined: Mapping[int, int]
    """Transfers that begin, tensor by tensor, while the one before on their lane is under way, and that one."""

    def received_specs(self, buffer: ReceiveBuffer) -> tuple[TensorSpec, ...]:
        """The tensors of a receive buffer, one for each field."""
        return chunk_specs(self.problem, buffer.tensor, wire=buffer.arriving)

    def casts(self, chunk: Chunk) -> bool:
        """Whether a chunk is cast to be sent."""
        return self.problem.needs_cast(chunk.tensor, summed=chunk not in self.unsummed)

    def packed_bytes(self, op: AllToAll) -> tuple[int, int]:
        """(bytes that a rank copies before it sends, bytes that it copies once all has come)."""
        return packed_bytes(op, self.problem, self.unsummed)


_CACHE: WeakKeyDictionary[Plan, dict[tuple[Problem, TransportKind], Lowering]] = WeakKeyDictionary()


def lower(plan: Plan, problem: Problem, transport: TransportKind = NCCL) -> Lowering:
    """The lowering of a plan for a dealt problem, worked out once.

    All but what lanes do ahead of a transfer's turn is the same for every transport. Raises PlanError as `dataflow`
    does.
    """
    found = _CACHE.setdefault(plan, {})
    if (problem, transport) not in found:
        order, unsummed = schedule(plan), unsummed_partials(plan, problem)
        staging = staging_buffers(plan, problem, unsummed)
        found[problem, transport] = Lowering(
            problem=problem,
            waits=order.waits,
            buffer_free=order.buffer_free,
            receive_buffers=order.receive_buffers,
            unsummed=unsummed,
            staging_buffers=staging,
            preposted=preposted_receives(plan, order, staging) if transport.preposts else {},
            pipelined=pipelined_sends(plan, order) if transport.pipelines else {},
        )
    return found[problem, transport]
