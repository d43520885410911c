"""The messages of a transfer: senders, receivers, and bytes by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sp_bench.plan.cast_rows import rows_moved
from sp_bench.plan.demand import Wanted
from sp_bench.plan.groups import Exchange, Group
from sp_bench.plan.ops import AllToAll, Collective, GroupCast, Pass, RowCollective, Transfer, TreeReduce
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Field, Kind


def peers(op: Transfer) -> list[tuple[Group | Exchange, int]]:
    """(group, shift) of each message of a transfer, in order: every rank sends it `shift` ahead in `group`.

    A collective counts as a message to each other member. Which way its bytes take on a network is that network's
    algorithm (cluster.collectives); it sends as many.
    """
    if isinstance(op, RowCollective):
        way = -1 if isinstance(op, GroupCast) else 1
        return [(op.group, way * op.shift(u)) for u in op.members]
    if isinstance(op, TreeReduce):
        return [(each.group, each.shift) for each in op.rounds]
    if isinstance(op, Collective):
        return [(op.group, shift) for shift in range(1, op.group.size)]
    return [(op.group, op.shift)]


def messages(op: Transfer, problem: Problem, rank, wanted: Wanted | None = None) -> list[Mapping[str, Any]]:
    """Bytes by field of each message that `rank` (one or an array) sends in one transfer, in the order of `peers`.

    The messages of a transfer are concurrent, or one collective; those of a TreeReduce follow one another. A rank that
    is its own peer sends 0 bytes, and nothing is sent to a rank that doesn't want it: `wanted` is the transfer's
    `demand`, None if all ranks do.
    """
    if isinstance(op, AllToAll):
        sizes = []
        for group, shift in peers(op):
            tokens = problem.shards_of(op.recv.tensor).tokens(rank if op.to_heads else group.member(rank, shift))
            sizes.append({f.name: tokens * problem.token_bytes(f, wire=True) for f in by_heads(op)})
        return sizes
    if isinstance(op, RowCollective):
        sizes = problem.sent_bytes(op.tensor).items()
        return [{name: rows * size for name, size in sizes} for rows in rows_moved(op, problem, rank)]
    if isinstance(op, Collective):
        # The library wants equal pieces: shorter chunks are padded to the longest, which usually has a token more.
        piece = {f.name: problem.field_bytes(f, wire=True) for f in op.tensor.fields}
        if isinstance(op, TreeReduce):
            return [{name: each.owners * size for name, size in piece.items()} for each in op.rounds]
        return [piece] * (op.group.size - 1)
    target = op.target(rank, problem.n)
    moves = target != rank if isinstance(op.group, Exchange) else True
    if wanted is not None:
        moves = moves * wanted.there[target]
    in_runs = None if wanted is None or wanted.rows is None else moves * wanted.rows.counts(target)
    whole = moves * _rows_sent(op, problem, rank) if in_runs is None or op.tensor.has_statistics else 0
    rows = {f.name: whole if in_runs is None or f.kind is Kind.STATISTIC else in_runs for f in op.tensor.fields}
    return [{name: rows[name] * size for name, size in problem.sent_bytes(op.tensor).items()}]


def _rows_sent(op: Pass, problem: Problem, rank):
    """How many tokens of its chunk each of one or an array of ranks sends."""
    if op.against is None:
        return _chunk_rows(op, problem, rank)
    return problem.blocks.count_seen(problem.blocks.of(*op.seen_by(rank, problem.n)))


def _chunk_rows(op: Pass, problem: Problem, rank):
    """How many tokens the chunks have that one or an array of ranks sends, or sends some of."""
    return problem.field_tokens(op.send.tensor.fields[0], 0 if problem.is_even else op.send.owner(rank, problem.n))


def share_sent(op: Pass, problem: Problem, rank):
    """The share of its chunk's tokens that each of one or an array of ranks sends."""
    return _rows_sent(op, problem, rank) / _chunk_rows(op, problem, rank)


def rows_sent(op: Pass, problem: Problem, rank: int) -> range:
    """The tokens of its chunk that one rank sends, as indices in the chunk."""
    if op.against is None:
        return range(problem.field_tokens(op.send.tensor.fields[0], op.send.owner(rank)))
    return problem.blocks.rows_seen[problem.blocks.of(*op.seen_by(rank, problem.n))]


def by_heads(op: AllToAll) -> tuple[Field, ...]:
    """The fields that an AllToAll moves, by heads."""
    return op.recv.tensor.by_heads.fields


def piece_bytes(problem: Problem, field: Field) -> int:
    """Wire bytes of one piece of an all-to-all: one rank's heads of the tokens of the rank that owns most."""
    return problem.shards_of(field).most * problem.token_bytes(field, wire=True)


def adds_up(op: AllToAll, problem: Problem, field: Field) -> bool:
    """Whether the owner sums a field from several ranks, because they share a key head."""
    heads = problem.padded_kv_heads if field.of_keys else problem.padded_heads
    return not op.to_heads and problem.field_heads(field) * op.group.size > heads
