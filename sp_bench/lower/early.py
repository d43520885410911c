"""What a lane does ahead of a transfer's turn: receives that are pre-posted, and sends that are pipelined."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from sp_bench.lower.schedule import Schedule, Waits
from sp_bench.lower.staging import StagingBuffers, StagingUse
from sp_bench.plan.groups import Group
from sp_bench.plan.ops import AllToAll, Bundle, Chunk, Op, Pass, Plan, Transfer
from sp_bench.plan.problem import is_partial
from sp_bench.plan.transfers import peers


def previous_on_lane(plan: Plan) -> dict[int, int]:
    """By transfer, the one before it on its lane, if there is one. Both are indices of operations."""
    by_lane: dict[str, list[int]] = {}
    for index, op in plan:
        if isinstance(op, Transfer):
            by_lane.setdefault(op.lane, []).append(index)
    return {index: before for indices in by_lane.values() for before, index in pairwise(indices)}


def pipelined_sends(plan: Plan, schedule: Schedule) -> dict[int, int]:
    """Transfers that can begin, tensor by tensor, while the one before on their lane is under way, and that one.

    Both send whole chunks that no block computes, as they came or were there from the start, to the same ranks: hops of
    a ring do. To another rank, the send would take half of the link from the rest of the transfer before it, which is
    needed first. A transfer that receives a result has no buffer before its turn.
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
    """When a rank has posted the receives of a transfer, ahead of its turn."""

    beside: bool
    """Whether that may be while the transfer before on its lane is under way."""
    after: int | None
    """The transfer of its lane that has ended by then: the one before, or where `beside` the one before that."""
    waits: Waits
    """What has ended on other streams by then."""


def preposted_receives(plan: Plan, schedule: Schedule, staging: StagingBuffers) -> dict[int, PrepostedReceive]:
    """Transfers whose receives can be posted before their rank has anything to send, once their buffer is free.

    A receive is posted beside the transfer before on its lane if both receive from the same ranks, since two concurrent
    sends would each get half of the link, and if its buffer is none that the other receives into or sends from. A Pass
    that receives a result has no buffer before its turn.

    A lane looks whether the buffer is free when it comes to the transfer before, and again before it begins with that.
    If this depends on how fast blocks are, the receive counts as posted after the transfer before.
    """
    previous, buffers = previous_on_lane(plan), schedule.receive_buffers
    used, found = dict[int, set[object]](), dict[int, PrepostedReceive]()
    held: dict[Chunk, set[object]] = {}
    """By chunk, the buffers that it stands in."""
    for index, op in plan:
        if isinstance(op, Bundle):
            held[op.into] = set().union(*(held.get(part, set()) for part in op.parts))
        elif isinstance(op, Transfer) and op.send and op.recv:
            into: set[object] = {buffers[index]} if index in buffers else set()
            staged = StagingUse(op.lane, op.send.tensor, "recv")
            received_in = into | ({staged} if staged in staging else set())
            used[index] = received_in | held.get(op.send, set())
            if index in buffers or isinstance(op, AllToAll):
                before = previous.get(index, -1)
                beside = (
                    before in found and not used[before] & received_in and _sources(op) == _sources(plan.ops[before])
                )
                free = schedule.buffer_free[index]
                looks = (schedule.buffer_free[before], schedule.waits[before]) if beside else ()
                known = next((waits for waits in looks if _covers(waits, free)), None)
                after = previous.get(index) if known is None else previous.get(before)
                found[index] = PrepostedReceive(beside, after, free if known is None else known)
            held[op.recv] = into
    return found


def _sends_as_is(op: Op) -> bool:
    return isinstance(op, Pass) and not op.against and not is_partial(op.carries)


def _sources(op: Op) -> set[tuple[object, ...]]:
    """From whom every rank receives, as digits and how far they move: alike for two transfers from the same ranks."""
    assert isinstance(op, Transfer)
    return {
        (group.stride, group.size, group.way * shift % group.size) if isinstance(group, Group) else (group, shift % 2)
        for group, shift in peers(op)
    }


def _covers(waits: Waits, others: Waits) -> bool:
    """Whether all of the others are over when these are."""
    ended = dict(waits)
    return all(last <= ended.get(stream, -1) for stream, last in others)
