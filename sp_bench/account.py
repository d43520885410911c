"""Count what a plan sends, computes and holds, without running it.

Bytes are per GPU. A plan is the same program on every rank, so that all ranks send the same; what they compute may
differ (contiguous causal). Payload and statistics (the lse) are kept apart, since the papers count payload only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from sp_bench.plan import (
    DTYPE_BYTES,
    FIELDS,
    Attend,
    AttendBackward,
    Dataflow,
    Kind,
    Mask,
    Part,
    Pass,
    Plan,
    Problem,
    casts,
    dataflow,
)

BACKWARD_OVER_FORWARD = 2.5
"""Backward FLOPs over forward FLOPs: five matrix products against two."""


@dataclass(frozen=True)
class Volume:
    """What one GPU sends in one phase."""

    sent_bytes: Counter[tuple[str, str, str]]
    """By (lane, tensor, field)."""
    statistic_bytes: int
    """How much of it is statistics."""

    @property
    def total_bytes(self) -> int:
        """Payload and statistics."""
        return self.sent_bytes.total()

    @property
    def payload_bytes(self) -> int:
        """What the papers count."""
        return self.total_bytes - self.statistic_bytes


def volume(plan: Plan, problem: Problem) -> Volume:
    """Count the sends of a plan."""
    sent: Counter[tuple[str, str, str]] = Counter()
    statistics = 0
    for op in plan.ops:
        if isinstance(op, Pass) and op.send:
            for field in FIELDS[op.send.tensor]:
                sent[op.lane, op.send.tensor, field.name] += problem.field_bytes(field, wire=True)
            statistics += problem.wire_statistic_bytes(op.send.tensor)
    return Volume(sent, statistics)


def sent_across_nodes(plan: Plan, problem: Problem, node_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Bytes that each rank sends to ranks of other nodes: (n,). `node_of` gives the node of each rank."""
    ranks = np.arange(problem.n)
    across = np.zeros(problem.n)
    for op in plan.ops:
        if isinstance(op, Pass) and op.send:
            leaves = node_of(ranks) != node_of(op.target(ranks))
            across += leaves * problem.chunk_bytes(op.send.tensor, wire=True)
    return across


def lower_bound_bytes(problem: Problem, phase: str) -> float:
    """The least payload that a GPU can send, on average over the GPUs.

    For exact attention with one owner for each token, work split by sequence only (all heads of a token together),
    equal work on every GPU, and nothing that came forward kept for the backward. A GPU that touches the rows of x
    chunks of queries and the columns of y chunks of keys
    computes at most x * y of the rho * n blocks that are its share (rho = 1/2 if causal). It must receive x - 1 query
    chunks, send x - 1 partial outputs, and receive y - 1 key chunks; backward likewise for Q and dO (of O only a sum
    for each row is needed), dQ, KV and dKV. Minimised over x with y = rho * n / x. Full attention, forward, k =
    kv_heads / heads: 4 N d sqrt(k / n) - (2 + 2 k) N d / n elements, which Mesh-Attention reaches at a = sqrt(k n).
    """
    q = problem.chunk_bytes("q", wire=True)
    kv = problem.chunk_bytes("kv", wire=True)
    if phase == "forward":
        per_row = q + problem.chunk_bytes("o", wire=True) - problem.wire_statistic_bytes("o")
        per_column = kv
    else:
        per_row = 2 * q + problem.chunk_bytes("dq", wire=True)
        per_column = kv + problem.chunk_bytes("dkv", wire=True)
    blocks = problem.n / 2 if problem.causal else problem.n
    rows = min(max(math.sqrt(blocks * per_column / per_row), 1.0), max(blocks, 1.0))
    columns = max(blocks / rows, 1.0)
    return max(0.0, (rows - 1) * per_row + (columns - 1) * per_column)


def model_flops(problem: Problem, phase: str) -> float:
    """FLOPs of the whole attention as MFU counts them: 4 N^2 H D forward, half of it if causal, 2.5 times backward."""
    forward = 4.0 * problem.batch * problem.seqlen**2 * problem.heads * problem.head_dim
    forward /= 2 if problem.causal else 1
    return forward if phase == "forward" else forward * BACKWARD_OVER_FORWARD


def blocks(plan: Plan, problem: Problem) -> np.ndarray:
    """Blocks that each rank computes, by q chunk below, equal to, above kv chunk: (n, 3)."""
    ranks = np.arange(problem.n)
    counts = np.zeros((problem.n, 3), np.int64)
    computed = [op for op in plan.ops if isinstance(op, Attend | AttendBackward)]
    owner = {chunk: chunk.owner(ranks) for chunk in {c for op in computed for c in (op.q, op.kv)}}
    for op in computed:
        counts[ranks, np.sign(owner[op.q] - owner[op.kv]) + 1] += 1
    return counts


