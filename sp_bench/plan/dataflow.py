"""What the order of a plan implies: what each operation waits for, which buffer it uses, how long each value lives.

run and simulate both take their waits from here, and run and account their buffers, so that what is simulated and
counted is what is executed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from sp_bench.plan.ops import BLOCKS, Bundle, Chunk, Fold, Join, Op, Plan, PlanError, Transfer
from sp_bench.plan.problem import is_partial

Waits = tuple[tuple[str, int], ...]
"""(stream, index): the last operation of a stream that must have ended."""


class Value(NamedTuple):
    """One content of a chunk. A chunk that is received again, or accumulated again after it was sent on, is another."""

    chunk: Chunk
    version: int


class Slot(NamedTuple):
    """A receive buffer, reused by values that are never alive together."""

    number: int
    tensor: str
    arriving: bool


@dataclass(frozen=True)
class Dataflow:
    """What follows from a plan, for every rank alike."""

    waits: tuple[Waits, ...]
    """For each operation, what must have ended on each other stream before it.

    Operations of one stream end in plan order, so one index a stream is enough, and none is needed for its own.
    """
    room: tuple[Waits, ...]
    """The part of the waits after which there is room for what an operation writes, whatever it reads: a transfer can
    receive from then on, if those before it on its lane have ended or use other buffers, or, tensor by tensor, have
    come and gone. Buffers are few, so that after the first ones it is often all of the waits."""
    slots: dict[int, Slot]
    """For each transfer that receives, by its index: the buffer it receives into. What outlives the plan has none."""
    writes: tuple[tuple[Value, ...], ...]
    """The values that each operation writes."""
    first_use: dict[Value, int]
    """The operation that makes a value; 0 for what the plan starts with."""
    last_use: dict[Value, int]
    """The operation that uses it last; one past the end for what the plan starts or ends with."""

    def starts(self, index: int, chunk: Chunk) -> bool:
        """Whether operation `index` makes a new value of `chunk`, rather than adding to one."""
        return any(value.chunk == chunk and self.first_use[value] == index for value in self.writes[index])


_CACHE: WeakKeyDictionary[Plan, Dataflow] = WeakKeyDictionary()


def dataflow(plan: Plan) -> Dataflow:
    """The waits, buffers and lifetimes of a plan, worked out once.

    Raises PlanError for an operation that reads what is not there. Waits point backwards only, and a transfer has the
    same index on both its ends, so that a plan which gets through here and whose sends all have their receives can't
    deadlock: the first operation not yet ended, on any rank, can always run.
    """
    if plan not in _CACHE:
        reads, writes = _values(plan)
        first_use, last_use = _lifetimes(plan, reads, writes)
        slots, before = _slots(plan, writes, first_use, last_use)
        _CACHE[plan] = Dataflow(*_waits(plan, reads, writes, before), slots, writes, first_use, last_use)
    return _CACHE[plan]


Values = tuple[tuple[Value, ...], ...]


def _values(plan: Plan) -> tuple[Values, Values]:
    """The values that each operation reads and writes."""
    versions = dict.fromkeys(plan.starts_with, 0)
    there = set(plan.starts_with)
    bundled: dict[Value, tuple[Value, ...]] = {}
    reads, writes = [], []
    for index, op in plan:
        if isinstance(op, Transfer) and op.lane == BLOCKS:
            raise PlanError(f"operation {index}, {op}: {BLOCKS} is no lane")
        for chunk in op.reads:
            if chunk not in there:
                gone = "that was sent on or folded already" if chunk in versions else "before anything has put it there"
                raise PlanError(f"operation {index}, {op}: reads {chunk} {gone}")
        read = [Value(chunk, versions[chunk]) for chunk in op.reads]
        reads.append((*read, *(part for value in read for part in bundled.get(value, ()))))
        if isinstance(op, Fold | Transfer):  # a partial is folded or sent on once
            there -= {chunk for chunk in op.reads if is_partial(chunk.tensor) and chunk not in plan.kept}
        for chunk in op.writes:
            if chunk in plan.starts_with:
                raise PlanError(f"operation {index}, {op}: receives over {chunk}, which the rank has already")
            if isinstance(op, Transfer) or chunk not in there:
                versions[chunk] = versions.get(chunk, -1) + 1
                there.add(chunk)
        writes.append(tuple(Value(chunk, versions[chunk]) for chunk in op.writes))
        if isinstance(op, Bundle):
            bundled[writes[-1][0]] = reads[-1]
    for chunk in plan.ends_with:
        if chunk not in there:
            raise PlanError(f"the end of the plan: its output {chunk} was never computed, or sent on")
    return tuple(reads), tuple(writes)


def _lifetimes(plan: Plan, reads: Values, writes: Values) -> tuple[dict[Value, int], dict[Value, int]]:
    """The first and the last operation that uses each value; inputs live from the start, outputs to the end."""
    end = len(plan.ops)
    first = {Value(chunk, 0): 0 for chunk in plan.starts_with}
    last = {Value(chunk, 0): end for chunk in plan.starts_with}
    newest: dict[Chunk, Value] = {}
    for index in range(end):
        for value in (*reads[index], *writes[index]):
            first.setdefault(value, index)
            last[value] = max(index, last.get(value, index))
            newest[value.chunk] = value
    for chunk in plan.ends_with:
        last[newest[chunk]] = end
    return first, last


def _slots(
    plan: Plan, writes: Values, first: dict[Value, int], last: dict[Value, int]
) -> tuple[dict[int, Slot], dict[int, Value]]:
    """A buffer for each transfer that receives, and the value that was in it before."""
    slots: dict[int, Slot] = {}
    before: dict[int, Value] = {}
    ends_with = set(plan.ends_with)
    occupied: dict[tuple[str, bool], list[tuple[int, Slot, Value]]] = {}
    """By tensor and whether it arrives: heaps by the last use of what a buffer holds."""
    made = 0
    for index, op in plan:
        if not isinstance(op, Transfer) or op.recv is None or op.recv in ends_with:
            continue
        kind, value = (op.recv.tensor, op.recv.is_arriving), writes[index][0]
        heap = occupied.setdefault(kind, [])
        if heap and heap[0][0] < index:
            _, slots[index], before[index] = heapq.heappop(heap)
        else:
            slots[index] = Slot(made, *kind)
            made += 1
        heapq.heappush(heap, (last[value], slots[index], value))
    return slots, before


def _waits(plan: Plan, reads: Values, writes: Values, before: dict[int, Value]) -> tuple[tuple, tuple]:
    """For each operation, the last operation of each other stream that it must wait for: as a whole, and to write."""
    streams = [op.stream for op in plan.ops]
    writer: dict[Chunk, int] = {}
    readers: dict[Chunk, list[int]] = {}
    users: dict[Value, list[int]] = {}
    joined: int | None = None
    waits, room = [], []
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
        for value in (*reads[index], *writes[index]):
            users.setdefault(value, []).append(index)
        if isinstance(op, Join):
            hazards += range(index)
            joined = index
        elif joined is not None:
            hazards.append(joined)
        waits.append(_latest(op, [*needs, *hazards], streams))
        room.append(_latest(op, hazards, streams))
    return tuple(waits), tuple(room)


def _latest(op: Op, hazards: Iterable[int], streams: list[str]) -> Waits:
    latest: dict[str, int] = {}
    for other in hazards:
        latest[streams[other]] = max(other, latest.get(streams[other], -1))
    latest.pop(op.stream, None)
    return tuple(sorted(latest.items()))
