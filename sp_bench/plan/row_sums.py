"""Send row sums in the place of O: a rewriting of backward plans that send OdOQ from rank to rank.

The backward depends on O by rowsum(dO * O) alone, one number a row (FlashAttention-2, Dao 2023, algorithm 2;
BurstAttention, Sun et al. 2024, sends it). The owner computes it once, in a step of its own, and DOQ goes round in the
place of ODOQ. Before its first block a received chunk gets an O that has these row sums (plan.ops.RowSums).

It knows no method: what a plan sends, and when, stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from sp_bench.plan.ops import AllGather, AttendBackward, Chunk, Fused, Op, Pass, Plan, RowSums
from sp_bench.plan.tensors import DOQ, ODOQ, Tensor


def without_o(tensor: Tensor) -> Tensor:
    """DOQ for ODOQ, by heads as it is; any other tensor itself."""
    if tensor.by_tokens is not ODOQ:
        return tensor
    return DOQ.by_heads if tensor.is_by_heads else DOQ


def send_row_sums(plan: Plan) -> Plan:
    """The plan with DOQ sent in the place of ODOQ; the same plan if it sends none."""
    hops = [op for op in plan.ops if isinstance(op, Pass | AllGather) and op.tensor.by_tokens is ODOQ]
    if not hops:
        return plan
    received = {chunk for hop in hops for chunk in hop.writes}
    own = list(dict.fromkeys(chunk for hop in hops for chunk in hop.reads if chunk not in received))
    first = 1 + max((index for index, op in plan if not isinstance(op, Pass) and {*op.writes} & {*own}), default=-1)
    step = plan.steps[first - 1] + 1 if first else 0
    own.sort(key=attrgetter("heads"))
    ops: list[Op] = [*plan.ops[:first], *(RowSums((chunk,), _light(chunk)) for chunk in own)]
    steps = [*plan.steps[:first], *([step] * len(own))]
    whole = {*own}
    for op, number in zip(plan.ops[first:], plan.steps[first:], strict=True):
        if isinstance(op, Pass):
            op = replace(op, send=_light(op.send), recv=_light(op.recv))
        elif isinstance(op, AllGather):
            op = replace(op, own=_light(op.own))
        for chunk in _queries(op):
            if chunk not in whole:
                whole.add(chunk)
                ops.append(RowSums((_light(chunk),), chunk))
                steps.append(number + 1)
        ops.append(op)
        steps.append(number + 1)
    return replace(plan, ops=tuple(ops), steps=tuple(steps))


def _queries(op: Op) -> tuple[Chunk, ...]:
    """The query chunks of blocks."""
    return op.queries if isinstance(op, Fused) else (op.odoq,) if isinstance(op, AttendBackward) else ()


def _light(chunk: Chunk) -> Chunk:
    return chunk._replace(tensor=without_o(chunk.tensor))
