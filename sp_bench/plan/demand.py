"""Demand: which transfers of a plan carry something that its receiver needs.

A plan is the same on all ranks, but under a pack of documents many blocks of it are empty. A received chunk is wanted
where a later block of the receiver sees it, or the receiver sends it on to a rank that wants it. A partial is wanted
where a block has been folded into it. What is not wanted is neither sent nor folded, except by collectives.

Each pack asks anew, of thousands of operations. A set of ranks is therefore a whole number with a bit for each, and a
plan is walked as a program of small numbers (Program), which all packs share. Which rows of a chunk go to a rank
that wants some is found the same way, in arrays (plan.row_runs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from sp_bench.plan.block_classes import BlockClasses, block_classes
from sp_bench.plan.groups import Exchange, Group
from sp_bench.plan.memo import keep
from sp_bench.plan.ops import (
    AllGather,
    AllToAll,
    Block,
    Bundle,
    Chunk,
    Fold,
    GroupCast,
    GroupReduce,
    Pass,
    Plan,
    ReduceScatter,
    Transfer,
)
from sp_bench.plan.problem import Problem
from sp_bench.plan.row_runs import Rows, row_runs


class Wanted(NamedTuple):
    """The ranks that a Pass or a Fold has something for."""

    there: np.ndarray
    """On which ranks it has something to receive or to fold: (n,) of bool."""
    rows: Rows | None = None
    """The rows that each rank receives, of all but statistics (plan.row_runs); None for whole chunks."""


Demand = Mapping[int, Wanted]
"""By operation. Others have something to receive or to fold on all ranks, and whole chunks."""
Ranks = int
"""A set of ranks: bit r is set for rank r."""
Move = tuple[tuple[int, Ranks], ...]
"""The ranks that a transfer reaches, as (shift, ranks): the peer of each of these ranks is `shift` above it."""

ALL: Demand = MappingProxyType({})


def demand(plan: Plan, problem: Problem) -> Demand:
    """On which ranks each Pass and Fold of a plan is wanted, cached; empty where the mask has all of them sent."""
    return ALL if problem.mask.sends_unseen else _found(plan, problem).demand


def untouched_partials(plan: Plan, problem: Problem, *, compute: bool = True) -> Mapping[Chunk, np.ndarray]:
    """The partials that ranks send although nothing has come to them, as neutral elements, and which ranks do: (n,).

    Their blocks see nothing under the mask, or are left out (without `compute`).
    """
    demand = _found(plan, problem)
    if demand.wanted or demand.visible.differs:
        return demand.untouched(compute=compute)
    known = _UNTOUCHED.setdefault(plan, {})  # the same of every such problem
    if compute not in known:
        known[compute] = demand.untouched(compute=compute)
    return known[compute]


class _Block(NamedTuple):
    row: int
    """Its place among all blocks of the plan."""
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class _Pass(NamedTuple):
    send: int
    recv: int
    partial: bool
    onward: Move
    back: Move


class _Collective(NamedTuple):
    gathers: int
    """The chunk that is sent where it is there; -1 for a reduction."""
    reduces: int
    """The chunk that arrives, of a reduction; -1 otherwise."""


class _Fold(NamedTuple):
    part: int
    into: int


class _Bundle(NamedTuple):
    parts: tuple[int, ...]
    into: int


class _Sent(NamedTuple):
    """A transfer, as it concerns partials."""

    is_pass: bool
    onward: Move
    partials: tuple[int, ...]
    """Those that it sends, whether anything has come to them or not."""
    writes: tuple[int, ...]


_Op = tuple[_Block, ...] | _Pass | _Collective | _Fold | _Bundle
_OfPartials = tuple[_Block, ...] | _Sent | _Fold


@dataclass(frozen=True, eq=False)
class Program:
    """A plan's operations with numbers in the place of chunks."""

    n: int
    chunks: tuple[Chunk, ...]
    """The chunk of each number."""
    ops: tuple[tuple[int, _Op], ...]
    """By index. Operations that neither ask for a chunk nor fill one are left out."""
    partials: tuple[tuple[int, _OfPartials], ...]
    """By index, as they concern what partials have in them."""
    starts_with: tuple[int, ...]
    kept: frozenset[int]

    @property
    def everyone(self) -> Ranks:
        """The set of all ranks."""
        return (1 << self.n) - 1


_PROGRAMS: WeakKeyDictionary[Plan, Program] = WeakKeyDictionary()


