"""Prove a plan for all ranks at once, without running it.

The check executes the plan on facts instead of tensors. For each chunk on each rank it tracks whose tokens the chunk
holds and which of their rows, and for a partial, the set of blocks folded into it. It proves:

    each send meets its receive, of the same tensor           (with backward-only waits: no deadlock: plan.schedule)
    nothing is read before it has arrived
    a chunk is what the index map says it is                   (Mesh paper, table 1; see Chunk)
    each unmasked Q-KV block is computed exactly once
    a transfer leaves out no row that a block reads
    each partial is folded exactly once, and each output and gradient ends complete at its owner, for all its heads

Sets are exact, one bit per (rank, chunk) pair; n = 4096 takes seconds. A chunk by heads (q_h) has the owner's heads and
the tokens of all ranks that share the owner's layout chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import gcd
from typing import NamedTuple

import numpy as np

from sp_bench.plan.dataflow import dataflow
from sp_bench.plan.demand import demand
from sp_bench.plan.groups import Exchange, Grid, Group
from sp_bench.plan.ops import (
    AllGather,
    AllToAll,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    Fold,
    Fused,
    Gathered,
    GroupCast,
    GroupReduce,
    Join,
    Op,
    Pairs,
    Pass,
    Plan,
    PlanError,
    ReduceScatter,
    RowCollective,
    RowSums,
    Transfer,
    TreeReduce,
    relays,
)
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import DKV, DO, DOQ, DQ, KV, ODOQ, OUT, O, Q, Tensor
from sp_bench.plan.travel import travel

Ranks = np.ndarray
NOTHING = -1


class _Where(NamedTuple):
    """An operation of a plan, which errors name in words. A plan has thousands, and few have errors."""

    number: int
    op: Op

    def __str__(self) -> str:
        return f"operation {self.number}, {self.op}"


class Rows(NamedTuple):
    """A run of a chunk's rows on each rank: start <= row < stop, (n,) each. Empty where start >= stop."""

    start: np.ndarray
    stop: np.ndarray

    def within(self, other: Rows) -> np.ndarray:
        """Whether each rank's rows are all in `other`: (n,)."""
        return (self.start >= self.stop) | ((self.start >= other.start) & (self.stop <= other.stop))

    def around(self, other: Rows) -> Rows:
        """The shortest run on each rank that contains both."""
        start = np.where(self.start >= self.stop, other.start, np.minimum(self.start, other.start))
        start = np.where(other.start >= other.stop, self.start, start)
        stop = np.where(self.start >= self.stop, other.stop, np.maximum(self.stop, other.stop))
        return Rows(start, np.where(other.start >= other.stop, self.stop, stop))

    def where(self, there: np.ndarray) -> Rows:
        """The rows of the ranks where `there`, (n,), is true; no rows on other ranks."""
        return Rows(np.where(there, self.start, 0), np.where(there, self.stop, 0))

    def at(self, ranks: Ranks) -> Rows:
        """The rows of the given ranks, in their order."""
        return Rows(self.start[ranks], self.stop[ranks])


class _Cast(NamedTuple):
    """The way in which rows of a chunk came to a rank."""

    against: Chunk
    """The rank's own chunk that decided which rows."""
    pairs: Pairs

    def agrees(self, against: Chunk, pairs: Pairs) -> bool:
        """Whether rows came of these pairs of chunks, against the chunk of this place."""
        return self.against.place == against.place and self.pairs == pairs


