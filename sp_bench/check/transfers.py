"""The rules of transfers: each brings what the plan says that it brings, from where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from sp_bench.check.facts import (
    NOTHING,
    Cast,
    Facts,
    Ranks,
    Where,
    check_all_rows,
    check_place,
    check_slice,
    check_whole,
    first_rank,
)
from sp_bench.plan.demand import Wanted
from sp_bench.plan.groups import Exchange, Grid, Group
from sp_bench.plan.ops import (
    AllGather,
    AllToAll,
    GroupCast,
    GroupReduce,
    Op,
    Pass,
    PlanError,
    ReduceScatter,
    RowCollective,
    TreeReduce,
    relays,
)
from sp_bench.plan.tensors import DKV, DO, DOQ, DQ, KV, ODOQ, OUT, O, Q, Tensor


def _pass(facts: Facts, op: Pass, where: Where | str, demanded: Wanted | None) -> None:
    if op.shift % (2 if isinstance(op.group, Exchange) else op.group.size) == 0:
        raise PlanError(f"{where}: a rank can't send to itself")
    check_slice(facts, where, (op.send, op.recv))
    if op.send.tensor != op.recv.tensor:
        raise PlanError(f"{where}: sends {op.send.tensor} where the peer receives {op.recv.tensor}")
    check_whole(facts, (op.send,), where)
    partial = op.send.tensor.is_partial
    if partial and op.send in facts.kept:
        raise PlanError(f"{where}: sends {op.send} on, which is kept")
    if partial != op.recv.is_arriving:
        raise PlanError(f"{where}: {op.recv} is {'not ' if partial else ''}a buffer for arriving partials")
    if op.recv in facts.blocks and facts.blocks[op.recv].any():
        raise PlanError(f"{where}: {op.recv} is received over one that was not folded yet")
    source, wanted = facts.source(op), demanded and demanded.there
    if not partial:
        check_place(facts, op.send, where, True if wanted is None else wanted[op.target(facts.ranks)])
    arrived = facts.content[op.send][source]
    facts.content[op.recv] = arrived if wanted is None else np.where(wanted, arrived, NOTHING)
    check_place(facts, op.recv, where, True if wanted is None else wanted)
    if demanded is not None and not partial:
        _operand_passed(facts, op, source, demanded, where)
    if facts.leaves_out:
        _rows_passed(facts, op, source, where)
    if partial:
        facts.blocks[op.recv] = facts.blocks.pop(op.send)[source]
        if wanted is not None and (rank := first_rank(~wanted & facts.blocks[op.recv].any(axis=1))) is not None:
            raise PlanError(f"{where}: rank {source[rank]} has blocks of {op.send} that are not sent")
        facts.content[op.recv] = facts.owner(op.recv)
        facts.last[op.recv] = where
        if facts.cuts_rows:
            _partial_passed(facts, op, source, demanded, where)


def _operand_passed(facts: Facts, op: Pass, source: Ranks, wanted: Wanted, where: Where | str) -> None:
    """Record which run of rows of an operand arrives. Its sender must have it."""
    if wanted.rows is None and op.send not in facts.runs:
        facts.runs.pop(op.recv, None)
        return
    whole = facts.whole_run(op.send)
    arriving = (wanted.rows or whole.at(source)).where(wanted.there)
    held = facts.runs.get(op.send, whole).at(source)
    if (rank := first_rank(~arriving.within(held))) is not None:
        raise PlanError(f"{where}: on rank {source[rank]}, {op.send} lacks rows that are to be sent")
    facts.runs[op.recv] = arriving


def _partial_passed(facts: Facts, op: Pass, source: Ranks, wanted: Wanted | None, where: Where | str) -> None:
    """Record which rows of a partial arrive. All that anything was added to must be among those that are sent."""
    held = facts.take_run(op.send).at(source)
    if wanted is not None and wanted.rows is not None:
        right = held.within(wanted.rows.where(wanted.there))
        if (rank := first_rank(~right)) is not None:
            raise PlanError(f"{where}: on rank {source[rank]}, {op.send} has rows that stay behind")
    facts.runs[op.recv] = held


def _rows_passed(facts: Facts, op: Pass, source: Ranks, where: Where | str) -> None:
    """Record which rows arrive. The sender must have every row it sends, and send every row of a partial it has."""
    if op.against is None and op.send not in facts.rows:  # all rows come, and all are there
        facts.rows.pop(op.recv, None)
        return
    held = arriving = facts.rows_of(op.send)
    sent = facts.all_rows(op.send)
    if op.against is not None:
        if op.against.tensor not in (KV, KV.by_heads) or op.send.tensor not in (Q, ODOQ, O, DQ):
            raise PlanError(f"{where}: no rows of {op.send} can be left out against {op.against}")
        sent = arriving = facts.rows_seen(*op.seen_by(facts.ranks))
    if op.send.tensor.is_partial:
        right, what = held.within(sent), "has rows that stay behind"
        facts.rows.pop(op.send, None)
    else:
        right, what = sent.within(held), "lacks rows that are to be sent"
    if (rank := first_rank(~right)) is not None:
        raise PlanError(f"{where}: on rank {rank}, {op.send} {what}")
    facts.rows[op.recv] = arriving.at(source)


_EXCHANGED = {t: t.by_heads for t in (Q, KV, DO)} | {O.by_heads: OUT, DQ.by_heads: DQ, DKV.by_heads: DKV}
"""The tensor that an all-to-all makes of each tensor that one may send."""


def _all_to_all(facts: Facts, op: AllToAll, where: Where | str) -> None:
    degree, ranks = facts.problem.layout.head_parallel, facts.ranks
    if op.group != Group(1, degree):
        raise PlanError(f"{where}: heads are split among {degree} consecutive ranks, not among {op.group}")
    own = all((chunk.owner(ranks) == ranks).all() for chunk in (op.send, op.recv))
    if _EXCHANGED.get(op.send.tensor) != op.recv.tensor or not own or op.recv.is_arriving:
        raise PlanError(f"{where}: exchanges {op.send} to {op.recv}")
    check_slice(facts, where, (op.send, op.recv))
    check_all_rows(facts, op.send, where)
    facts.content[op.recv] = ranks
    if op.send.tensor.is_partial:
        if op.recv in facts.blocks:
            raise PlanError(f"{where}: {op.recv} is there already")
        sets = facts.partial(op.send).reshape(-1, degree, facts.blocks[op.send].shape[1])
        # A block is done for all heads once every member has done it for its own heads.
        facts.blocks[op.recv] = np.repeat(np.bitwise_and.reduce(sets, axis=1), degree, axis=0)
        facts.last[op.recv] = where
        if op.send not in facts.kept:
            del facts.blocks[op.send]


def _home_of_all(op: AllGather | ReduceScatter | RowCollective, where: Where | str) -> None:
    relayed = isinstance(op, RowCollective) and relays(op.own) > 1
    homes = Group | Grid if isinstance(op, RowCollective) else Group
    lies = isinstance(op.own.home, homes) and (relayed or not op.own.index) and not op.own.is_arriving
    if not lies or op.own.home.size < 2:
        raise PlanError(f"{where}: {op.own} is not a rank's own chunk among those of its group")


def _all_gather(facts: Facts, op: AllGather, where: Where | str) -> None:
    _home_of_all(op, where)
    if op.tensor.is_partial:
        raise PlanError(f"{where}: gathers partials")
    check_slice(facts, where, (op.own,))
    check_place(facts, op.own, where)
    check_all_rows(facts, op.own, where)
    for u, chunk in enumerate(op.writes, 1):
        facts.of_rows.pop(chunk, None)
        facts.runs.pop(chunk, None)
        facts.content[chunk] = facts.content[op.own][op.group.member(facts.ranks, u)]
        facts.rows.pop(chunk, None)
        check_place(facts, chunk, where)


def _group_cast(facts: Facts, op: GroupCast, where: Where | str) -> None:
    _rows_of_members(facts, op, where, KV if op.pairs != "queries" else Q if op.forward else DOQ)
    check_place(facts, op.own, where)
    check_all_rows(facts, op.own, where)
    if op.own.index:  # it passes on what came of rows for all, which these ranks' queries are among
        _relayed(facts, op, where)
    for u, chunk in zip(op.members, op.writes, strict=True):
        facts.content[chunk] = facts.content[op.own][op.group.member(facts.ranks, op.shift(u))]
        facts.of_rows[chunk] = Cast(op.against, op.pairs)
        facts.runs.pop(chunk, None)
        facts.rows.pop(chunk, None)
        check_place(facts, chunk, where)


def _rows_of_members(facts: Facts, op: RowCollective, where: Where | str, tensor: Tensor) -> None:
    """It must be of a tensor, of members other than the rank itself, and rows that the rank's own queries see, or that
    see its own keys.
    """
    _home_of_all(op, where)
    if op.tensor.by_tokens is not tensor or op.against.tensor.of_keys == op.tensor.of_keys:
        raise PlanError(f"{where}: {op.tensor} has no rows against {op.against} for a {type(op).__name__}")
    if op.pairs != "all" and not isinstance(op.own.home, Group):
        raise PlanError(f"{where}: where queries travel, rows come straight from their owner")
    if not op.members or len({op.shift(u) % op.group.size for u in op.members} - {0}) < len(op.members):
        raise PlanError(f"{where}: the members {op.members} are not others of {op.group.size}, each once")
    if isinstance(op.own.home, Grid):
        _along_a_ring(facts, op, where)
    if op.against.index or (facts.owner(op.against) != facts.ranks).any():
        raise PlanError(f"{where}: {op.against} is not the rank's own")
    check_slice(facts, where, (op.own,))


def _along_a_ring(facts: Facts, op: RowCollective, where: Where | str) -> None:
    """All members must be on one ring of the Grid, whose inner ring is of neighbouring chunks, as rows for all of it
    are found.
    """
    home, degree = op.own.home, facts.problem.layout.head_parallel
    assert isinstance(home, Grid)
    outward = {(u - op.own.index) % home.inner.size for u in op.members} == {0}
    inward = {u // home.inner.size for u in op.members} == {op.own.index // home.inner.size}
    if not inward and (op.own.index or not outward):
        raise PlanError(f"{where}: the members {op.members} are not on one ring of {op.own}")
    aligned = home.inner.stride == degree and home.outer.stride == degree * home.inner.size
    if not aligned or home.exchange or home.own_last:
        raise PlanError(f"{where}: {home.inner} is not a ring of neighbours that get rows together")


def _relayed(facts: Facts, op: RowCollective, where: Where | str) -> None:
    held = facts.of_rows.get(op.own)
    if held is None or not held.agrees(op.against, op.pairs):
        raise PlanError(f"{where}: of {op.own} the rows were not cast that {op.against} sees")


def _group_reduce(facts: Facts, op: GroupReduce, where: Where | str) -> None:
    _rows_of_members(facts, op, where, DKV if op.pairs != "queries" else O if op.forward else DQ)
    if op.own.index:
        _relayed(facts, op, where)
    for chunk in op.reads:
        held = facts.of_rows.pop(chunk, None)
        if held is None or not held.agrees(op.against, op.pairs):
            raise PlanError(f"{where}: {chunk} is not of the rows that were cast against {op.against}")
    _reduced(facts, op, op.members, where)
    if op.own.index:
        facts.of_rows[op.writes[0]] = Cast(op.against, op.pairs)


def _reduce_scatter(facts: Facts, op: ReduceScatter, where: Where | str) -> None:
    _home_of_all(op, where)
    check_whole(facts, op.reads, where)
    _reduced(facts, op, range(1, op.group.size), where)


def _tree_reduce(facts: Facts, op: TreeReduce, where: Where | str) -> None:
    """Its rounds must bring the partials of all ranks to their owners, each once.

    All ranks send the same places, so that what a rank lets go of in a round is merged where the receiver still has its
    own, and goes on from there.
    """
    if op.group.size % op.inner:
        raise PlanError(f"{where}: {op.inner} ranks of {op.group.size} reduce among themselves first")
    _reduce_scatter(facts, op, where)
    held = np.ones(op.group.size, int)
    """By place, how many ranks' partials a rank has merged: of all alike."""
    for each in op.rounds:
        sent = slice(each.first, each.first + each.owners)
        target = each.group.member(facts.ranks, each.shift)
        for place in (each.first, each.first + each.owners - 1):
            place_of = op.place(target, op.owner(facts.ranks, place))
            if (rank := first_rank(place_of != place - each.first)) is not None:
                raise PlanError(
                    f"{where}: rank {rank} sends {place} places ahead, which is {place_of[rank]} from there"
                )
        if not held[sent].all() or each.owners > each.first:
            raise PlanError(f"{where}: sends what is no longer there, in {each}")
        held[: each.owners] += held[sent]
        held[sent] = 0
    if held[0] != op.group.size or held[1:].any():
        raise PlanError(f"{where}: owners get {held[0]} of {op.group.size} partials")


