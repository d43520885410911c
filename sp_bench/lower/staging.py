"""The staging buffers in which chunks are packed, cast and unpacked, and the partials held in the compute dtype."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cache
from typing import Literal, NamedTuple

from sp_bench.lower.transports import TransportKind
from sp_bench.plan import cast_rows
from sp_bench.plan.block_classes import of_held_keys, of_one_region
from sp_bench.plan.dataflow import Value, dataflow
from sp_bench.plan.ops import (
    AllToAll,
    AttendBackward,
    Block,
    Chunk,
    Fused,
    Gathered,
    Op,
    Pass,
    Plan,
    ReduceScatter,
    RowCollective,
    TreeReduce,
)
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import RegionKind
from sp_bench.plan.tensors import Kind, Tensor
from sp_bench.plan.transfers import adds_up, by_heads, piece_bytes


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor of a buffer."""

    shape: tuple[int, ...]
    dtype: str


class StagingUse(NamedTuple):
    """The use of a staging buffer: a lane packs, casts or unpacks chunks of one tensor in it."""

    lane: str
    tensor: Tensor
    """The tensor that the transfer sends."""
    use: Literal["send", "recv", "sum", "pass", "land"]
    """send: pieces, or rows, that a collective packs and sends; recv: pieces that it receives and unpacks; sum: what a
    TreeReduce merges, of all owners; pass: rows that a Pass casts or cuts out and sends; land: a result of the plan as
    peers write it (TransportKind.lands)."""


StagingBuffers = Mapping[StagingUse, tuple[TensorSpec, ...]]
"""The staging buffers of a plan, one tensor per field."""


def unsummed_partials(plan: Plan, problem: Problem) -> frozenset[Chunk]:
    """The partials that nothing is ever added to: they need no accumulator, and are held in the compute dtype.

    Each is the whole result of one block or one AllToAll, or gradients that a reduction packs, of which no rank makes a
    row twice: those that it doesn't make are zero. Partials that arrive to be folded don't count: they stay in receive
    buffers in the wire dtype. Nor do partials that are sent in the accumulators' dtype, which saves a cast.
    """
    flow, writers = dataflow(plan), dict[Value, list[int]]()
    for index, _ in plan:
        for value in flow.writes[index]:
            if value.chunk.tensor.is_partial and not value.chunk.is_arriving:
                writers.setdefault(value, []).append(index)
    once = {value: indices[0] for value, indices in writers.items() if len(indices) == 1}
    made = {value.chunk for value, index in once.items() if _makes_all(plan.ops[index], problem)}
    made |= _made_at_once(plan, problem, {value.chunk: i for value, i in once.items() if value.chunk not in made})
    summed = {value.chunk for value in writers if value not in once or value.chunk not in made}
    summed |= of_held_keys(plan, problem)
    for op in plan.ops:
        if isinstance(op, Gathered) and not summed.isdisjoint(op.writes):  # which lie behind each other
            summed |= {chunk for chunk in op.writes if chunk.tensor.of_keys and chunk.index}
    if problem.wire_dtype == problem.accumulate_dtype:
        summed |= {chunk for _, op in plan.transfers if op.tensor.is_partial for chunk in op.reads}
    return frozenset(value.chunk for value in writers) - summed


def read_together(plan: Plan, unsummed: Container[Chunk]) -> frozenset[Chunk]:
    """The gradients of keys that may stay in the result of the kernel call that made them: those of a fused block, all
    of which one reduction packs, and nothing else reads. The result lives as long as its parts.
    """
    if Fused not in plan.kinds:
        return frozenset()
    readers: dict[Chunk, list[int]] = {}
    for index, op in plan:
        for chunk in op.reads:
            readers.setdefault(chunk, []).append(index)
    reductions = {index for index, op in plan.transfers if isinstance(op, ReduceScatter)}
    together, kept = set[Chunk](), {*plan.ends_with}
    for op in plan.ops:
        of_keys = {chunk for chunk in op.writes if chunk.tensor.of_keys} if isinstance(op, Fused) else set[Chunk]()
        last = {tuple(readers.get(chunk, ())) for chunk in of_keys}
        if len(last) == 1 and len(*last) == 1 and reductions.issuperset(*last):
            together |= of_keys if all(chunk in unsummed and chunk not in kept for chunk in of_keys) else set()
    return frozenset(together)


