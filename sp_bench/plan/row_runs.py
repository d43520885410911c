"""Row runs: the rows of a chunk of keys or queries, or of their partials, that go from rank to rank, where queries see
few keys.

Under a pack of documents, or a window, a rank needs some rows of a chunk, for its own blocks and for those of the ranks
that it passes the chunk on to. It gets the run of rows from the first of these to the last. The chunk lies whole in its
memory, and what is around the run is never read. Of outputs and gradients that travel, the run is that of the rows to
which any block has added something on the way. Statistics go whole, whatever the run: theirs are no neighbours in
memory, as each head's lie together, and they are few bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from sp_bench.plan.block_classes import BlockClasses
from sp_bench.plan.cells import NO_ROW
from sp_bench.plan.groups import Exchange, Group
from sp_bench.plan.ops import Block, Bundle, Chunk, Fold, Pass, Plan, Transfer
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem


class Rows(NamedTuple):
    """A run of a chunk's rows on each rank: start <= row < stop, (n,) each. Empty where start >= stop."""

    start: np.ndarray
    stop: np.ndarray

    def counts(self, ranks) -> np.ndarray:
        """How many rows each of one or an array of ranks has."""
        return np.subtract(self.stop[ranks], self.start[ranks], dtype=np.int64)

    def of(self, rank: int) -> range:
        """The rows of one rank."""
        return range(int(self.start[rank]), int(self.stop[rank]))

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

    def at(self, ranks: np.ndarray) -> Rows:
        """The rows of the given ranks, in their order."""
        return Rows(self.start[ranks], self.stop[ranks])


class _Read(NamedTuple):
    chunk: int
    row: int
    """The block's place among all blocks of the plan."""


class _Made(NamedTuple):
    """A block's partial."""

    partial: int
    row: int


class _Passed(NamedTuple):
    send: int
    recv: int
    peer: np.ndarray
    """The rank that an operand goes to, or that a partial comes from, by rank."""
    partial: bool


class _Folded(NamedTuple):
    part: int
    into: int


class _Bundled(NamedTuple):
    """A chunk that is made of the same rows of another."""

    part: int
    into: int


class _Whole(NamedTuple):
    chunk: int
    partial: bool


_Op = _Read | _Made | _Passed | _Folded | _Bundled | _Whole


class _Program(NamedTuple):
    """The operations of a plan that concern the keys, or the queries, of one slice of heads, with numbers in the place
    of chunks.
    """

    of_keys: bool
    ops: list[_Op]
    chunks: list[Chunk]
    """The chunk of each number."""
    passes: list[list[int]]
    """The operations that are its passes, of each slice of heads that has the same ones."""


@dataclass
class _Slice:
    """The program of one slice of heads as it is read."""

    ops: list[_Op] = field(default_factory=list)
    seen: list[Hashable] = field(default_factory=list)
    """All that tells it from those of other slices, beside its chunks."""
    passes: list[int] = field(default_factory=list)
    numbers: dict[Chunk, int] = field(default_factory=dict)

    def number(self, chunk: Chunk) -> int:
        """The number of a chunk."""
        return self.numbers.setdefault(chunk, len(self.numbers))

    def add(self, op: _Op, *but: Hashable) -> None:
        """Add an operation, which chunks and `but` tell from others."""
        self.ops.append(op)
        self.seen.append((type(op), *(op[:1] if isinstance(op, _Read | _Made) else op[:2]), *but))


_Slices = defaultdict[tuple[bool, int], _Slice]
"""By (whether it is of keys, the slice of heads)."""
_PROGRAMS: WeakKeyDictionary[Plan, list[_Program]] = WeakKeyDictionary()


def cuts_rows(problem: Problem) -> bool:
    """Whether a Pass carries a run of a chunk's rows: these are contiguous in a batch of one alone."""
    return isinstance(problem.blocks, PackBlocks) and problem.batch == 1 and not problem.whole_chunks


def row_runs(plan: Plan, problem: Problem, classes: BlockClasses) -> Mapping[int, Rows]:
    """By Pass, the rows of its chunk that each rank receives; none where whole chunks, or none, are passed on.

    What an operation other than a block reads, or the plan ends with, is needed whole, and what a collective brings has
    all rows.
    """
    if not cuts_rows(problem) or Pass not in plan.kinds:
        return {}
    read, found = dict[bool, np.ndarray](), dict[int, Rows]()
    for program in _programs(plan):
        if program.of_keys not in read:
            read[program.of_keys] = _read(problem, classes, of_keys=program.of_keys)
        of_side = read[program.of_keys]
        received = (
            _operands_received(program, problem, classes, of_side),
            _partials_received(program, problem, classes, of_side),
        )
        rows = _as_rows(program, *received)
        for of_slice in program.passes:
            found |= zip(of_slice, rows, strict=True)
    return found


def _read(problem: Problem, classes: BlockClasses, *, of_keys: bool) -> np.ndarray:
    """The rows of keys, or of queries, of each class of block, as (the first, minus the one behind the last): the least
    of two such pairs is around both. (2, classes).
    """
    assert isinstance(problem.blocks, PackBlocks)
    rows = problem.blocks.key_rows if of_keys else problem.blocks.query_rows
    start, stop = (classes.by_number(each) for each in rows)
    return np.stack([np.where(stop > start, start, NO_ROW), -stop])