def _program(plan: Plan) -> Program:
    if plan in _PROGRAMS:
        return _PROGRAMS[plan]
    numbers, moves, rows = dict[Chunk, int](), dict[tuple[Group | Exchange, int], Move](), 0
    ops, partials = list[tuple[int, _Op]](), list[tuple[int, _OfPartials]]()

    def number(chunk: Chunk) -> int:
        return numbers.setdefault(chunk, len(numbers))

    def several(chunks: Sequence[Chunk]) -> tuple[int, ...]:
        return tuple([number(chunk) for chunk in chunks])

    def move(op: Pass, way: int) -> Move:
        key = op.group, way * op.shift
        if key not in moves:
            moves[key] = _move(plan.n, *key)
        return moves[key]

    for index, op in plan:
        if isinstance(op, Block):
            blocks = [(several((block.q, block.kv)), several(block.writes)) for block in op.blocks]
            done = tuple([_Block(row, *block) for row, block in enumerate(blocks, rows)])
            rows += len(done)
            ops.append((index, done))
            partials.append((index, done))
        elif isinstance(op, Transfer):
            if isinstance(op, Pass):
                onward = move(op, 1)
                ends = number(op.send), number(op.recv)
                ops.append((index, _Pass(*ends, op.tensor.is_partial, onward, move(op, -1))))
            elif isinstance(op, AllToAll | AllGather | GroupCast):  # what is there is sent
                onward = ()
                ops.append((index, _Collective(number(op.reads[0]), -1)))
            else:
                onward = ()
                arrives = number(op.writes[0]) if isinstance(op, ReduceScatter | GroupReduce) else -1
                ops.append((index, _Collective(-1, arrives)))
            # A GroupReduce sends rows that there are.
            sent = [chunk for chunk in op.reads if chunk.tensor.is_partial and not isinstance(op, GroupReduce)]
            partials.append((index, _Sent(isinstance(op, Pass), onward, several(sent), several(op.writes))))
        elif isinstance(op, Fold):
            fold = _Fold(number(op.part), number(op.into))
            ops.append((index, fold))
            partials.append((index, fold))
        else:
            if isinstance(op, Bundle):
                ops.append((index, _Bundle(several(op.parts), number(op.into))))
            partials.append((index, _Sent(False, (), (), several(op.writes))))
    starts, kept = several(plan.starts_with), frozenset(several(plan.kept))
    _PROGRAMS[plan] = program = Program(plan.n, tuple(numbers), tuple(ops), tuple(partials), starts, kept)
    return program


def _move(n: int, group: Group | Exchange, shift: int) -> Move:
    ranks = np.arange(n)
    away = group.member(ranks, shift) - ranks
    return tuple((by, _bits(away == by)) for by in (np.flatnonzero(np.bincount(away + n)) - n).tolist())


def _bits(there: np.ndarray) -> Ranks:
    return int.from_bytes(np.packbits(there, bitorder="little").tobytes(), "little")


def _peers(ranks: Ranks, move: Move) -> Ranks:
    """The ranks whose peers are among `ranks`."""
    peers = 0
    for by, of in move:
        peers |= (ranks >> by if by >= 0 else ranks << -by) & of
    return peers