@dataclass
class _Facts:
    """The tensors that every rank holds at the current operation."""

    problem: Problem
    ranks: Ranks
    content: dict[Chunk, Ranks] = field(default_factory=dict)
    """The global index of the content of each chunk, by rank, NOTHING where it was not received: (n,)."""
    rows: dict[Chunk, Rows] = field(default_factory=dict)
    """The rows of each chunk that are present on each rank; for a partial, those with a block folded in.

    A chunk that is not a key has all its rows."""
    last: dict[Chunk, _Where | str] = field(default_factory=dict)
    """The last operation that added to each partial."""
    kept: tuple[Chunk, ...] = ()
    """Chunks that the forward keeps for the backward."""
    leaves_out: bool = True
    """Whether any transfer leaves out rows that a block may read."""
    of_rows: dict[Chunk, _Cast] = field(default_factory=dict)
    """The way in which rows came of a chunk that a GroupCast brought, or of its partial."""
    blocks: dict[Chunk, np.ndarray] = field(default_factory=dict)
    """The counterpart chunks folded into a partial on each rank: (n, n / 64), one bit each (times `parts`)."""
    owners: dict[tuple[Group | Grid, int], Ranks] = field(default_factory=dict)
    sources: dict[tuple[Group | Exchange, int], Ranks] = field(default_factory=dict)
    visible: np.ndarray = field(init=False)
    """Whether a block of each class has anything unmasked: (classes,)."""
    sees_all: bool = field(init=False)
    """Whether all of them have."""
    everyone: np.ndarray = field(init=False)
    """True for each rank: (n,)."""

    def __post_init__(self) -> None:
        self.visible = np.asarray(self.problem.blocks.pairs) > 0
        self.sees_all, self.everyone = bool(self.visible.all()), np.ones(self.problem.n, bool)

    def owner(self, chunk: Chunk) -> Ranks:
        """The global index that the chunk's place gives it, by rank; the same array each time."""
        place = chunk.home, chunk.index
        if place not in self.owners:
            self.owners[place] = chunk.owner(self.ranks)
        return self.owners[place]

    def source(self, op: Pass) -> Ranks:
        """The rank from which each rank receives; the same array each time."""
        key = op.group, op.shift
        if key not in self.sources:
            self.sources[key] = op.source(self.ranks)
        return self.sources[key]

    def sees(self, q: Ranks, kv: Ranks) -> np.ndarray:
        if self.sees_all:
            return self.everyone
        return self.visible[self.problem.blocks.of(q, kv)]

    def computes(self, q: Ranks, kv: Ranks, pairs: Pairs, *, forward: bool) -> np.ndarray:
        """Ranks on which a block has anything unmasked, of pairs that its operation has to do with: (n,) of bool."""
        if pairs == "all":
            return self.sees(q, kv)
        degree = self.problem.layout.head_parallel
        travels = travel(self.problem, forward=forward).queries.travels[q // degree, kv // degree]
        return self.sees(q, kv) & (travels == (pairs == "queries"))

    @cached_property
    def _rows_seen(self) -> np.ndarray:
        return np.array([(rows.start, rows.stop) for rows in self.problem.blocks.rows_seen]).T

    def rows_seen(self, q: Ranks, kv: Ranks) -> Rows:
        """The queries that a block reads, from the first to the last."""
        return Rows(*self._rows_seen[:, self.problem.blocks.of(q, kv)])

    def partial(self, chunk: Chunk) -> np.ndarray:
        """The bit set of blocks in a partial, created empty on first use."""
        if chunk not in self.blocks:
            self.content[chunk] = self.owner(chunk)
            bits = self.problem.n * self.parts(chunk)
            self.blocks[chunk] = np.zeros((self.problem.n, -(-bits // 64)), np.uint64)
        return self.blocks[chunk]

    def rows_of(self, chunk: Chunk) -> Rows:
        """The present rows of a chunk (see `rows`)."""
        return self.rows.get(chunk) or self.all_rows(chunk)

    def all_rows(self, chunk: Chunk) -> Rows:
        """All rows of the layout chunks that hold the tokens of a chunk's content."""
        owner = self.content[chunk]
        tokens = self.problem.shards_of(chunk.tensor).chunk_tokens(owner // self.problem.layout.head_parallel)
        return Rows(np.zeros_like(owner), np.broadcast_to(tokens, owner.shape))

    def parts(self, partial: Chunk) -> int:
        """How many blocks a partial has with one counterpart: a key head's gradients have one for each query slice."""
        return self.problem.query_parts if partial.tensor.of_keys else 1

    def bit(self, counterpart: Ranks, parts: int, part: int) -> tuple[Ranks, np.ndarray]:
        """The word and the bit of a part of the block with each rank's counterpart."""
        degree = self.problem.layout.head_parallel
        place = counterpart if degree == parts == 1 else counterpart // degree * parts + part
        return place >> 6, np.uint64(1) << (place & 63).astype(np.uint64)


def check_all(plans: Mapping[str, Plan], problem: Problem) -> None:
    """Prove the plan of a forward, or those of a forward and its backward. Raises PlanError at the first error."""
    for plan in plans.values():
        check(plan, problem)
    starts = {chunk.tensor for plan in plans.values() if plan.phase == "backward" for chunk in plan.inputs}
    ends = {chunk.tensor for plan in plans.values() if plan.phase == "forward" for chunk in plan.outputs}
    if len(plans) > 1 and ODOQ in starts and O not in ends:
        raise PlanError("the backward takes odoq, whose lse the forward doesn't leave: it ends with no o")
    if len({plan.kept for plan in plans.values()}) > 1:
        kept = " and ".join(f"{', '.join(map(str, plan.kept)) or 'nothing'} ({name})" for name, plan in plans.items())
        raise PlanError(f"what the forward keeps is not what the backward takes: {kept}")


def check(plan: Plan, problem: Problem) -> None:
    """Prove one plan for every rank. Raises PlanError at the first error; its message names the operation."""
    if plan.n != problem.n:
        raise PlanError(f"the plan is for {plan.n} ranks and the problem has {problem.n}")
    _interface(plan, problem)
    dataflow(plan)
    leaves_out = problem.blocks.skips_queries and any(isinstance(op, Pass) and op.against for op in plan.ops)
    facts = _Facts(problem, np.arange(problem.n), kept=plan.kept, leaves_out=leaves_out)
    wanted = demand(plan, problem)
    for chunk in plan.starts_with:
        facts.content[chunk] = facts.owner(chunk) if chunk.index and problem.queries_everywhere else facts.ranks
        _placed(facts, chunk, "the plan's input")
    tiling = set[Group | Grid | Exchange]()
    for index, op in plan:
        where = _Where(index, op)
        _tiles(problem.n, op, where, tiling)
        if isinstance(op, Pass):
            _pass(facts, op, where, wanted.get(index))
        else:
            _RULES[type(op)](facts, op, where)
    _complete(facts, plan)


INTERFACES = {"forward": ((Q, KV), (O, OUT)), "backward": ((ODOQ, DO, Q, KV), (DQ, DKV))}
"""The inputs and outputs that each phase may have: a rank's own chunks, in all head slices."""
COMPLETE = {"forward": ((O,), (OUT,)), "backward": ((DQ, DKV),)}
"""The sets of outputs that each phase may end with."""


def _interface(plan: Plan, problem: Problem) -> None:
    inputs, outputs = INTERFACES[plan.phase]
    everywhere = problem.n if problem.queries_everywhere else 1
    for name, given, tensors in (("inputs", plan.inputs, inputs), ("outputs", plan.outputs, outputs)):
        copies = {t: everywhere if name == "inputs" and t is Q else 1 for t in tensors}
        wanted = {
            Chunk(t, u, Group(1, 1), heads=i)
            for t in tensors
            for u in range(copies[t])
            for i in range(problem.slices_of(t))
        }
        chunks = [chunk._replace(home=Group(1, 1)) for chunk in given]
        by_tensor = tuple(dict.fromkeys(chunk.tensor for chunk in given))
        count = sum(problem.slices_of(t) * copies.get(t, 1) for t in by_tensor)
        whole = len(chunks) == len(set(chunks)) == count and wanted.issuperset(chunks)
        if not whole or (name == "outputs" and by_tensor not in COMPLETE[plan.phase]):
            slices = f", each in {problem.head_slices} slices" if problem.head_slices > 1 else ""
            slices += f" ({problem.key_slices} of keys)" if problem.query_parts > 1 else ""
            raise PlanError(
                f"the plan's {name} are {', '.join(map(str, given))}: {plan.phase} has "
                f"{', '.join(f'{tensor}#0' for tensor in tensors)}{slices}"
            )
    for chunk in plan.kept:
        if chunk.index or chunk.arrival:
            raise PlanError(f"the plan keeps {chunk}: only a rank's own chunks are kept")
        if [*plan.inputs, *plan.outputs, *plan.kept].count(chunk) > 1:
            raise PlanError(f"the plan keeps {chunk} twice, or what is an input or output anyway")


def _tiles(n: int, op: Op, where: _Where | str, known: set[Group | Grid | Exchange]) -> None:
    """The groups of an operation must tile the ranks, but for those that are `known` to, which it adds to."""
    named: list[Group | Grid | Exchange] = [op.group] if isinstance(op, Transfer) else []
    named += [chunk.home for chunk in (*op.reads, *op.writes)]
    groups: list[Group | Exchange] = []
    for home in named:
        if home not in known:
            known.add(home)
            groups += [home.inner, home.outer, *filter(None, [home.exchange])] if isinstance(home, Grid) else [home]
    for group in groups:
        if n % group.span:
            raise PlanError(f"{where}: {group} doesn't tile {n} ranks")
        if isinstance(group, Group) and gcd(group.way, group.size) != 1:
            raise PlanError(f"{where}: {group} doesn't go round all its ranks")
        if isinstance(group, Exchange) and (group.low.size != group.high.size or group.high.stride % group.low.span):
            raise PlanError(f"{where}: {group} doesn't exchange two digits of a rank")


def _tensors(facts: _Facts, where: _Where | str, chunks: Sequence[Chunk], wanted: Sequence[Tensor]) -> None:
    """A block's operands must be held chunks of the wanted tensors (by heads where split), of one head slice."""
    split = facts.problem.layout.head_parallel > 1
    for chunk, tensor in zip(chunks, wanted, strict=True):
        given = tensor.by_heads if split else tensor
        if chunk.tensor not in (given, tensor.by_heads) or chunk.is_arriving:
            raise PlanError(f"{where}: {chunk} stands where a held chunk of {given} should")
    _one_slice(facts, where, chunks)


def _one_slice(facts: _Facts, where: _Where | str, chunks: Sequence[Chunk]) -> None:
    """Chunks of queries must be of one head slice, and chunks of keys of the slice of key heads that it attends to."""
    problem, queries, keys = facts.problem, set[int](), set[int]()
    if problem.head_slices == 1 and not any(chunk.heads for chunk in chunks):
        return
    for chunk in chunks:
        (keys if chunk.tensor.of_keys else queries).add(chunk.heads)
    wanted = {slice_ // problem.query_parts for slice_ in queries} or keys
    exist = queries <= set(range(problem.head_slices)) and keys <= set(range(problem.key_slices))
    if len(queries) > 1 or len(wanted | keys) > 1 or not exist:
        raise PlanError(f"{where}: mixes slices of heads, or takes one beyond {problem.head_slices}")


def _placed(facts: _Facts, chunk: Chunk, where: _Where | str, there: np.ndarray | bool = True) -> None:
    """A chunk's content must be what the index map says, on the ranks that are to have it."""
    said, content = facts.owner(chunk), facts.content[chunk]
    if content is said:
        return
    rank = _first(there & (said != content))
    if rank is not None and content[rank] == NOTHING:
        raise PlanError(f"{where}: on rank {rank}, {chunk} is needed and was not sent there")
    if rank is not None:
        raise PlanError(f"{where}: on rank {rank}, {chunk} is global chunk {content[rank]} and should be {said[rank]}")
    if there is True:
        facts.content[chunk] = said  # the next look at it takes no time


def _pass(facts: _Facts, op: Pass, where: _Where | str, wanted: np.ndarray | None) -> None:
    if op.shift % (2 if isinstance(op.group, Exchange) else op.group.size) == 0:
        raise PlanError(f"{where}: a rank can't send to itself")
    _one_slice(facts, where, (op.send, op.recv))
    if op.send.tensor != op.recv.tensor:
        raise PlanError(f"{where}: sends {op.send.tensor} where the peer receives {op.recv.tensor}")
    _whole(facts, (op.send,), where)
    partial = op.send.tensor.is_partial
    if partial and op.send in facts.kept:
        raise PlanError(f"{where}: sends {op.send} on, which is kept")
    if partial != op.recv.is_arriving:
        raise PlanError(f"{where}: {op.recv} is {'not ' if partial else ''}a buffer for arriving partials")
    if op.recv in facts.blocks and facts.blocks[op.recv].any():
        raise PlanError(f"{where}: {op.recv} is received over one that was not folded yet")
    source = facts.source(op)
    if not partial:
        _placed(facts, op.send, where, True if wanted is None else wanted[op.target(facts.ranks)])
    arrived = facts.content[op.send][source]
    facts.content[op.recv] = arrived if wanted is None else np.where(wanted, arrived, NOTHING)
    _placed(facts, op.recv, where, True if wanted is None else wanted)
    if facts.leaves_out:
        _rows_passed(facts, op, source, where)
    if partial:
        facts.blocks[op.recv] = facts.blocks.pop(op.send)[source]
        if wanted is not None and (rank := _first(~wanted & facts.blocks[op.recv].any(axis=1))) is not None:
            raise PlanError(f"{where}: rank {source[rank]} has blocks of {op.send} that are not sent")
        facts.content[op.recv] = facts.owner(op.recv)
        facts.last[op.recv] = where


def _rows_passed(facts: _Facts, op: Pass, source: Ranks, where: _Where | str) -> None:
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
    if (rank := _first(~right)) is not None:
        raise PlanError(f"{where}: on rank {rank}, {op.send} {what}")
    facts.rows[op.recv] = arriving.at(source)


_EXCHANGED = {t: t.by_heads for t in (Q, KV, DO)} | {O.by_heads: OUT, DQ.by_heads: DQ, DKV.by_heads: DKV}
"""The tensor that an all-to-all makes of each tensor that one may send."""


def _all_to_all(facts: _Facts, op: AllToAll, where: _Where | str) -> None:
    degree, ranks = facts.problem.layout.head_parallel, facts.ranks
    if op.group != Group(1, degree):
        raise PlanError(f"{where}: heads are split among {degree} consecutive ranks, not among {op.group}")
    own = all((chunk.owner(ranks) == ranks).all() for chunk in (op.send, op.recv))
    if _EXCHANGED.get(op.send.tensor) != op.recv.tensor or not own or op.recv.is_arriving:
        raise PlanError(f"{where}: exchanges {op.send} to {op.recv}")
    _one_slice(facts, where, (op.send, op.recv))
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


def _home_of_all(op: AllGather | ReduceScatter | RowCollective, where: _Where | str) -> None:
    relayed = isinstance(op, RowCollective) and relays(op.own) > 1
    homes = Group | Grid if isinstance(op, RowCollective) else Group
    lies = isinstance(op.own.home, homes) and (relayed or not op.own.index) and not op.own.is_arriving
    if not lies or op.own.home.size < 2:
        raise PlanError(f"{where}: {op.own} is not a rank's own chunk among those of its group")


def _all_gather(facts: _Facts, op: AllGather, where: _Where | str) -> None:
    _home_of_all(op, where)
    if op.tensor.is_partial:
        raise PlanError(f"{where}: gathers partials")
    _one_slice(facts, where, (op.own,))
    _placed(facts, op.own, where)
    for u, chunk in enumerate(op.writes, 1):
        facts.of_rows.pop(chunk, None)
        facts.content[chunk] = facts.content[op.own][op.group.member(facts.ranks, u)]
        facts.rows.pop(chunk, None)
        _placed(facts, chunk, where)


def _group_cast(facts: _Facts, op: GroupCast, where: _Where | str) -> None:
    _rows_of_members(facts, op, where, KV if op.pairs != "queries" else Q if op.forward else DOQ)
    _placed(facts, op.own, where)
    if op.own.index:  # it passes on what came of rows for all, which these ranks' queries are among
        _relayed(facts, op, where)
    for u, chunk in zip(op.members, op.writes, strict=True):
        facts.content[chunk] = facts.content[op.own][op.group.member(facts.ranks, op.shift(u))]
        facts.of_rows[chunk] = _Cast(op.against, op.pairs)
        facts.rows.pop(chunk, None)
        _placed(facts, chunk, where)


def _rows_of_members(facts: _Facts, op: RowCollective, where: _Where | str, tensor: Tensor) -> None:
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
    _one_slice(facts, where, (op.own,))


def _along_a_ring(facts: _Facts, op: RowCollective, where: _Where | str) -> None:
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


def _relayed(facts: _Facts, op: RowCollective, where: _Where | str) -> None:
    held = facts.of_rows.get(op.own)
    if held is None or not held.agrees(op.against, op.pairs):
        raise PlanError(f"{where}: of {op.own} the rows were not cast that {op.against} sees")


def _group_reduce(facts: _Facts, op: GroupReduce, where: _Where | str) -> None:
    _rows_of_members(facts, op, where, DKV if op.pairs != "queries" else O if op.forward else DQ)
    if op.own.index:
        _relayed(facts, op, where)
    for chunk in op.reads:
        held = facts.of_rows.pop(chunk, None)
        if held is None or not held.agrees(op.against, op.pairs):
            raise PlanError(f"{where}: {chunk} is not of the rows that were cast against {op.against}")
    _reduced(facts, op, op.members, where)
    if op.own.index:
        facts.of_rows[op.writes[0]] = _Cast(op.against, op.pairs)


def _whole(facts: _Facts, chunks: Iterable[Chunk], where: _Where | str) -> None:
    """Only a Gathered block, or a GroupReduce, can read chunks of which only some rows are there."""
    if partial := [chunk for chunk in chunks if chunk in facts.of_rows]:
        against = facts.of_rows[partial[0]].against
        raise PlanError(f"{where}: of {partial[0]} only rows are there, cast against {against}")


def _reduce_scatter(facts: _Facts, op: ReduceScatter, where: _Where | str) -> None:
    _home_of_all(op, where)
    _whole(facts, op.reads, where)
    _reduced(facts, op, range(1, op.group.size), where)


def _tree_reduce(facts: _Facts, op: TreeReduce, where: _Where | str) -> None:
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
            if (rank := _first(place_of != place - each.first)) is not None:
                raise PlanError(
                    f"{where}: rank {rank} sends {place} places ahead, which is {place_of[rank]} from there"
                )
        if not held[sent].all() or each.owners > each.first:
            raise PlanError(f"{where}: sends what is no longer there, in {each}")
        held[: each.owners] += held[sent]
        held[sent] = 0
    if held[0] != op.group.size or held[1:].any():
        raise PlanError(f"{where}: owners get {held[0]} of {op.group.size} partials")


def _reduced(facts: _Facts, op: ReduceScatter | GroupReduce, members: Iterable[int], where: _Where | str) -> None:
    """The partials of the members, #u, come to the owner."""
    (arriving,) = op.writes
    if not op.tensor.is_partial:
        raise PlanError(f"{where}: {op.tensor} is no partial")
    if kept := [chunk for chunk in op.reads if chunk in facts.kept]:
        raise PlanError(f"{where}: sends {kept[0]} on, which is kept")
    if arriving in facts.blocks and facts.blocks[arriving].any():
        raise PlanError(f"{where}: {arriving} is received over one that was not folded yet")
    _one_slice(facts, where, (op.own,))
    facts.blocks.pop(arriving, None)
    total = facts.partial(arriving)
    for u, chunk in zip(members, op.reads, strict=True):
        # What the owner gets from the rank `u` behind it, which has it as its own #u.
        behind = op.shift(u) if isinstance(op, RowCollective) else u
        part = facts.blocks.pop(chunk)[op.group.member(facts.ranks, -behind)]
        facts.rows.pop(chunk, None)
        if (rank := _first((total & part).any(axis=1))) is not None:
            raise PlanError(f"{where}: on rank {rank}, a block of {op.own} comes from two ranks")
        total |= part
    facts.rows.pop(arriving, None)
    facts.last[arriving] = where


def _bundle(facts: _Facts, op: Bundle, where: _Where | str) -> None:
    parts = Counter(part.tensor for part in op.parts)
    if op.into.tensor is not ODOQ.by_heads or parts != Counter(t.by_heads for t in (Q, O, DO)):
        raise PlanError(f"{where}: only q_h, o_h and do_h make an odoq_h")
    _one_slice(facts, where, (*op.parts, op.into))
    for part in op.parts:
        _placed(facts, part, where)
        if part in facts.blocks:
            raise PlanError(f"{where}: {part} is not known to be complete")
    facts.content[op.into] = facts.owner(op.into)
    if (rank := _first(np.any([facts.content[p] != facts.content[op.into] for p in op.parts], axis=0))) is not None:
        raise PlanError(f"{where}: on rank {rank}, the parts are of different chunks")


def _row_sums(facts: _Facts, op: RowSums, where: _Where | str) -> None:
    tensors = [chunk.tensor for chunk in (*op.parts, op.into)]
    alike = len({tensor.is_by_heads for tensor in tensors}) == 1
    if Counter(tensor.by_tokens for tensor in tensors) != Counter((ODOQ, DOQ)) or not alike:
        raise PlanError(f"{where}: only odoq makes a doq, and only doq an odoq")
    _one_slice(facts, where, (*op.parts, op.into))
    source = facts.content[op.parts[0]]
    made = source != NOTHING
    if (rank := _first(made & (facts.owner(op.into) != source))) is not None:
        raise PlanError(f"{where}: on rank {rank}, the parts are of different chunks")
    facts.content[op.into] = source
    facts.rows[op.into] = facts.rows_of(op.parts[0])


def _count_block(
    facts: _Facts, into: Chunk, counterpart: Ranks, part: int, visible: np.ndarray, where: _Where | str
) -> None:
    """Record that the block of each rank with chunk `counterpart`, or a part of it, is folded into `into`."""
    blocks = facts.partial(into)
    word, bit = facts.bit(counterpart, facts.parts(into), part)
    all_visible = visible is facts.everyone
    cells, bit = facts.ranks * blocks.shape[1] + word, bit if all_visible else np.where(visible, bit, np.uint64(0))
    old = blocks.reshape(-1)[cells]
    if (rank := _first((old & bit) != 0)) is not None:
        raise PlanError(f"{where}: on rank {rank}, block ({into}, chunk {counterpart[rank]}) is computed twice")
    blocks.reshape(-1)[cells] = old | bit
    facts.last[into] = where


def _attend(facts: _Facts, op: Attend, where: _Where | str) -> None:
    _whole(facts, op.reads, where)
    _folded(facts, op, where)


def _folded(facts: _Facts, op: Attend, where: _Where | str, pairs: Pairs = "all") -> None:
    _tensors(facts, where, (op.q, op.kv, op.o), (Q, KV, O))
    q, kv, visible = _operands(facts, op, where, pairs)
    _serves(facts, op.o, q, where)
    _rows_read(facts, op.q, op.kv, op.o, visible, where)
    _count_block(facts, op.o, kv, 0, visible, where)


def _attend_backward(facts: _Facts, op: AttendBackward, where: _Where | str) -> None:
    _whole(facts, op.reads, where)
    _folded_backward(facts, op, where)


def _folded_backward(facts: _Facts, op: AttendBackward, where: _Where | str, pairs: Pairs = "all") -> None:
    of_queries = DOQ if pairs == "queries" else ODOQ
    _tensors(facts, where, (op.odoq, op.kv, op.dq, op.dkv), (of_queries, KV, DQ, DKV))
    q, kv, visible = _operands(facts, op, where, pairs)
    _serves(facts, op.dq, q, where)
    _serves(facts, op.dkv, kv, where)
    _rows_read(facts, op.odoq, op.kv, op.dq, visible, where)
    _count_block(facts, op.dq, kv, 0, visible, where)
    _count_block(facts, op.dkv, q, op.odoq.heads % facts.problem.query_parts, visible, where)


def _fused(facts: _Facts, op: Fused, where: _Where | str) -> None:
    """Its blocks must be of one kind, and each of its query chunks must have one with each of its key chunks."""
    pairs = [(block.q, block.kv) for block in op.blocks]
    if len({type(block) for block in op.blocks}) > 1 or Counter(pairs) != Counter(product(op.queries, op.keys)):
        raise PlanError(f"{where}: is not a block of each of its query chunks with each of its key chunks")
    if len({chunk.heads for chunk in op.queries}) > 1 or len({chunk.heads for chunk in op.keys}) > 1:
        raise PlanError(f"{where}: mixes slices of heads")
    for block in op.blocks:
        _RULES[type(block)](facts, block, where)


def _gathered(facts: _Facts, op: Gathered, where: _Where | str) -> None:
    """Its keys must be the rank's own, or rows that all its queries are asked for; or its queries must be rows that see
    the rank's own keys.
    """
    by_queries = op.pairs == "queries"
    whole, parts = (op.keys, op.queries) if by_queries else (op.queries, op.keys)
    pairs = [(block.q, block.kv) for block in op.blocks]
    mixed = len({chunk.place for chunk in whole}) > 1 or len({chunk.heads for chunk in parts}) > 1
    if mixed or (by_queries and len(whole) > 1) or Counter(pairs) != Counter(product(op.queries, op.keys)):
        raise PlanError(f"{where}: is not a block of one chunk with each of those of which there are rows")
    if by_queries and op.rank_own.index:
        raise PlanError(f"{where}: {op.rank_own} is not the rank's own")
    for block in op.blocks:
        brought, own = (block.q, block.kv) if by_queries else (block.kv, block.q)
        partial = block.writes[0] if by_queries else None if isinstance(block, Attend) else block.dkv
        if brought.index or by_queries:
            rows = facts.of_rows.get(brought)
            if rows is None or not rows.agrees(own, op.pairs):
                raise PlanError(f"{where}: the rows of {brought} were not cast that {own} has to do with")
            if partial is not None:
                facts.of_rows[partial] = _Cast(own, op.pairs)
        if isinstance(block, Attend):
            _folded(facts, block, where, op.pairs)
        else:
            _folded_backward(facts, block, where, op.pairs)


def _operands(
    facts: _Facts, op: Attend | AttendBackward, where: _Where | str, pairs: Pairs
) -> tuple[Ranks, Ranks, np.ndarray]:
    """The content of a block's chunks, and where it has anything to compute: there both must have been sent."""
    q, kv = op.q, op.kv
    owners, keys = facts.owner(q), facts.owner(kv)
    visible = facts.computes(owners, keys, pairs, forward=isinstance(op, Attend))
    _placed(facts, q, where, visible)
    _placed(facts, kv, where, visible)
    return owners, keys, visible


def _rows_read(facts: _Facts, q: Chunk, kv: Chunk, partial: Chunk, visible: np.ndarray, where: _Where | str) -> None:
    """Both chunks of a block must hold the same heads, and the query chunk every row that the block reads."""
    degree, owners, keys = facts.problem.layout.head_parallel, facts.owner(q), facts.owner(kv)
    if degree > 1 and (rank := _first(owners % degree != keys % degree)) is not None:
        raise PlanError(f"{where}: on rank {rank}, {q} and {kv} have different heads")
    if not facts.leaves_out:
        return
    needed = facts.rows_seen(owners, keys).where(visible)
    if (rank := _first(~needed.within(facts.rows_of(q)))) is not None:
        raise PlanError(f"{where}: on rank {rank}, {q} lacks rows that see {kv}")
    facts.rows[partial] = needed.around(facts.rows_of(partial)) if partial in facts.blocks else needed


def _serves(facts: _Facts, partial: Chunk, chunk: Ranks, where: _Where | str) -> None:
    """The accumulator's owner must be the chunk that the block is computed for."""
    said = facts.owner(partial)
    if said is not chunk and (rank := _first(said != chunk)) is not None:
        raise PlanError(
            f"{where}: on rank {rank}, {partial} belongs to chunk {said[rank]}, the block to chunk {chunk[rank]}"
        )


def _fold(facts: _Facts, op: Fold, where: _Where | str) -> None:
    if op.part not in facts.of_rows or op.into not in facts.of_rows:  # rows are added to the same rows
        _whole(facts, (op.part, op.into), where)
    facts.of_rows.pop(op.part, None)
    if not op.part.is_arriving or op.part.tensor != op.into.tensor or op.into.is_arriving:
        raise PlanError(f"{where}: folds {op.part} into {op.into}")
    _serves(facts, op.into, facts.content[op.part], where)
    _one_slice(facts, where, (op.part, op.into))
    part = facts.blocks.pop(op.part)
    if op.part in facts.rows or op.into in facts.rows:  # otherwise both have all of them
        rows = facts.rows_of(op.part)
        facts.rows[op.into] = rows.around(facts.rows_of(op.into)) if op.into in facts.blocks else rows
    into = facts.partial(op.into)
    if (both := into & part).any():
        rank = _first(both.any(axis=1))
        raise PlanError(f"{where}: on rank {rank}, a block of {op.part} is in {op.into} already")
    into |= part
    facts.last[op.into] = where


def _join(facts: _Facts, op: Join, where: _Where | str) -> None:
    """A Join only orders operations; nothing to check."""


_RULES: dict[type[Op], Callable] = {
    Attend: _attend,
    AttendBackward: _attend_backward,
    Fused: _fused,
    Gathered: _gathered,
    GroupCast: _group_cast,
    GroupReduce: _group_reduce,
    AllToAll: _all_to_all,
    AllGather: _all_gather,
    ReduceScatter: _reduce_scatter,
    TreeReduce: _tree_reduce,
    Fold: _fold,
    Bundle: _bundle,
    RowSums: _row_sums,
    Join: _join,
}


def _complete(facts: _Facts, plan: Plan) -> None:
    """Every output must have all its blocks, and no partial may be left over."""
    degree = facts.problem.layout.head_parallel
    chunks = facts.problem.n // degree
    for chunk in plan.ends_with:
        if chunk.tensor not in (O, O.by_heads, OUT, DQ, DKV):
            continue
        blocks, parts = facts.blocks.pop(chunk), facts.parts(chunk)
        done = np.unpackbits(blocks.astype("<u8").view(np.uint8), axis=1, bitorder="little").astype(bool)
        for counterpart in range(chunks):
            mine, other = facts.ranks, np.full(facts.problem.n, counterpart * degree)
            needed = facts.sees(other, mine) if chunk.tensor == DKV else facts.sees(mine, other)
            done_all = done[:, counterpart * parts : (counterpart + 1) * parts].all(axis=1)
            if (rank := _first(needed & ~done_all)) is not None:
                raise PlanError(f"the end of the plan: {chunk} of rank {rank} lacks its block with chunk {counterpart}")
    for chunk, blocks in facts.blocks.items():
        if (rank := _first(blocks.any(axis=1))) is not None:
            raise PlanError(f"{facts.last[chunk]}: on rank {rank}, {chunk} is never sent on or folded after it")


def _first(wrong: np.ndarray | np.bool) -> int | None:
    """The lowest rank where `wrong` is true; None if there is none."""
    return int(wrong.argmax()) if wrong.any() else None
