"""What a transfer moves: from whom to whom, how many bytes of which field, and the buffers that it is staged in."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sp_bench.plan.dataflow import Value, Waits, dataflow
from sp_bench.plan.groups import Exchange, Group
from sp_bench.plan.layout import Part
from sp_bench.plan.ops import AllToAll, Attend, AttendBackward, Bundle, Chunk, Op, Pass, Plan, Transfer
from sp_bench.plan.problem import FIELDS, Field, Problem, is_partial


def peers(op: Transfer) -> list[tuple[Group | Exchange, int]]:
    """(group, shift) of each of the messages of a transfer, in their order: to whom every rank sends it."""
    if isinstance(op, AllToAll):
        return [(op.group, shift) for shift in range(1, op.group.size)]
    return [(op.group, op.shift)] if op.send else []


def messages(op: Transfer, problem: Problem, rank) -> list[Mapping[str, Any]]:
    """Bytes by field of each message that `rank`, one or an array of them, sends in one transfer, in `peers`' order.

    All of them are under way at once. Nothing is sent where the peer is the rank itself.
    """
    if isinstance(op, AllToAll):
        pieces = {field.name: piece_bytes(problem, field) for field in by_heads(op)}
        return [pieces] * (op.group.size - 1)
    if op.send is None:
        return []
    whole = _wire_bytes(problem, op.send.tensor)
    if op.against is None and not isinstance(op.group, Exchange):
        return [whole]
    tokens = problem.field_tokens(FIELDS[op.send.tensor][0])
    share = tokens if op.against is None else _rows_seen(op, problem, rank)
    if isinstance(op.group, Exchange):
        share = share * (op.target(rank) != rank)
    return [{name: share * size // tokens for name, size in whole.items()}]


@lru_cache(maxsize=64)
def _wire_bytes(problem: Problem, tensor: str) -> Mapping[str, int]:
    """What each field of a chunk weighs on the wire. Plans have thousands of messages, of few tensors."""
    return {field.name: problem.field_bytes(field, wire=True) for field in FIELDS[tensor]}


def _rows_seen(op: Pass, problem: Problem, rank):
    """How many tokens of its chunk a rank sends, where it sends only those that something sees."""
    assert op.send is not None
    tokens = problem.field_tokens(FIELDS[op.send.tensor][0])
    order = problem.layout.order(*op.seen_by(rank))
    return sum((order == i) * part.tokens(tokens) for i, part in enumerate(problem.rows_seen()))


def part_sent(op: Pass, problem: Problem, rank: int) -> Part:
    """The part of its chunk that one rank sends."""
    if op.against is None:
        return Part.WHOLE
    return problem.rows_seen()[problem.layout.order(*op.seen_by(rank))]


def previous_on_lane(plan: Plan) -> dict[int, int]:
    """By their indices, transfers and the one before each on its lane, if there is one."""
    by_lane: dict[str, list[int]] = {}
    for index, op in plan:
        if isinstance(op, Transfer):
            by_lane.setdefault(op.lane, []).append(index)
    return {index: before for indices in by_lane.values() for before, index in pairwise(indices)}


def begun_early(plan: Plan) -> dict[int, int]:
    """Transfers that can begin, tensor by tensor, while the one before on their lane is under way, and that one.

    Both send whole chunks that no block computes, as they came or were there from the start, to the same ranks: hops of
    a ring do. To another rank it would go beside the rest of the one before, which comes first and has half of the link
    then. One that receives a result has no buffer before its turn.
    """
    slots, ops = dataflow(plan).slots, plan.ops
    return {
        index: before
        for index, before in previous_on_lane(plan).items()
        if index in slots
        and all(_sends_as_is(ops[i]) for i in (index, before))
        and _sources(ops[index]) == _sources(ops[before])
    }


def _sends_as_is(op: Op) -> bool:
    return isinstance(op, Pass) and not op.against and not is_partial(op.carries)


def _sources(op: Op) -> set[tuple[object, ...]]:
    """From whom every rank receives, as digits and how far they move: alike for two transfers from the same ranks."""
    assert isinstance(op, Transfer)
    return {
        (group.stride, group.size, group.way * shift % group.size) if isinstance(group, Group) else (group, shift % 2)
        for group, shift in peers(op)
    }


class Posted(NamedTuple):
    """When a rank has posted the receives of a transfer ahead of its turn."""

    beside: bool
    """Whether that may be while the one before on its lane is under way."""
    after: int | None
    """The transfer of its lane that has ended then: the one before, or beside that the one before it; None if none."""
    waits: Waits
    """What has ended on other streams."""


def posted_ahead(plan: Plan, problem: Problem) -> dict[int, Posted]:
    """Transfers whose receives can be posted before their rank has anything to send, once there is room for what comes.

    Beside the one before on their lane if they receive from the same ranks, since of two that send at once each would
    have half of the way, and others would wait for what they send next; and if they receive into nothing that it
    receives into or sends from. A Pass that brings a result has no buffer before its turn.

    Lanes look whether there is room as they come to the one before, and before they begin with that. If it depends on
    how fast blocks are, what comes counts as posted after it.
    """
    flow, staging, previous = dataflow(plan), stages(plan, problem), previous_on_lane(plan)
    used, found = dict[int, set[object]](), dict[int, Posted]()
    held: dict[Chunk, set[object]] = {}
    """By chunk, the buffers that it stands in."""
    for index, op in plan:
        if isinstance(op, Bundle):
            held[op.into] = set().union(*(held.get(part, set()) for part in op.parts))
        elif isinstance(op, Transfer) and op.send and op.recv:
            into: set[object] = {flow.slots[index]} if index in flow.slots else set()
            stage = Stage(op.lane, op.send.tensor, "recv")
            received_in = into | ({stage} if stage in staging else set())
            used[index] = received_in | held.get(op.send, set())
            if index in flow.slots or isinstance(op, AllToAll):
                before = previous.get(index, -1)
                beside = (
                    before in found and not used[before] & received_in and _sources(op) == _sources(plan.ops[before])
                )
                room = flow.room[index]
                looks = (flow.room[before], flow.waits[before]) if beside else ()
                known = next((waits for waits in looks if _covers(waits, room)), None)
                after = previous.get(index) if known is None else previous.get(before)
                found[index] = Posted(beside, after, room if known is None else known)
            held[op.recv] = into
    return found


def _covers(waits: Waits, others: Waits) -> bool:
    """Whether all of the others are over when these are."""
    ended = dict(waits)
    return all(last <= ended.get(stream, -1) for stream, last in others)


def by_heads(op: AllToAll) -> tuple[Field, ...]:
    """The fields that an AllToAll moves, by heads."""
    tensor = op.recv.tensor
    return FIELDS[tensor if op.to_heads else f"{tensor}_h"]


def piece_shape(problem: Problem, field: Field) -> tuple[int, ...]:
    """One rank's heads of another rank's tokens: what two ranks exchange of a field by heads."""
    return (problem.batch, problem.local_seqlen, problem.field_heads(field), problem.head_dim)


def piece_bytes(problem: Problem, field: Field) -> int:
    """What they weigh on the wire."""
    return problem.field_bytes(field, wire=True) // problem.layout.shared


def adds_up(op: AllToAll, problem: Problem, field: Field) -> bool:
    """Whether what comes of a field by heads is of several ranks for one key head, and a sum at its owner."""
    heads = problem.kv_heads if field.kv else problem.heads
    return not op.to_heads and problem.field_heads(field) * op.group.size > heads


_UNSUMMED: WeakKeyDictionary[Plan, dict[Problem, frozenset[Chunk]]] = WeakKeyDictionary()


def unsummed_partials(plan: Plan, problem: Problem) -> frozenset[Chunk]:
    """The partials that nothing is ever added to, so that no accumulator is needed and the compute dtype holds them.

    All there is of each comes from one block, or from one AllToAll. Those that arrive to be folded aren't among them:
    they stand in receive buffers, as they travelled. Nor are those that travel in the dtype of accumulators: to make
    them so spares a copy on their way.
    """
    found = _UNSUMMED.setdefault(plan, {})
    if problem not in found:
        flow, writers = dataflow(plan), dict[Value, list[Op]]()
        for index, op in plan:
            for value in flow.writes[index]:
                if is_partial(value.chunk.tensor) and not value.chunk.is_arriving:
                    writers.setdefault(value, []).append(op)
        summed = {value.chunk for value, ops in writers.items() if len(ops) > 1 or not _makes_all(ops[0], problem)}
        if problem.wire_dtype == problem.accumulate_dtype:
            summed |= {op.send for op in plan.ops if isinstance(op, Transfer) and op.send and is_partial(op.carries)}
        found[problem] = frozenset(value.chunk for value in writers) - summed
    return found[problem]


def _makes_all(op: Op, problem: Problem) -> bool:
    """Whether an operation makes all of a partial that nothing is added to."""
    if isinstance(op, AllToAll):
        return not any(adds_up(op, problem, field) for field in by_heads(op))
    return isinstance(op, Attend | AttendBackward) and not problem.narrows


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
    """What a rank copies before it sends, and once all has come. Its own piece doesn't travel."""
    whole = sum(problem.field_bytes(field, wire=True) for field in by_heads(op))
    own = sum(piece_bytes(problem, field) for field in by_heads(op))
    in_place = goes_in_place(op, problem, unsummed)
    return 0 if in_place and not op.to_heads else whole - own, own if in_place and op.to_heads else whole