def _operands_received(
    program: _Program, problem: Problem, classes: BlockClasses, read: np.ndarray
) -> list[np.ndarray]:
    """The rows of operands that each rank receives in each Pass of them, from the last to the first: (2, n) each, as
    `read` has those of each class of block.
    """
    needed, received, nobody = dict[int, np.ndarray](), list[np.ndarray](), _nobody(problem.n)
    for op in reversed(program.ops):
        if isinstance(op, _Read):
            _add(needed, op.chunk, read[:, classes.of[op.row]])
        elif isinstance(op, _Passed) and not op.partial:
            received.append(needed.pop(op.recv, nobody))
            _add(needed, op.send, received[-1][:, op.peer])
        elif isinstance(op, _Bundled):
            _add(needed, op.part, needed.get(op.into, nobody))
        elif isinstance(op, _Whole) and not op.partial:
            _add(needed, op.chunk, _all_rows(program.chunks[op.chunk], problem))
    return received


def _partials_received(
    program: _Program, problem: Problem, classes: BlockClasses, read: np.ndarray
) -> list[np.ndarray]:
    """The rows of partials that each rank receives in each Pass of them, in the order of the plan."""
    filled, received, nobody = dict[int, np.ndarray](), list[np.ndarray](), _nobody(problem.n)
    for op in program.ops:
        if isinstance(op, _Made):
            _add(filled, op.partial, read[:, classes.of[op.row]])
        elif isinstance(op, _Passed) and op.partial:
            filled[op.recv] = filled.pop(op.send, nobody)[:, op.peer]
            received.append(filled[op.recv])
        elif isinstance(op, _Folded):
            _add(filled, op.into, filled.pop(op.part, nobody))
        elif isinstance(op, _Whole) and op.partial:
            filled[op.chunk] = _all_rows(program.chunks[op.chunk], problem)
    return received


def _add(all_rows: dict[int, np.ndarray], chunk: int, rows: np.ndarray) -> None:
    all_rows[chunk] = np.minimum(all_rows[chunk], rows) if chunk in all_rows else rows


def _nobody(n: int) -> np.ndarray:
    return np.repeat(np.array([[NO_ROW], [0]], np.int32), n, axis=1)


def _all_rows(chunk: Chunk, problem: Problem) -> np.ndarray:
    ranks = np.arange(problem.n)
    tokens = np.broadcast_to(problem.field_tokens(chunk.tensor.fields[0], chunk.owner(ranks)), ranks.shape)
    return np.stack([np.zeros_like(tokens), -tokens]).astype(np.int32)


def _as_rows(program: _Program, of_operands: list[np.ndarray], of_partials: list[np.ndarray]) -> list[Rows]:
    """The rows of each Pass of a program."""
    operands, partials = iter(of_operands[::-1]), iter(of_partials)
    received = [next(partials if op.partial else operands) for op in program.ops if isinstance(op, _Passed)]
    if not received:
        return []
    both = np.stack(received)
    stop = -both[:, 1]
    return [Rows(*rows) for rows in zip(np.where(stop > both[:, 0], both[:, 0], 0), stop, strict=True)]


def _programs(plan: Plan) -> list[_Program]:
    """Those of keys and of queries that pass any on, of all slices of heads, of which most plans have the same for
    each.
    """
    if plan not in _PROGRAMS:
        alike = dict[Hashable, _Program]()
        for (of_keys, _), each in _slices(plan).items():
            if each.passes:
                chunks = [*each.numbers]
                like = (*each.seen, *((chunk.tensor, chunk.place, chunk.arrival) for chunk in chunks))
                alike.setdefault(like, _Program(of_keys, each.ops, chunks, [])).passes.append(each.passes)
        _PROGRAMS[plan] = [*alike.values()]
    return _PROGRAMS[plan]


def _slices(plan: Plan) -> _Slices:
    """The program of each slice of heads."""
    by_slice, rows = _Slices(_Slice), 0
    peers = dict[tuple[Group | Exchange, int], np.ndarray]()
    for index, op in plan:
        if isinstance(op, Block):
            for row, block in enumerate(op.blocks, rows):
                for chunk, other in ((block.q, block.kv), (block.kv, block.q)):
                    each = _slice_of(by_slice, chunk)
                    each.add(_Read(each.number(chunk), row), type(op), other.place)
                for chunk in block.writes:
                    each = _slice_of(by_slice, chunk)
                    each.add(_Made(each.number(chunk), row))
            rows += len(op.blocks)
        elif isinstance(op, Fold):
            each = _slice_of(by_slice, op.into)
            each.add(_Folded(each.number(op.part), each.number(op.into)))
        elif isinstance(op, Bundle):
            each = _slice_of(by_slice, op.into)
            for part in op.parts:
                each.add(_Bundled(each.number(part), each.number(op.into)))
        elif isinstance(op, Pass):
            each, partial = _slice_of(by_slice, op.recv), op.tensor.is_partial
            way = op.group, -op.shift if partial else op.shift
            if way not in peers:
                peers[way] = op.group.member(np.arange(plan.n), way[1])
            each.add(_Passed(each.number(op.send), each.number(op.recv), peers[way], partial), *way)
            each.passes.append(index)
        elif isinstance(op, Transfer):
            _add_whole(by_slice, op.reads, op.writes)
    _add_whole(by_slice, (*plan.ends_with, *plan.kept), ())
    return by_slice


def _slice_of(by_slice: _Slices, chunk: Chunk) -> _Slice:
    return by_slice[chunk.tensor.of_keys, chunk.heads]


def _add_whole(by_slice: _Slices, needed: Iterable[Chunk], made: Iterable[Chunk]) -> None:
    """Add that all rows of some operands are needed, and those of some partials filled."""
    for chunks, partial in ((needed, False), (made, True)):
        for chunk in chunks:
            if chunk.tensor.is_partial == partial:
                each = _slice_of(by_slice, chunk)
                each.add(_Whole(each.number(chunk), partial))
