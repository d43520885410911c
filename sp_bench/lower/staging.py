"""In which dtype partials are held, and the staging buffers in which chunks are packed, cast and unpacked."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Literal, NamedTuple

from sp_bench.plan.dataflow import Value, dataflow
from sp_bench.plan.ops import AllToAll, Attend, AttendBackward, Chunk, Op, Pass, Plan, Transfer
from sp_bench.plan.problem import FIELDS, Problem, is_partial
from sp_bench.plan.transfers import adds_up, by_heads, piece_bytes


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor of a buffer."""

    shape: tuple[int, ...]
    dtype: str


class StagingUse(NamedTuple):
    """What a staging buffer is for: a lane packs, casts or unpacks chunks of one tensor in it."""

    lane: str
    tensor: str
    """That is sent."""
    use: Literal["send", "recv", "pass"]
    """Packed to be sent by an AllToAll, received by one to be unpacked, or cast or cut to be sent by a Pass."""


StagingBuffers = Mapping[StagingUse, tuple[TensorSpec, ...]]
"""The staging buffers of a plan, a tensor for each field."""


def unsummed_partials(plan: Plan, problem: Problem) -> frozenset[Chunk]:
    """The partials that nothing is ever added to, so that no accumulator is needed and the compute dtype holds them.

    Each comes whole from one block, or from one AllToAll. Those that arrive to be folded aren't among them: they stand
    in receive buffers, as they travelled. Nor are those that travel in the dtype of accumulators, which spares a cast.
    """
    flow, writers = dataflow(plan), dict[Value, list[Op]]()
    for index, op in plan:
        for value in flow.writes[index]:
            if is_partial(value.chunk.tensor) and not value.chunk.is_arriving:
                writers.setdefault(value, []).append(op)
    summed = {value.chunk for value, ops in writers.items() if len(ops) > 1 or not _makes_all(ops[0], problem)}
    if problem.wire_dtype == problem.accumulate_dtype:
        summed |= {op.send for op in plan.ops if isinstance(op, Transfer) and op.send and is_partial(op.carries)}
    return frozenset(value.chunk for value in writers) - summed


def staging_buffers(plan: Plan, problem: Problem, unsummed: Container[Chunk]) -> StagingBuffers:
    """The staging buffers that a plan needs where these partials are `unsummed`."""
    found = dict[StagingUse, tuple[TensorSpec, ...]]()
    for op in plan.ops:
        if isinstance(op, AllToAll):
            pieces = tuple(
                TensorSpec(
                    (op.group.size, *problem.field_shape(field, problem.local_seqlen)),
                    problem.field_dtype(field, wire=True),
                )
                for field in by_heads(op)
            )
            by_tokens, other = ("send", "recv") if op.to_heads else ("recv", "send")
            found[StagingUse(op.lane, op.send.tensor, by_tokens)] = pieces
            if not goes_in_place(op, problem, unsummed):
                found[StagingUse(op.lane, op.send.tensor, other)] = pieces
        elif isinstance(op, Pass) and (sent := op.send):
            casts = problem.needs_cast(sent.tensor, summed=sent not in unsummed)
            if op.against or casts:
                found[StagingUse(op.lane, sent.tensor, "pass")] = chunk_specs(problem, sent.tensor, wire=True)
    return found


def chunk_specs(problem: Problem, tensor: str, *, wire: bool) -> tuple[TensorSpec, ...]:
    """Shapes and dtypes in which a whole chunk travels (`wire`) or is held."""
    return tuple(TensorSpec(problem.field_shape(f), problem.field_dtype(f, wire=wire)) for f in FIELDS[tensor])


def goes_in_place(op: AllToAll, problem: Problem, unsummed: Container[Chunk]) -> bool:
    """Whether pieces go from or to where they lie in the chunk by heads: one after the other, and held as they travel.

    At the other end, where a chunk has all heads of a token together, pieces are always put together or taken apart.
    """
    chunk = op.recv if op.to_heads else op.send
    held = (problem.field_dtype(field, wire=False, summed=chunk not in unsummed) for field in FIELDS[chunk.tensor])
    sent = (problem.field_dtype(field, wire=True) for field in by_heads(op))
    as_held = all(here == there for here, there in zip(held, sent, strict=False))  # a partial's statistics stay
    return as_held and problem.batch == 1


def packed_bytes(op: AllToAll, problem: Problem, unsummed: Container[Chunk]) -> tuple[int, int]:
    """(bytes that a rank copies before it sends, bytes that it copies once all has come). Its own piece stays."""
    whole = sum(problem.field_bytes(field, wire=True) for field in by_heads(op))
    own = sum(piece_bytes(problem, field) for field in by_heads(op))
    in_place = goes_in_place(op, problem, unsummed)
    return 0 if in_place and not op.to_heads else whole - own, own if in_place and op.to_heads else whole


def _makes_all(op: Op, problem: Problem) -> bool:
    """Whether an operation makes all of a partial that nothing is added to."""
    if isinstance(op, AllToAll):
        return not any(adds_up(op, problem, field) for field in by_heads(op))
    return isinstance(op, Attend | AttendBackward) and not problem.narrows