class Stage(NamedTuple):
    """A buffer in which a lane puts together what it sends, or in which it takes apart what it received."""

    lane: str
    tensor: str
    use: str
    """send or recv of an AllToAll, or pass."""


Buffer = tuple[tuple[int, ...], str]
"""Shape and dtype of one tensor."""


def stages(plan: Plan, problem: Problem) -> dict[Stage, tuple[Buffer, ...]]:
    """The staging buffers of a plan, a tensor for each field."""
    found, unsummed = dict[Stage, tuple[Buffer, ...]](), unsummed_partials(plan, problem)
    for op in plan.ops:
        if isinstance(op, AllToAll):
            pieces = tuple(
                ((op.group.size, *piece_shape(problem, field)), problem.field_dtype(field, wire=True))
                for field in by_heads(op)
            )
            by_tokens, other = ("send", "recv") if op.to_heads else ("recv", "send")
            found[Stage(op.lane, op.send.tensor, by_tokens)] = pieces
            if not goes_in_place(op, problem, unsummed):
                found[Stage(op.lane, op.send.tensor, other)] = pieces
        elif isinstance(op, Pass) and (sent := op.send):
            casts = problem.needs_cast(sent.tensor, summed=sent not in unsummed)
            if op.against or casts:
                found[Stage(op.lane, sent.tensor, "pass")] = wire_form(problem, sent.tensor)
    return found


def wire_form(problem: Problem, tensor: str) -> tuple[Buffer, ...]:
    """Shapes and dtypes in which a chunk travels."""
    return tuple((problem.field_shape(f), problem.field_dtype(f, wire=True)) for f in FIELDS[tensor])
