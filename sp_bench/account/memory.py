"""Bytes that a rank holds while it executes plans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np

from sp_bench.lower import NCCL, Lowering, TensorSpec, TransportKind, lower
from sp_bench.plan.cast_rows import rows_read, works_of
from sp_bench.plan.dataflow import Dataflow, dataflow
from sp_bench.plan.demand import untouched_partials
from sp_bench.plan.memo import keep
from sp_bench.plan.ops import Block, Bundle, Chunk, Fused, Gathered, Op, Plan, RowSums, Transfer
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import DTYPE_BYTES, Problem
from sp_bench.plan.schedule import released_by
from sp_bench.plan.tensors import KV, ODOQ, Kind, Tensor


def peak_bytes(plans: Iterable[Plan], problem: Problem, transport: TransportKind = NCCL) -> int:
    """The most bytes that a rank holds at once while it executes the plans one after another.

    This counts the inputs, the receive and staging buffers (shared by the plans and never freed), each partial from its
    first block until its transfer must have ended, the neutral elements that ranks send for blocks that they lack, the
    results of the current block, and the outputs in the compute dtype. It does not count the workspace inside a kernel
    or a fold.
    """
    plans = list(plans)
    return buffer_bytes(plans, problem, transport) + max(_moving_bytes(plan, problem) for plan in plans)


def buffer_bytes(plans: Iterable[Plan], problem: Problem, transport: TransportKind = NCCL) -> int:
    """Bytes of the receive and staging buffers that plans share: of each kind, the most that a plan needs."""
    kept: Counter[TensorSpec] = Counter()
    for plan in plans:
        kept |= _buffers(plan, problem, transport)
    return sum(math.prod(shape) * DTYPE_BYTES[dtype] * number for (shape, dtype), number in kept.items())


_BUFFERS: WeakKeyDictionary[Plan, dict[tuple[Problem, TransportKind], Counter[TensorSpec]]] = WeakKeyDictionary()
_MOVING: WeakKeyDictionary[Plan, dict[Problem, int]] = WeakKeyDictionary()


def _buffers(plan: Plan, problem: Problem, transport: TransportKind) -> Counter[TensorSpec]:
    """How many receive and staging buffers of each shape and dtype a plan needs, cached."""
    known, key = _BUFFERS.setdefault(plan, {}), (problem, transport)
    if key in known:
        return known[key]
    lowering = lower(plan, problem, transport)
    received = (specs for _, specs in lowering.allocations())
    specs = Counter(spec for specs in (*received, *lowering.staging_buffers.values()) for spec in specs)
    return keep(known, key, specs)


def _moving_bytes(plan: Plan, problem: Problem) -> int:
    """The most bytes that inputs, partials, block results and outputs take at one time, on any rank, cached."""
    known = _MOVING.setdefault(plan, {})
    return known[problem] if problem in known else keep(known, problem, _most_moving_bytes(plan, problem))


def _most_moving_bytes(plan: Plan, problem: Problem) -> int:
    """`_moving_bytes`. Ranks differ where rows of keys are cast: in how many rows they have, and in which operation
    they have most.
    """
    flow, lowering = dataflow(plan), lower(plan, problem)
    unsummed = lowering.unsummed
    received = {chunk for index in lowering.receive_buffers for chunk in plan.ops[index].writes}
    elsewhere = received | set(plan.starts_with) | lowering.views
    elsewhere |= {op.into for op in plan.ops if isinstance(op, Bundle)}
    made = {op.into: op.made for op in plan.ops if isinstance(op, RowSums)}
    sliced = problem.head_slices > 1

    @cache  # a plan has thousands of chunks of few tensors
    def held_bytes(tensor: Tensor, summed: bool) -> int:
        return problem.chunk_bytes(tensor, wire=False, summed=summed)

    def result_bytes(chunk: Chunk) -> int:
        return held_bytes(chunk.tensor, False)

    standing = sum(map(result_bytes, plan.starts_with)) + sum(
        result_bytes(c) for c in plan.outputs if c in lowering.views
    )
    if sliced:  # a slice of the heads is a copy
        standing += sum(result_bytes(chunk) for chunk in plan.inputs if chunk not in lowering.views)
    standing += _unpadded_bytes(plan.inputs, problem) + _matrix_bytes(plan, problem)
    neutral = {chunk.tensor: chunk not in unsummed for chunk in untouched_partials(plan, problem)}
    standing += sum(held_bytes(tensor, summed) for tensor, summed in neutral.items())
    owners = _first_ranks(plan, problem)
    change: list[np.ndarray | int] = [0] * (len(plan.ops) + 2)
    released = {index: len(plan.ops) - 1 for index, _ in plan.transfers}
    released |= released_by(plan, lowering.waits)
    of_rows = _bytes_of_rows(plan, problem, unsummed)
    for value, first in flow.first_use.items():
        if value.chunk not in elsewhere:
            last, summed = flow.last_use[value], value.chunk not in unsummed
            size = of_rows[value.chunk] if value.chunk in of_rows else held_bytes(value.chunk.tensor, summed)
        elif value.chunk in made:
            last = flow.last_use[value]
            last = len(plan.ops) if isinstance(plan.ops[last], Transfer) else last
            size = sum(problem.field_bytes(field, wire=False) for field in made[value.chunk])
        else:
            continue
        change[first] += size
        change[released.get(last, last) + 1] -= size
    alive = np.cumsum(_rows_of(change, owners.size), axis=0)[: len(plan.ops)]
    result: list[np.ndarray | int] = [0] * len(plan.ops)
    as_held = problem.dtype == problem.accumulate_dtype and not problem.blocks.narrows and not problem.mask.held
    for index, op in plan:
        if isinstance(op, Block):
            fresh = _fresh(op, index, flow, lowering, as_held=as_held, narrows=problem.blocks.narrows)
            if isinstance(op, Gathered):  # slices of heads are computed one after another
                fresh = [chunk for chunk in fresh if chunk.tensor.of_keys or chunk.heads == op.queries[0].heads]
            result[index] = sum(map(result_bytes, fresh)) + _made_bytes(op, problem)
        if isinstance(op, Gathered):
            result[index] += _ordered_bytes(op, problem)
            begun = (chunk for chunk in op.writes if chunk in of_rows and flow.starts(index, chunk))
            result[index] -= sum(of_rows[chunk] for chunk in begun)  # not yet
        elif isinstance(op, Fused):
            result[index] += _joined_bytes(op, index, problem, lowering)
    copied = [c for c in plan.outputs if c not in lowering.views and (sliced or c.tensor.is_partial)]
    narrow = problem.dtype != problem.accumulate_dtype
    cast = [c for c in plan.ends_with if narrow and c.tensor.is_partial and c not in unsummed]
    outputs = sum(map(result_bytes, {*copied, *cast} if sliced else cast))
    if sliced:
        # Slices are concatenated field by field, and live until that is done.
        outputs += max((problem.slices_of(c.tensor) * result_bytes(c) for c in cast if c in copied), default=0)
    outputs += _unpadded_bytes(plan.outputs, problem)
    return int(standing + max((alive + _rows_of(result, owners.size)).max(), alive[-1].max() + outputs))


def _rows_of(values: Sequence[np.ndarray | int], size: int) -> np.ndarray:
    """The values, (size,) or one for all, as rows of a table."""
    if size == 1:
        return np.array([each if isinstance(each, int) else np.ravel(each)[0] for each in values], np.int64)[:, None]
    return np.stack([np.broadcast_to(each, size) for each in values]).astype(np.int64)


def _unpadded_bytes(chunks: Iterable[Chunk], problem: Problem) -> int:
    """Bytes of the true heads of chunks of a rank's tokens, which are there beside their padded copies; 0 without."""
    if problem.padded is None:
        return 0
    each = (problem.true_share(c.tensor) * problem.chunk_bytes(c.tensor, wire=False, summed=False) for c in chunks)
    return int(sum(each))