def sliced_in_place(plan: Plan, problem: Problem, unsummed: Container[Chunk]) -> frozenset[Chunk]:
    """The inputs and results in slices of the heads that are views of the tensor with all heads, and no copies.

    Only all-to-alls read or write them, which pack and unpack them anyway, and a result is held in the compute dtype.
    """
    if problem.head_slices == 1:
        return frozenset()
    exchanged = [op for _, op in plan.transfers if isinstance(op, AllToAll)]
    read = {chunk for op in exchanged for chunk in op.reads}
    read -= {chunk for op in plan.ops if not isinstance(op, AllToAll) for chunk in op.reads}
    as_held = {op.recv for op in exchanged if _held_as_result(op.recv, problem, unsummed)}
    return frozenset(read.intersection(plan.inputs) | as_held.intersection(plan.outputs))


def _held_as_result(chunk: Chunk, problem: Problem, unsummed: Container[Chunk]) -> bool:
    kept = {problem.field_dtype(f, wire=False, summed=chunk not in unsummed) for f in chunk.tensor.fields}
    return kept == {problem.dtype}


def staging_buffers(
    plan: Plan, problem: Problem, unsummed: Container[Chunk], transport: TransportKind
) -> StagingBuffers:
    """The staging buffers that a plan needs on a transport, given its `unsummed` partials."""
    buffers = dict[StagingUse, tuple[TensorSpec, ...]]()
    # A plan has thousands of operations, of few kinds.
    sent_as = cache(lambda tensor: chunk_specs(problem, tensor, wire=True))
    needs_cast = cache(lambda tensor, summed: problem.needs_cast(tensor, summed=summed))
    for _, op in plan.transfers:
        if isinstance(op, AllToAll):
            pieces = tuple(
                TensorSpec(
                    (op.group.size, *problem.field_shape(field, problem.shards_of(field).most)),
                    problem.field_dtype(field, wire=True),
                )
                for field in by_heads(op)
            )
            by_tokens, other = ("send", "recv") if op.to_heads else ("recv", "send")
            buffers[StagingUse(op.lane, op.send.tensor, by_tokens)] = pieces
            if not goes_in_place(op, problem, unsummed):
                buffers[StagingUse(op.lane, op.send.tensor, other)] = pieces
        elif isinstance(op, TreeReduce):
            most = max((each.owners for each in op.rounds), default=0)
            of_round = side_by_side(chunk_specs(problem, op.tensor, wire=True), most)
            buffers |= {StagingUse(op.lane, op.tensor, use): of_round for use in ("send", "recv")}
            summed = held_specs(problem, op.own, ())
            buffers[StagingUse(op.lane, op.tensor, "sum")] = side_by_side(summed, op.group.size)
        elif isinstance(op, ReduceScatter):
            of_all = side_by_side(chunk_specs(problem, op.tensor, wire=True), op.group.size)
            buffers[StagingUse(op.lane, op.tensor, "send")] = of_all
            if not adds_up_on_the_way(op, problem, transport):
                buffers[StagingUse(op.lane, op.tensor, "recv")] = of_all
        elif isinstance(op, RowCollective):
            use = StagingUse(op.lane, op.tensor, "send")
            buffers[use] = max(buffers.get(use, ()), rows_specs(problem, op, sent=True))
        elif isinstance(op, Pass):
            if op.against or needs_cast(op.tensor, op.send not in unsummed):
                buffers[StagingUse(op.lane, op.tensor, "pass")] = sent_as(op.tensor)
            if transport.lands and op.recv in plan.ends_with:
                buffers[StagingUse(op.lane, op.recv.tensor, "land")] = held_specs(problem, op.recv, unsummed)
    return buffers


def chunk_specs(problem: Problem, tensor: Tensor, *, wire: bool) -> tuple[TensorSpec, ...]:
    """Shape and dtype of each field of the largest chunk, on the wire or held."""
    return tuple(TensorSpec(problem.field_shape(f), problem.field_dtype(f, wire=wire)) for f in tensor.fields)


def rows_specs(problem: Problem, op: RowCollective, *, sent: bool) -> tuple[TensorSpec, ...]:
    """Shape and dtype of each field of the rows of the rank that sends, or receives, most of them."""
    rows = cast_rows.most_rows(op, problem, sent=sent)
    return tuple(TensorSpec(problem.field_shape(f, rows), problem.field_dtype(f, wire=True)) for f in op.tensor.fields)


