"""What the order of a plan implies for its execution: what each operation waits for, and what it receives into.

The waits are those that the chunks demand, and those for a receive buffer to be free.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from sp_bench.plan.dataflow import Dataflow, Value, dataflow
from sp_bench.plan.ops import Chunk, Join, Op, Plan, Transfer

Waits = tuple[tuple[str, int], ...]
"""(stream, index): the last operation of a stream that must have ended."""


class ReceiveBuffer(NamedTuple):
    """A buffer for one chunk, reused by values that are never alive together."""

    number: int
    tensor: str
    arriving: bool
    """Whether it is for peers' partials, which stand in it in the wire dtype."""


@dataclass(frozen=True)
class Schedule:
    """The waits and receive buffers of a plan, the same on every rank.

    Waits point backwards only, and a transfer has the same index on both its ends, so that a plan whose sends all have
    their receives can't deadlock: the first operation not yet ended, on any rank, can always run.
    """

    waits: tuple[Waits, ...]
    """For each operation, what must have ended on each other stream before it.

    Operations of one stream end in plan order, so one index a stream is enough, and none is needed for its own.
    """
    buffer_free: tuple[Waits, ...]
    """For each operation, the part of its waits after which the buffer that it writes is free, whatever it reads: a
    transfer can receive from then on, if those before it on its lane have ended or use other buffers. Buffers are few:
    after the first transfers this is often all of the waits."""
    receive_buffers: Mapping[int, ReceiveBuffer]
    """By transfer, the buffer it receives into. A result that outlives the plan has none."""


_CACHE: WeakKeyDictionary[Plan, Schedule] = WeakKeyDictionary()


def schedule(plan: Plan) -> Schedule:
    """The waits and receive buffers of a plan, worked out once. Raises PlanError as `dataflow` does."""
    if plan not in _CACHE:
        flow = dataflow(plan)
        buffers, before = _receive_buffers(plan, flow)
        _CACHE[plan] = Schedule(*_waits(plan, flow, before), buffers)
    return _CACHE[plan]


def _receive_buffers(plan: Plan, flow: Dataflow) -> tuple[dict[int, ReceiveBuffer], dict[int, Value]]:
    """A buffer for each transfer that receives, and the value that was in it before."""
    buffers: dict[int, ReceiveBuffer] = {}
    before: dict[int, Value] = {}
    ends_with = set(plan.ends_with)
    occupied: dict[tuple[str, bool], list[tuple[int, ReceiveBuffer, Value]]] = {}
    """By tensor and whether it arrives: heaps by the last use of what a buffer holds."""
    made = 0
    for index, op in plan:
        if not isinstance(op, Transfer) or op.recv is None or op.recv in ends_with:
            continue
        kind, value = (op.recv.tensor, op.recv.is_arriving), flow.writes[index][0]
        heap = occupied.setdefault(kind, [])
        if heap and heap[0][0] < index:
            _, buffers[index], before[index] = heapq.heappop(heap)
        else:
            buffers[index] = ReceiveBuffer(made, *kind)
            made += 1
        heapq.heappush(heap, (flow.last_use[value], buffers[index], value))
    return buffers, before


def _waits(plan: Plan, flow: Dataflow, before: Mapping[int, Value]) -> tuple[tuple[Waits, ...], tuple[Waits, ...]]:
    """(waits, buffer_free) of each operation; `before` has the value that each receive buffer held before."""
    streams = [op.stream for op in plan.ops]
    writer: dict[Chunk, int] = {}
    readers: dict[Chunk, list[int]] = {}
    users: dict[Value, list[int]] = {}
    joined: int | None = None
    waits, buffer_free = [], []
    for index, op in plan:
        needs = [writer[chunk] for chunk in op.reads if chunk in writer]
        hazards = []
        for chunk in op.writes:
            hazards += [writer[chunk]] if chunk in writer else []
            hazards += readers.pop(chunk, [])
            writer[chunk] = index
        for chunk in op.reads:
            readers.setdefault(chunk, []).append(index)
        if index in before:
            hazards += users[before[index]]
        for value in (*flow.reads[index], *flow.writes[index]):
            users.setdefault(value, []).append(index)
        if isinstance(op, Join):
            hazards += range(index)
            joined = index
        elif joined is not None:
            hazards.append(joined)
        waits.append(_latest(op, [*needs, *hazards], streams))
        buffer_free.append(_latest(op, hazards, streams))
    return tuple(waits), tuple(buffer_free)


def _latest(op: Op, hazards: Iterable[int], streams: list[str]) -> Waits:
    latest: dict[str, int] = {}
    for other in hazards:
        latest[streams[other]] = max(other, latest.get(streams[other], -1))
    latest.pop(op.stream, None)
    return tuple(sorted(latest.items()))