def _first_ranks(plan: Plan, problem: Problem) -> np.ndarray:
    """The ranks that may differ in what they hold: the first of each chunk if rows are cast, else one for all."""
    several = any(isinstance(op, Gathered) for op in plan.ops)
    return np.arange(0, problem.n if several else 1, problem.layout.head_parallel)


def _bytes_of_rows(plan: Plan, problem: Problem, unsummed: Container[Chunk]) -> dict[Chunk, np.ndarray]:
    """Bytes of the partials of rows that GroupCasts brought, on each of the first ranks: all of a Gathered block's
    together, for the first.
    """
    by_chunk: dict[Chunk, np.ndarray] = {}
    for op in plan.ops:
        if not isinstance(op, Gathered):
            continue
        of_keys = op.pairs != "queries"
        partials = [chunk for chunk in op.writes if chunk.tensor.of_keys == of_keys and chunk.index]
        for chunk in partials:
            summed, first = chunk not in unsummed, chunk == partials[0]
            each = sum(problem.token_bytes(field, wire=False, summed=summed) for field in chunk.tensor.fields)
            by_chunk[chunk] = _rows(op, problem) * each * first
    return by_chunk


def _of_others(op: Op, chunk: Chunk) -> bool:
    """Whether it is a Gathered block with others' rows, and makes partials of these rows in the chunk."""
    if not isinstance(op, Gathered) or not op.brought[0].index:
        return False
    return chunk.tensor.of_keys == (op.pairs != "queries")


def _rows(op: Gathered, problem: Problem) -> np.ndarray:
    """How many rows a Gathered block reads of others, or of its own keys, on each chunk's first rank: (chunks,)."""
    return rows_read(op, problem, np.arange(0, problem.n, problem.layout.head_parallel))