def held_specs(problem: Problem, chunk: Chunk, unsummed: Container[Chunk]) -> tuple[TensorSpec, ...]:
    """Shape and dtype of each field of a chunk as a rank holds it."""
    fields = chunk.tensor.fields
    summed = chunk not in unsummed
    return tuple(TensorSpec(problem.field_shape(f), problem.field_dtype(f, wire=False, summed=summed)) for f in fields)


def side_by_side(specs: tuple[TensorSpec, ...], count: int) -> tuple[TensorSpec, ...]:
    """Buffers for `count` chunks, one after the other: a leading dimension of that size."""
    return tuple(TensorSpec((count, *shape), dtype) for shape, dtype in specs)


def adds_up_on_the_way(op: ReduceScatter, problem: Problem, transport: TransportKind) -> bool:
    """Whether the library adds the partials. If not, they are exchanged by an all-to-all and merged by their owner.

    NCCL rounds a sum to the dtype that is sent at every hop of its ring. In bfloat16 that makes an error that grows
    with the number of ranks, so the library adds only what is sent in the accumulators' dtype, but in others' code.
    """
    wide = problem.wire_dtype == problem.accumulate_dtype
    by_library = transport.adds and not isinstance(op, TreeReduce)
    return by_library and is_sum(op) and (wide or transport.adds_narrow)


def is_sum(op: ReduceScatter) -> bool:
    """Whether its partials are added as they are; those with statistics have weights."""
    return all(field.kind is Kind.PARTIAL for field in op.tensor.fields)


def goes_in_place(op: AllToAll, problem: Problem, unsummed: Container[Chunk]) -> bool:
    """Whether an AllToAll can send from, or receive into, the chunk by heads without a staging buffer.

    It can if the pieces are contiguous there, as those of a history and of new keys are not, and held in their wire
    dtype. The chunk by tokens, which has all heads of a token together, always needs packing or unpacking.
    """
    chunk = op.recv if op.to_heads else op.send
    held = (problem.field_dtype(field, wire=False, summed=chunk not in unsummed) for field in chunk.tensor.fields)
    sent = (problem.field_dtype(field, wire=True) for field in by_heads(op))
    # A partial's statistics stay.
    as_held = all(held_dtype == sent_dtype for held_dtype, sent_dtype in zip(held, sent, strict=False))
    return as_held and problem.batch == 1 and problem.shards_of(chunk.tensor).in_runs


def packed_bytes(op: AllToAll, problem: Problem, unsummed: Container[Chunk]) -> tuple[int, int]:
    """(bytes that a rank packs before it sends, bytes that it unpacks after all pieces have arrived).

    A rank's own piece is not packed.
    """
    whole = sum(problem.field_bytes(field, wire=True) for field in by_heads(op))
    own = sum(piece_bytes(problem, field) for field in by_heads(op))
    in_place = goes_in_place(op, problem, unsummed)
    return 0 if in_place and not op.to_heads else whole - own, own if in_place and op.to_heads else whole


def _makes_all(op: Op, problem: Problem) -> bool:
    """Whether an operation alone makes the whole of the partial that it writes."""
    if isinstance(op, AllToAll):
        return not any(adds_up(op, problem, field) for field in by_heads(op))
    if isinstance(op, Fused) and not _is_one_call(op, problem):
        return False
    return isinstance(op, Block) and not problem.blocks.narrows


def _made_at_once(plan: Plan, problem: Problem, written: Mapping[Chunk, int]) -> frozenset[Chunk]:
    """The gradients for a reduction, of those `written` by one operation each, of which no rank makes a row in two
    kernel calls: one block alone writes them. Fused blocks leave the regions of each whole.
    """
    packed = {chunk for op in plan.ops if isinstance(op, ReduceScatter) for chunk in op.reads}
    wanted = {c: i for c, i in written.items() if c in packed and isinstance(plan.ops[i], AttendBackward | Fused)}
    return of_one_region(plan, problem, wanted)


def _is_one_call(op: Fused, problem: Problem) -> bool:
    """Whether fused blocks are one kernel call on every rank: all of some queries with all of some keys."""
    if problem.decodes:
        return True
    of_classes = (problem.blocks.regions_of(kind) for kind in range(problem.blocks.classes))
    kinds = {region.kind for regions in of_classes for region in regions}
    return kinds <= {RegionKind.FULL} and len(op.blocks) == len(op.queries) * len(op.keys)