@dataclass(frozen=True, eq=False)
class Visible:
    """Whether the blocks of operations have anything to compute on each rank."""

    classes: BlockClasses
    sees: np.ndarray
    """Whether anything is visible, by class of block (BlockClasses.by_number)."""

    @cached_property
    def differs(self) -> bool:
        """Whether any block has nothing to compute on any rank."""
        return not self.sees[self.classes.there].all()

    @cached_property
    def ranks(self) -> Sequence[Ranks]:
        """The ranks that have anything to compute of each block, in the order of operations."""
        blocks, n = self.classes.of.shape
        if not self.differs:
            return [(1 << n) - 1] * blocks
        packed, width = np.packbits(self.sees[self.classes.of], axis=1, bitorder="little").tobytes(), -(-n // 8)
        return [int.from_bytes(packed[i * width : (i + 1) * width], "little") for i in range(blocks)]


@dataclass(frozen=True, eq=False)
class _Found:
    """The transfers and folds of a plan that are wanted under one mask."""

    program: Program
    visible: Visible
    wanted: Mapping[int, Ranks]
    """Demand, as sets of ranks."""
    rows: Mapping[int, Rows]
    """The rows that a Pass carries (row_runs)."""

    @cached_property
    def demand(self) -> Demand:
        there = _arrays(self.program.n, [*self.wanted.values()])
        return {index: Wanted(ranks, self.rows.get(index)) for index, ranks in zip(self.wanted, there, strict=True)}

    def untouched(self, *, compute: bool) -> Mapping[Chunk, np.ndarray]:
        everyone, ranks, kept = self.program.everyone, self.visible.ranks, self.program.kept
        touched, sending = dict.fromkeys(self.program.starts_with, everyone), dict[int, Ranks]()
        for index, op in self.program.partials:
            if isinstance(op, _Sent):
                wanted = self.wanted.get(index) if op.is_pass else None
                sends = everyone if wanted is None else _peers(wanted, op.onward)
                for chunk in op.partials:
                    bits = touched.get(chunk, 0)
                    sending[chunk] = sending.get(chunk, 0) | (sends & ~bits)
                    touched[chunk] = bits if chunk in kept else 0
                for chunk in op.writes:
                    touched[chunk] = everyone
            elif isinstance(op, _Fold):
                folded = self.wanted.get(index, everyone) if compute else 0
                touched[op.into] = touched.get(op.into, 0) | folded
            elif compute:
                for block in op:
                    for chunk in block.writes:
                        touched[chunk] = touched.get(chunk, 0) | ranks[block.row]
        sent = {self.program.chunks[chunk]: ranks for chunk, ranks in sending.items() if ranks}
        return dict(zip(sent, _arrays(self.program.n, [*sent.values()]), strict=True))


_CACHE: WeakKeyDictionary[Plan, dict[Problem, _Found]] = WeakKeyDictionary()
_UNTOUCHED: WeakKeyDictionary[Plan, dict[bool, Mapping[Chunk, np.ndarray]]] = WeakKeyDictionary()


def _found(plan: Plan, problem: Problem) -> _Found:
    by_problem = _CACHE.setdefault(plan, {})
    if problem not in by_problem:
        program = _program(plan)
        classes = block_classes(plan, problem)
        visible = Visible(classes, classes.by_number(np.asarray(problem.blocks.computes)))
        if problem.mask.sends_unseen:
            wanted, rows = {}, {}
        else:
            wanted = _of_partials(program, visible) | _of_operands(program, visible)
            rows = row_runs(plan, problem, classes)
        keep(by_problem, problem, _Found(program, visible, wanted, rows))
    return by_problem[problem]


def _arrays(n: int, each: Sequence[Ranks]) -> np.ndarray:
    """Sets of ranks as (sets, n) of bool."""
    width = -(-n // 8)
    packed = np.frombuffer(b"".join(ranks.to_bytes(width, "little") for ranks in each), np.uint8)
    return np.unpackbits(packed.reshape(-1, width), axis=1, count=n, bitorder="little").view(bool)


def _of_operands(program: Program, visible: Visible) -> dict[int, Ranks]:
    """The ranks that want each received chunk of q, kv and the like, from the last operation back to the first."""
    ranks, wanted_by, wanted = visible.ranks, dict[int, Ranks](), [0] * len(program.chunks)
    for index, op in reversed(program.ops):
        if isinstance(op, _Pass):
            if not op.partial:
                wanted_by[index], wanted[op.recv] = wanted[op.recv], 0
                wanted[op.send] |= _peers(wanted_by[index], op.onward)
        elif isinstance(op, _Bundle):
            for part in op.parts:
                wanted[part] |= wanted[op.into]
        elif isinstance(op, _Collective):
            if op.gathers >= 0:
                wanted[op.gathers] = program.everyone
        elif not isinstance(op, _Fold):
            for block in op:
                for chunk in block.reads:
                    wanted[chunk] |= ranks[block.row]
    return wanted_by


def _of_partials(program: Program, visible: Visible) -> dict[int, Ranks]:
    """The ranks that receive, and fold, a partial that something was folded into, in plan order."""
    ranks, wanted_by, filled = visible.ranks, dict[int, Ranks](), [0] * len(program.chunks)
    for index, op in program.ops:
        if isinstance(op, _Pass):
            if op.partial:
                filled[op.recv] = wanted_by[index] = _peers(filled[op.send], op.back)
                filled[op.send] = 0
        elif isinstance(op, _Collective):
            if op.reduces >= 0:
                filled[op.reduces] = program.everyone
        elif isinstance(op, _Fold):
            wanted_by[index], filled[op.part] = filled[op.part], 0
            filled[op.into] |= wanted_by[index]
        elif not isinstance(op, _Bundle):
            for block in op:
                for chunk in block.writes:
                    filled[chunk] |= ranks[block.row]
    return wanted_by
