"""What the order of a plan implies: what each operation waits for, which buffer it uses, how long each chunk lives.

run and simulate both take their waits from here, and run and account their buffers, so that what is simulated and
counted is what is executed.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from sp_bench.plan.ops import Chunk, Pass, Plan, PlanError


@dataclass(frozen=True)
class Slot:
    """A receive buffer, reused by chunks that are never alive together."""

    number: int
    tensor: str
    arriving: bool


@dataclass(frozen=True)
class Dataflow:
    """What follows from a plan, for every rank alike."""

    waits: tuple[tuple[tuple[str, int], ...], ...]
    """For each operation, (stream, index): the last operation of each other stream that must have ended before it.

    Operations of one stream end in plan order, so one index a stream is enough, and none is needed for its own.
    """
    slots: dict[int, Slot]
    """For each Pass that receives, by its index: the buffer it receives into."""
    first_use: dict[Chunk, int]
    last_use: dict[Chunk, int]


_CACHE: WeakKeyDictionary[Plan, Dataflow] = WeakKeyDictionary()


def dataflow(plan: Plan) -> Dataflow:
    """The waits, buffers and lifetimes of a plan, worked out once.

    Raises PlanError for an operation that reads what is not there yet. Waits point backwards only, and a Pass has
    the same index on both its ends, so that a plan which gets through here and whose sends all have their receives
    can't deadlock: the first operation not yet ended, on any rank, can always run.
    """
    if plan not in _CACHE:
        _CACHE[plan] = _dataflow(plan)
    return _CACHE[plan]


def _dataflow(plan: Plan) -> Dataflow:
    first_use, last_use = _lifetimes(plan)
    slots, before = _slots(plan, first_use, last_use)
    users: dict[Chunk, list[int]] = {}
    streams = [op.stream for op in plan.ops]
    writer: dict[Chunk, int] = {}
    readers: dict[Chunk, list[int]] = {}
    waits = []
    for index, op in plan:
        hazards = [writer[chunk] for chunk in op.reads if chunk in writer]
        for chunk in op.writes:
            hazards += [writer[chunk]] if chunk in writer else []
            hazards += readers.pop(chunk, [])
            writer[chunk] = index
        for chunk in op.reads:
            readers.setdefault(chunk, []).append(index)
        if index in before:
            hazards += users[before[index]]
        for chunk in (*op.reads, *op.writes):
            users.setdefault(chunk, []).append(index)
        latest: dict[str, int] = {}
        for other in hazards:
            latest[streams[other]] = max(other, latest.get(streams[other], -1))
        latest.pop(op.stream, None)
        waits.append(tuple(sorted(latest.items())))
    return Dataflow(tuple(waits), slots, first_use, last_use)


def _lifetimes(plan: Plan) -> tuple[dict[Chunk, int], dict[Chunk, int]]:
    """The first and the last operation that uses each chunk; inputs live from the start, outputs to the end."""
    first = dict.fromkeys(plan.inputs, 0)
    last = dict.fromkeys(plan.inputs, len(plan.ops))
    for index, op in plan:
        for chunk in op.reads:
            if chunk not in first:
                raise PlanError(f"operation {index}, {op}: reads {chunk} before anything has put it there")
            last[chunk] = max(index, last[chunk])
        for chunk in op.writes:
            first.setdefault(chunk, index)
            last[chunk] = max(index, last.get(chunk, index))
    for chunk in plan.outputs:
        if chunk not in first:
            raise PlanError(f"the plan never computes its output {chunk}")
        last[chunk] = len(plan.ops)
    return first, last


def _slots(plan: Plan, first: dict[Chunk, int], last: dict[Chunk, int]) -> tuple[dict[int, Slot], dict[int, Chunk]]:
    """A buffer for each Pass that receives, and the chunk that was in it before."""
    slots: dict[int, Slot] = {}
    before: dict[int, Chunk] = {}
    occupants: dict[Slot, Chunk] = {}
    made = 0
    for index, op in plan:
        if not isinstance(op, Pass) or op.recv is None:
            continue
        kind = (op.recv.tensor, op.recv.is_arriving)
        if first[op.recv] < index:
            reused = next((slot for slot, chunk in occupants.items() if chunk == op.recv), None)
            if reused is None:
                raise PlanError(f"operation {index}, {op}: receives over {op.recv}, which the rank has already")
            slots[index], before[index] = reused, op.recv
            continue
        free = [s for s, chunk in occupants.items() if (s.tensor, s.arriving) == kind and last[chunk] < index]
        if free:
            slots[index] = min(free, key=lambda slot: last[occupants[slot]])
            before[index] = occupants[slots[index]]
        else:
            slots[index] = Slot(made, *kind)
            made += 1
        occupants[slots[index]] = op.recv
    return slots, before
