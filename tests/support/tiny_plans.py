"""Plans of a few operations, and which operations use a chunk."""

from __future__ import annotations

from sp_bench.plan import Bundle, Chunk, Group, Op, Plan, Steps
from sp_bench.plan.tensors import KV, O, Q


def uses(plan: Plan, chunk: Chunk) -> list[int]:
    """The operations that read or write a chunk, itself or what it is bundled into."""
    names = {chunk, *(op.into for op in plan.ops if isinstance(op, Bundle) and chunk in op.parts)}
    return [index for index, op in plan if names & {*op.reads, *op.writes}]


def tiny(*ops: Op) -> Plan:
    q, kv, o = chunks()
    steps = Steps()
    steps.next()
    steps.do(*ops)
    return steps.plan("forward", 3, (q, kv), (o,))


def chunks() -> tuple[Chunk, Chunk, Chunk]:
    ring = Group(1, 3)
    return Chunk(Q, 0, ring), Chunk(KV, 0, ring), Chunk(O, 0, ring)