def pairs(plan: Plan, problem: Problem) -> np.ndarray:
    """(query, key) pairs that each rank computes for each head and batch entry: (n,)."""
    cases = problem.layout.cases(problem.causal)
    return blocks(plan, problem) @ np.array(
        [sum(region.pairs(problem.local_seqlen) for region in case) for case in cases]
    )


def peak_bytes(plans: Iterable[Plan], problem: Problem) -> int:
    """The most that a rank can hold at once while it executes the plans one after the other, in bytes.

    Counted are a plan's inputs, the receive and staging buffers (which the plans share and which stay), the
    accumulators from their first block until their transfer has surely ended, the results of the block under way,
    and the outputs in the compute dtype. Workspace inside a kernel or a fold is not.
    """
    plans = list(plans)
    kept: Counter[tuple] = Counter()
    for plan in plans:
        kept |= _buffers(plan, problem)
    buffers = sum(math.prod(shape) * DTYPE_BYTES[dtype] * number for (shape, dtype), number in kept.items())
    return buffers + max(_moving_bytes(plan, problem) for plan in plans)


def _buffers(plan: Plan, problem: Problem) -> Counter[tuple]:
    """How many buffers of each (shape, dtype) a plan receives into and casts into."""
    tensors = [(slot.tensor, slot.arriving) for slot in set(dataflow(plan).slots.values())]
    tensors += [(tensor, True) for _, tensor in casts(plan, problem)]
    return Counter(
        (problem.field_shape(field), problem.field_dtype(field, wire=wire))
        for tensor, wire in tensors
        for field in FIELDS[tensor]
    )


def _moving_bytes(plan: Plan, problem: Problem) -> int:
    """The most that inputs, accumulators, block results and outputs come to at one time."""
    flow = dataflow(plan)
    received = {op.recv for op in plan.ops if isinstance(op, Pass)}
    inputs = sum(problem.chunk_bytes(chunk.tensor, wire=False) for chunk in plan.inputs)
    change = np.zeros(len(plan.ops) + 2, np.int64)
    released = _released(plan)
    for value in flow.first_use:
        if value.chunk not in received and value.chunk not in plan.inputs:
            size, last = problem.chunk_bytes(value.chunk.tensor, wire=False), flow.last_use[value]
            change[flow.first_use[value]] += size
            change[released.get(last, last) + 1] -= size
    alive = np.cumsum(change)[: len(plan.ops)]
    result = np.array([_block_result_bytes(op, index, flow, problem) for index, op in plan])
    outputs = 0
    if problem.dtype != problem.accumulate_dtype:
        outputs = sum(_compute_dtype_bytes(chunk.tensor, problem) for chunk in plan.outputs)
    return int(inputs + max((alive + result).max(), alive[-1] + outputs))


def _released(plan: Plan) -> dict[int, int]:
    """For each Pass, the first later block or fold that waits until its lane is past it: till then it may be under way.

    Blocks run ahead of the lanes, so that what a Pass sends may be held much longer than its place in the plan says.
    """
    flow = dataflow(plan)
    pending: dict[str, list[int]] = {lane: [] for lane in plan.lanes}
    released: dict[int, int] = {}
    for index, op in plan:
        if isinstance(op, Pass):
            pending[op.lane].append(index)
            continue
        for lane, last in flow.waits[index]:
            ended = [other for other in pending[lane] if other <= last]
            released |= dict.fromkeys(ended, index)
            pending[lane] = pending[lane][len(ended) :]
    end = len(plan.ops) - 1
    return released | {index: end for lane in pending.values() for index in lane}


def _block_result_bytes(op: object, index: int, flow: Dataflow, problem: Problem) -> int:
    """What a kernel returns, unless it becomes the accumulator itself."""
    if not isinstance(op, Attend | AttendBackward):
        return 0
    adopts = problem.dtype == problem.accumulate_dtype and not _narrowed(problem)
    fresh = [chunk for chunk in op.writes if not (adopts and flow.starts(index, chunk))]
    return sum(_compute_dtype_bytes(chunk.tensor, problem) for chunk in fresh)


def _narrowed(problem: Problem) -> bool:
    """Whether some block's result covers only a part of its chunk, and so can't become the accumulator."""
    regions = [region for case in problem.layout.cases(problem.causal) for region in case]
    return any(r.mask is Mask.STRICT or r.q is not Part.WHOLE or r.kv is not Part.WHOLE for r in regions)


def _compute_dtype_bytes(tensor: str, problem: Problem) -> int:
    total = 0
    for field in FIELDS[tensor]:
        dtype = problem.accumulate_dtype if field.kind is Kind.STATISTIC else problem.dtype
        total += math.prod(problem.field_shape(field)) * DTYPE_BYTES[dtype]
    return total
