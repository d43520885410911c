"""Work that a lane does ahead of a transfer's turn: pre-posted receives and pipelined sends."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from sp_bench.lower.staging import StagingBuffers, StagingUse
from sp_bench.plan.groups import Group
from sp_bench.plan.ops import AllToAll, Bundle, Chunk, Collective, Op, Pass, Plan, RowCollective, Transfer, TreeReduce
from sp_bench.plan.schedule import Schedule, Waits
from sp_bench.plan.transfers import peers


def previous_on_lane(plan: Plan) -> dict[int, int]:
    """{transfer: the transfer before it on its lane}, as indices of operations."""
    by_lane: dict[str, list[int]] = {}
    for index, op in plan.transfers:
        by_lane.setdefault(op.lane, []).append(index)
    return {index: before for indices in by_lane.values() for before, index in pairwise(indices)}


def pipelined_sends(plan: Plan, schedule: Schedule) -> dict[int, int]:
    """{transfer: the transfer before it on its lane}, where the first can begin, tensor by tensor, during the second.

    Both must send whole chunks that were received or are inputs, to the same ranks, as the hops of a ring do. A send to
    another rank would take half of the link from the transfer before it, which is needed first. A transfer that
    receives a result of the plan is not pipelined, as it has no buffer before its turn.
    """
    ops = plan.ops
    return {
        index: before
        for index, before in previous_on_lane(plan).items()
        if index in schedule.receive_buffers
        and all(_sends_as_is(ops[i]) for i in (index, before))
        and _sources(ops[index]) == _sources(ops[before])
    }


class PrepostedReceive(NamedTuple):
    """When a rank posts the receives of a transfer ahead of its turn."""

    beside: bool
    """Whether it may post them while the transfer before on its lane is in flight."""
    after: int | None
    """The transfer of its lane that must have ended: the one before, or if `beside` the one before that."""
    waits: Waits
    """The operations of other streams that must have ended."""


def preposted_receives(plan: Plan, schedule: Schedule, staging: StagingBuffers) -> dict[int, PrepostedReceive]:
    """By transfer, the receives that can be posted once their buffer is free, before the rank has anything to send.

    A receive is posted beside the transfer before it on its lane if both receive from the same ranks (two senders would
    each get half of the link), and if that transfer neither receives into nor sends from its buffer. A Pass that
    receives a result of the plan has no buffer before its turn. The library's collectives post nothing ahead.

    A lane checks whether the buffer is free when it reaches the transfer before, and again before it starts that one.
    If the answer depends on the speed of blocks, the receive counts as posted after the transfer before.
    """
    previous, buffers = previous_on_lane(plan), schedule.receive_buffers
    used, preposted = dict[int, set[object]](), dict[int, PrepostedReceive]()
    held: dict[Chunk, set[object]] = {}
    """The buffers that hold each chunk."""
    for index, op in plan:
        if isinstance(op, Bundle):
            held[op.into] = set().union(*(held.get(part, set()) for part in op.parts))
        elif isinstance(op, RowCollective | TreeReduce) or (isinstance(op, Collective) and not by_messages(op)):
            held |= dict.fromkeys(op.writes, {buffers[index]} if index in buffers else set())
        elif isinstance(op, Pass | AllToAll):
            into: set[object] = {buffers[index]} if index in buffers else set()
            staged = StagingUse(op.lane, op.send.tensor, "recv")
            received_in = into | ({staged} if staged in staging else set())
            used[index] = received_in | held.get(op.send, set())
            if index in buffers or isinstance(op, AllToAll):
                before = previous.get(index, -1)
                beside = (
                    before in preposted
                    and not used[before] & received_in
                    and _sources(op) == _sources(plan.ops[before])
                )
                free = schedule.buffer_free[index]
                looks = (schedule.buffer_free[before], schedule.waits[before]) if beside else ()
                known = next((waits for waits in looks if _covers(waits, free)), None)
                after = previous.get(index) if known is None else previous.get(before)
                preposted[index] = PrepostedReceive(beside, after, free if known is None else known)
            held[op.recv] = into
    return preposted


def by_messages(op: Transfer) -> bool:
    """Whether a transfer is point-to-point messages, not a collective of the library."""
    return isinstance(op, Pass | RowCollective | TreeReduce) or (isinstance(op, AllToAll) and op.by_messages)


def _sends_as_is(op: Op) -> bool:
    return isinstance(op, Pass) and not op.against and not op.tensor.is_partial


def _sources(op: Op) -> set[tuple[object, ...]]:
    """A key for the ranks that every rank receives from: equal for two transfers from the same ranks."""
    assert isinstance(op, Transfer)
    return {
        (group._replace(way=group.way * shift % group.size),) if isinstance(group, Group) else (group, shift % 2)
        for group, shift in peers(op)
    }


def _covers(waits: Waits, others: Waits) -> bool:
    """Whether `others` have ended whenever `waits` have."""
    ended = dict(waits)
    return all(last <= ended.get(stream, -1) for stream, last in others)
