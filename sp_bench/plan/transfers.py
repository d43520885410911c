"""What a transfer moves: from whom to whom, and how many bytes of which field."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sp_bench.plan.groups import Exchange, Group
from sp_bench.plan.layout import Part
from sp_bench.plan.ops import AllToAll, Pass, Transfer
from sp_bench.plan.problem import FIELDS, Field, Problem


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