def _ordered_bytes(op: Gathered, problem: Problem) -> np.ndarray | int:
    """Bytes of the rows in order of position on the first rank of each chunk, but of its own, which are not copied.

    Of keys backward also of the sums of their gradients, and of a kernel's, which are added to these. Of queries of
    their outputs or gradients, and of those of a kernel; backward they have an O in the place of its row sums.
    """
    if not op.brought[0].index:
        return 0
    rows, made = op.brought[0].tensor, {chunk.tensor for chunk in op.writes if _of_others(op, chunk)}
    if op.pairs == "queries":
        tensors = [rows if op.forward else ODOQ.by_heads, *made, *made]
    else:
        tensors = [rows, *made] + [rows] * len(made)
    each = sum(problem.token_bytes(field, wire=False) for tensor in tensors for field in tensor.fields)
    return _rows(op, problem) * each


def _fresh(op: Block, index: int, flow: Dataflow, lowering: Lowering, *, as_held: bool, narrows: bool) -> list[Chunk]:
    """The chunks of which a kernel returns a tensor that doesn't become the held chunk.

    `as_held` says whether its results are of the dtype that they are held in; `narrows`, whether they may have only
    some rows of a chunk.
    """
    cut = frozenset(op.writes) if narrows else _cut(op) if isinstance(op, Fused) else frozenset()
    written = [chunk for chunk in op.writes if not _of_others(op, chunk)]  # _ordered_bytes
    return [
        chunk
        for chunk in written
        if chunk in cut or (chunk not in lowering.unsummed and not (as_held and flow.starts(index, chunk)))
    ]


def _made_bytes(op: Block, problem: Problem) -> int:
    """Bytes of the keys and values that a block makes of latents, and backward of their gradients; 0 without latents.
    Under packs also of the latents, of which a block has copies of some rows.

    A block makes them once for all of its kernel calls (run.makings): of packs a call may then have copies of all, and
    of a Gathered block several copies of some, as pieces of several queries see the same keys.
    """
    if not problem.latent_dim:
        return 0
    if isinstance(op, Gathered):
        works, several = works_of(op, problem)[0], True
        tokens = max(work.kv_rows for work in works)
        most = int(max(work.sizes.kv_tokens[work.sizes.kind == kind].sum() for work in works for kind in range(3)))
    else:
        of_keys = {chunk for chunk in op.reads if chunk.tensor.of_keys}
        tokens = most = sum(problem.field_tokens(chunk.tensor.fields[0]) for chunk in of_keys)
        blocks = problem.blocks
        packed = isinstance(blocks, PackBlocks)
        several = packed or any(len(blocks.regions_of(kind)) > 1 for kind in range(blocks.classes))
    copied, backward = most * problem.mask.in_pieces, any(chunk.tensor.of_keys for chunk in op.writes)
    element, wide = DTYPE_BYTES[problem.dtype], DTYPE_BYTES[problem.accumulate_dtype]
    each = problem.batch * problem.block_heads * (problem.head_dim + problem.value_dim)
    # The product that is added to a gradient of the matrices has their heads, too.
    product = problem.block_heads * max(problem.made_dim, problem.value_dim) * problem.latent_dim
    made = (tokens + copied) * each * element
    if backward:
        made += most * each * element + tokens * each * wide * several + product * element
    return made + copied * sum(problem.token_bytes(field, wire=False) for field in KV.fields)


def _matrix_bytes(plan: Plan, problem: Problem) -> int:
    """Bytes of the matrices from latents to keys and values, backward with their gradients; 0 without latents."""
    if not problem.latent_dim:
        return 0
    elements = problem.padded_heads * (problem.made_dim + problem.value_dim) * problem.latent_dim
    gradient = DTYPE_BYTES[problem.accumulate_dtype] if plan.phase == "backward" else 0
    return elements * (DTYPE_BYTES[problem.dtype] + gradient)


def _cut(op: Fused) -> frozenset[Chunk]:
    """The chunks whose parts are cut out of the result of several."""
    of_keys = {False: len(op.queries) > 1, True: len(op.keys) > 1}
    return frozenset(chunk for chunk in op.writes if of_keys[chunk.tensor.of_keys])


def _joined_bytes(op: Fused, index: int, problem: Problem, lowering: Lowering) -> int:
    """At most how many bytes of operands are copied together for one kernel call (lower.joined.copied_bytes)."""
    return sum(
        len(chunks) * problem.field_bytes(field, wire=False)
        for keys, chunks in ((False, op.queries), (True, op.keys))
        if len(chunks) > 1
        for field in chunks[0].tensor.fields
        if field.kind is Kind.STATISTIC or problem.blocks.narrows or (index, keys) not in lowering.in_place
    )
