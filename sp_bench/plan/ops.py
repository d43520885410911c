"""The words that plans are written in: chunks, operations, and the plan itself.

A plan is one straight-line program that all ranks run. Its operations name chunks by local index and peers by a shift
within a group; a rank's own chunks and peers follow by arithmetic. Arguments called `rank` may be one rank or a numpy
array of ranks.

Order: an operation may start once its operands are ready. The transfers of a lane run one at a time in plan order, and
so do blocks and folds. Nothing else synchronises. A transport may relax this where the data allows it (sp_bench.lower).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple
from weakref import WeakValueDictionary

from sp_bench.plan.block_ops import (
    BLOCKS,
    Attend,
    AttendBackward,
    Bundle,
    Fold,
    Fused,
    Gathered,
    Join,
    RowSums,
)
from sp_bench.plan.chunks import Chunk, Place
from sp_bench.plan.groups import Grid, Group
from sp_bench.plan.transfer_ops import (
    AllGather,
    AllToAll,
    Collective,
    GroupCast,
    GroupReduce,
    Pairs,
    Pass,
    ReduceScatter,
    Round,
    RowCollective,
    Transfer,
    TreeReduce,
    relays,
)

__all__ = [
    "BLOCKS", "AllGather", "AllToAll", "Attend", "AttendBackward", "Block", "Bundle", "Chunk", "Collective", "Fold",
    "Fused", "Gathered", "GroupCast", "GroupReduce", "Join", "Line", "Op", "Pairs", "Pass", "Place", "Plan",
    "PlanError", "ReduceScatter", "Round", "RowCollective", "RowSums", "Steps", "Transfer", "TreeReduce", "inner",
    "outer", "relays",
]  # fmt: skip


class PlanError(Exception):
    """Raised for a plan that is not a correct program; the message names the operation."""


Block = Attend | AttendBackward | Fused | Gathered
Op = Transfer | Block | Fold | Bundle | Join


class Line(NamedTuple):
    """The chunks that a rank sees along one ring: at(u) is the chunk of the rank u ahead in `group`.

    For chunks at home in a Grid, `first` and `stride` pick the ring: index first.index + stride * u.
    """

    first: Chunk
    group: Group
    stride: int = 1

    def at(self, u: int) -> Chunk:
        """The chunk u ahead, around the ring."""
        return self.first.at(self.first.index + self.stride * (u % self.group.size))


def inner(chunk: Chunk, outer_index: int) -> Line:
    """The inner ring of the chunks whose owners are `outer_index` ahead along the outer ring."""
    assert isinstance(chunk.home, Grid)
    return Line(chunk.at(chunk.home.inner.size * outer_index), chunk.home.inner)


def outer(chunk: Chunk) -> Line:
    """The outer ring of the ranks with this rank's inner position."""
    assert isinstance(chunk.home, Grid)
    return Line(chunk.at(0), chunk.home.outer, chunk.home.inner.size)


@dataclass(frozen=True, eq=False)
class Plan:
    """The straight-line program of every rank, for one phase. Plans are equal by identity."""

    phase: str
    """forward or backward."""
    n: int
    ops: tuple[Op, ...]
    steps: tuple[int, ...]
    """The step of each operation, as the paper counts steps."""
    inputs: tuple[Chunk, ...]
    outputs: tuple[Chunk, ...]
    kept: tuple[Chunk, ...] = ()
    """Chunks, beside inputs and outputs, that the forward leaves for the backward."""

    def is_program_of(self, other: Plan) -> bool:
        """Whether both have the same operations, steps, inputs and outputs."""
        return all(getattr(self, each.name) == getattr(other, each.name) for each in fields(self))

    def shared(self) -> Plan:
        """The latest plan that is the same program and still in use, or this one: what is found of it is found once."""
        alike = self.phase, self.n, len(self.ops), self.ops[-1:], self.inputs, self.outputs
        known = _SHARED.get(alike)
        if known is None or not self.is_program_of(known):
            _SHARED[alike] = known = self
        return known

    @property
    def starts_with(self) -> tuple[Chunk, ...]:
        """The chunks that a rank has before the first operation."""
        return self.inputs + (self.kept if self.phase == "backward" else ())

    @property
    def ends_with(self) -> tuple[Chunk, ...]:
        """The chunks that a rank must have after the last operation."""
        return self.outputs + (self.kept if self.phase == "forward" else ())

    @cached_property
    def kinds(self) -> frozenset[type]:
        """The kinds of its operations."""
        return frozenset(map(type, self.ops))

    @cached_property
    def gathered(self) -> Mapping[int, Gathered]:
        """Its Gathered blocks, by operation."""
        return {index: op for index, op in self if isinstance(op, Gathered)}

    @cached_property
    def transfers(self) -> tuple[tuple[int, Transfer], ...]:
        """Its transfers, with their places among the operations: few, in plans of thousands of blocks."""
        return tuple((index, op) for index, op in self if isinstance(op, Transfer))

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes in order of first use."""
        return tuple(dict.fromkeys(op.lane for _, op in self.transfers))

    def __iter__(self) -> Iterator[tuple[int, Op]]:
        return iter(enumerate(self.ops))


_SHARED: WeakValueDictionary[Hashable, Plan] = WeakValueDictionary()


@dataclass
class Steps:
    """Collects operations step by step: `steps.next(op, ...)` opens a step, and `steps.do(op, ...)` adds to it."""

    ops: list[Op] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    current: int = -1

    def next(self, *ops: Op) -> None:
        """Open the next step, with these operations."""
        self.current += 1
        if ops:
            self.do(*ops)

    def do(self, *ops: Op) -> None:
        """Add operations to the open step."""
        self.ops.extend(ops)
        self.numbers.extend([self.current] * len(ops))

    def plan(
        self,
        phase: str,
        n: int,
        inputs: tuple[Chunk, ...],
        outputs: tuple[Chunk, ...],
        kept: tuple[Chunk, ...] = (),
    ) -> Plan:
        """The plan of all operations added so far."""
        return Plan(phase, n, tuple(self.ops), tuple(self.numbers), inputs, outputs, kept)