def _reduced(facts: Facts, op: ReduceScatter | GroupReduce, members: Iterable[int], where: Where | str) -> None:
    """The partials of the members, #u, come to the owner."""
    (arriving,) = op.writes
    if not op.tensor.is_partial:
        raise PlanError(f"{where}: {op.tensor} is no partial")
    if kept := [chunk for chunk in op.reads if chunk in facts.kept]:
        raise PlanError(f"{where}: sends {kept[0]} on, which is kept")
    if arriving in facts.blocks and facts.blocks[arriving].any():
        raise PlanError(f"{where}: {arriving} is received over one that was not folded yet")
    check_slice(facts, where, (op.own,))
    facts.blocks.pop(arriving, None)
    total = facts.partial(arriving)
    for u, chunk in zip(members, op.reads, strict=True):
        # What the owner gets from the rank `u` behind it, which has it as its own #u.
        behind = op.shift(u) if isinstance(op, RowCollective) else u
        part = facts.blocks.pop(chunk)[op.group.member(facts.ranks, -behind)]
        facts.rows.pop(chunk, None)
        if (rank := first_rank((total & part).any(axis=1))) is not None:
            raise PlanError(f"{where}: on rank {rank}, a block of {op.own} comes from two ranks")
        total |= part
    facts.rows.pop(arriving, None)
    facts.last[arriving] = where


RULES: dict[type[Op], Callable] = {
    Pass: _pass,
    GroupCast: _group_cast,
    GroupReduce: _group_reduce,
    AllToAll: _all_to_all,
    AllGather: _all_gather,
    ReduceScatter: _reduce_scatter,
    TreeReduce: _tree_reduce,
}
"""The rule of each kind of transfer. That of a Pass gets the rows that are wanted of it, too."""
