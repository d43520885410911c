"""The schedule of a plan: what each operation waits for (its operands, a free buffer), and what it receives into."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from sp_bench.plan.dataflow import Dataflow, Value, dataflow
from sp_bench.plan.ops import BLOCKS, AllGather, Join, Plan, RowCollective, Transfer
from sp_bench.plan.tensors import Tensor

Values = tuple[Value, ...]
Waits = tuple[tuple[str, int], ...]
"""(stream, index): the last operation of a stream that must have ended."""


class ReceiveBuffer(NamedTuple):
    """A buffer for what one transfer receives; values that are never alive at the same time share it."""

    number: int
    tensor: Tensor
    arriving: bool
    """Whether it is for peers' partials, which it holds in the wire dtype."""
    chunks: int = 1
    """How many chunks it holds, side by side: those of all members of an all-gather."""
    of_rows: bool = False
    """Whether it is for rows of several members of a group, one behind the other: the most that it ever has."""


@dataclass(frozen=True)
class Schedule:
    """The waits and receive buffers of a plan, the same on every rank.

    A plan whose sends all have their receives can't deadlock: waits only point backwards, and a transfer has the same
    index at sender and receiver, so that the operation with the lowest index not yet ended on any rank can always run.
    """

    waits: tuple[Waits, ...]
    """For each operation, the last operation of each other stream that must have ended before it.

    Operations of a stream end in plan order, so one index per stream is enough, and none for its own stream.
    """
    buffer_free: tuple[Waits, ...]
    """For each operation, the part of its waits after which the buffer that it writes is free.

    A transfer can receive from then on, if those before it on its lane have ended or use other buffers. As buffers are
    few, this is often all of the waits after the first transfers."""
    receive_buffers: Mapping[int, ReceiveBuffer]
    """The buffer that each transfer receives into. A result that outlives the plan has none."""


_CACHE: WeakKeyDictionary[Plan, Schedule] = WeakKeyDictionary()


def schedule(plan: Plan) -> Schedule:
    """The schedule of a plan, cached. Raises PlanError as `dataflow` does."""
    if plan not in _CACHE:
        flow = dataflow(plan)
        buffers, before = _receive_buffers(plan, flow)
        _CACHE[plan] = Schedule(*_waits(plan, flow, before), buffers)
    return _CACHE[plan]


@dataclass(eq=False)
class Segment:
    """Blocks and folds that run without a wait between them, and of which nothing waits but for the last."""

    ops: list[int] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    """The last transfer of each lane that it waits for."""


def segments(plan: Plan, waits: Sequence[Waits]) -> dict[int, Segment]:
    """The segments of a plan, by the index of their first operation, given the waits of each operation."""
    awaited = {index for of_op in waits for stream, index in of_op if stream == BLOCKS}
    by_first: dict[int, Segment] = {}
    current: Segment | None = None
    satisfied: dict[str, int] = {}
    for index, op in plan:
        if isinstance(op, Transfer):
            continue
        new = {lane: last for lane, last in waits[index] if last > satisfied.get(lane, -1)}
        if current is None or new:
            current = by_first[index] = Segment(waits=new)
            satisfied |= new
        current.ops.append(index)
        if index in awaited:
            current = None
    return by_first


def released_by(plan: Plan, waits: Sequence[Waits]) -> dict[int, int]:
    """For each transfer, the first later block or fold that waits for it or for a later transfer of its lane, if any
    does. The tensor sent may stay alive until then, as blocks run ahead of the lanes.
    """
    pending: dict[str, list[int]] = {lane: [] for lane in plan.lanes}
    first = dict.fromkeys(pending, 0)
    """By lane, the first transfer that is still pending, as a place in its list."""
    released: dict[int, int] = {}
    for index, op in plan:
        if isinstance(op, Transfer):
            pending[op.lane].append(index)
            continue
        for lane, last in waits[index]:
            end = bisect_right(pending[lane], last, first[lane])
            released |= dict.fromkeys(pending[lane][first[lane] : end], index)
            first[lane] = end
    return released


def _receive_buffers(plan: Plan, flow: Dataflow) -> tuple[dict[int, ReceiveBuffer], dict[int, Values]]:
    """(buffer, values that were in it before) of each transfer that receives, as two mappings."""
    buffers: dict[int, ReceiveBuffer] = {}
    before: dict[int, Values] = {}
    ends_with = set(plan.ends_with)
    occupied: dict[tuple[Tensor, bool, int, bool], list[tuple[int, ReceiveBuffer, Values]]] = {}
    """For each kind of buffer, (tensor, arriving, chunks, of_rows), a heap by the last use of the values in it."""
    made = 0
    for index, op in plan.transfers:
        if not op.writes or op.writes[0] in ends_with:
            continue
        first, values = op.writes[0], flow.writes[index]
        size = op.group.size if isinstance(op, AllGather) else 1
        kind = (first.tensor, first.is_arriving, size, isinstance(op, RowCollective))
        heap = occupied.setdefault(kind, [])
        if heap and heap[0][0] < index:
            _, buffers[index], before[index] = heapq.heappop(heap)
        else:
            buffers[index] = ReceiveBuffer(made, *kind)
            made += 1
        heapq.heappush(heap, (max(flow.last_use[value] for value in values), buffers[index], values))
    return buffers, before


def _waits(plan: Plan, flow: Dataflow, before: Mapping[int, Values]) -> tuple[tuple[Waits, ...], tuple[Waits, ...]]:
    """(waits, buffer_free) of each operation; `before` has the values that a transfer's buffer held before it."""
    streams = [op.stream for op in plan.ops]
    # By the ids of chunks and values, of which there is one object each (dataflow.Value).
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    users: dict[int, list[int]] = {}
    joined: int | None = None
    waits, buffer_free = [], []
    for index, op in plan:
        read = [id(value.chunk) for value in flow.reads[index][: len(op.reads)]]
        needs = [writer[chunk] for chunk in read if chunk in writer]
        hazards = []
        for chunk in [id(value.chunk) for value in flow.writes[index]]:
            if chunk in writer:
                hazards.append(writer[chunk])
            hazards += readers.pop(chunk, ())
            writer[chunk] = index
        for chunk in read:
            readers.setdefault(chunk, []).append(index)
        if index in before:
            hazards += [user for value in before[index] for user in users[id(value)]]
        for value in (*flow.reads[index], *flow.writes[index]):
            users.setdefault(id(value), []).append(index)
        if isinstance(op, Join):
            hazards += range(index)
            joined = index
        elif joined is not None:
            hazards.append(joined)
        waits.append(_latest(index, [*needs, *hazards], streams))
        buffer_free.append(_latest(index, hazards, streams) if needs else waits[-1])
    return tuple(waits), tuple(buffer_free)


def _latest(index: int, hazards: Sequence[int], streams: list[str]) -> Waits:
    """The last of `hazards` on each stream other than that of operation `index`."""
    own, latest = streams[index], dict[str, int]()
    for other in hazards:
        stream = streams[other]
        if stream != own and other > latest.get(stream, -1):
            latest[stream] = other
    return tuple(sorted(latest.items())) if latest else ()
