"""The words that plans are written in: chunks, operations, and the plan itself.

A plan is one straight-line program that all ranks run. Its operations name chunks by local index and peers by a shift
within a group; a rank's own chunks and peers follow by arithmetic. Arguments called `rank` may be one rank or a numpy
array of ranks.

Order: an operation may start once its operands are ready. The transfers of a lane run one at a time in plan order, and
so do blocks and folds. Nothing else synchronises. A transport may relax this where the data allows it (sp_bench.lower).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from sp_bench.plan.chunks import Chunk, Place
from sp_bench.plan.groups import Exchange, Grid, Group
from sp_bench.plan.tensors import DKV, DOQ, DQ, ODOQ, Field, Tensor

__all__ = [
    "BLOCKS", "AllGather", "AllToAll", "Attend", "AttendBackward", "Block", "Bundle", "Chunk", "Collective", "Fold",
    "Fused", "Gathered", "GroupCast", "GroupReduce", "Join", "Line", "Op", "Pairs", "Pass", "Place", "Plan",
    "PlanError", "ReduceScatter", "Round", "RowCollective", "RowSums", "Steps", "Transfer", "TreeReduce", "inner",
    "outer", "relays",
]  # fmt: skip

BLOCKS = "blocks"
"""The name of the stream that blocks and folds run on, beside the lanes."""


Pairs = Literal["all", "keys", "queries"]
"""The pairs of a query chunk and another chunk of keys that an operation has to do with: all; those of which rows of
keys go to the queries; or those of which rows of queries go to the keys, and what is computed with them comes back. The
mask, the layout and the number of heads decide which are which (plan.travel)."""


class PlanError(Exception):
    """Raised for a plan that is not a correct program; the message names the operation."""


@dataclass(frozen=True)
class Pass:
    """Send one chunk to the rank `shift` ahead in `group` while receiving one from the rank `shift` behind.

    In an Exchange, a rank that is its own partner sends nothing and copies the chunk.
    """

    lane: str
    send: Chunk
    recv: Chunk
    group: Group | Exchange
    shift: int
    against: Chunk | None = None
    """Send only the rows that see this KV chunk: the receiver's, if `send` is a query chunk; the sender's, if it is a
    partial. None sends all rows."""

    @property
    def stream(self) -> str:
        return self.lane

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.send,)

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.recv,)

    @property
    def tensor(self) -> Tensor:
        """The tensor that travels."""
        return self.send.tensor

    def target(self, rank):
        """The rank that `rank` sends to."""
        return self.group.member(rank, self.shift)

    def source(self, rank):
        """The rank that `rank` receives from."""
        return self.group.member(rank, -self.shift)

    def seen_by(self, rank):
        """(owner of the queries, owner of the keys) that decide which rows `rank` sends."""
        assert self.against is not None
        keys_at = rank if self.send.tensor.is_partial else self.target(rank)
        return self.send.owner(rank), self.against.owner(keys_at)

    def __str__(self) -> str:
        seen = f" seeing {self.against}" if self.against else ""
        if isinstance(self.group, Exchange):
            return f"Pass[{self.lane}] {self.send}{seen} -> partner, {self.recv} <- partner"
        places = self.shift * self.group.way
        return f"Pass[{self.lane}] {self.send}{seen} -> {places:+d}, {self.recv} <- {-places:+d}"


@dataclass(frozen=True)
class AllToAll:
    """An all-to-all in a group, from tokens to heads (q -> q_h) or back (o_h -> out).

    From tokens to heads, every rank gets its own heads of all members' tokens; with fewer key heads than ranks, each
    key head goes to every rank that needs it. Back, every rank gets all heads of its own tokens; gradients of one key
    head from several ranks are summed.
    """

    lane: str
    send: Chunk
    recv: Chunk
    group: Group
    by_messages: bool = False
    """Whether it is a message to each member instead of the library's all-to-all."""

    @property
    def stream(self) -> str:
        return self.lane

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.send,)

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.recv,)

    @property
    def tensor(self) -> Tensor:
        """The tensor that travels."""
        return self.recv.tensor

    @property
    def to_heads(self) -> bool:
        """Whether it goes from tokens to heads."""
        return self.recv.tensor.is_by_heads

    def __str__(self) -> str:
        return f"AllToAll[{self.lane}] {self.send} -> {self.recv} of {self.group.size}"


@dataclass(frozen=True)
class _OfHome:
    """A collective among the ranks of a chunk's home."""

    lane: str
    own: Chunk
    """#0 of its home, a Group."""

    @property
    def stream(self) -> str:
        return self.lane

    @property
    def group(self) -> Group:
        """The ranks that take part."""
        assert isinstance(self.own.home, Group)
        return self.own.home

    @property
    def tensor(self) -> Tensor:
        """The tensor that travels."""
        return self.own.tensor


@dataclass(frozen=True)
class AllGather(_OfHome):
    """The library's all-gather among the ranks of `own`'s home: each receives the chunks of all others, #1, #2, ..."""

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.own,)

    @cached_property
    def writes(self) -> tuple[Chunk, ...]:
        return tuple(self.own.at(u) for u in range(1, self.group.size))

    def __str__(self) -> str:
        return f"AllGather[{self.lane}] {self.own} of {self.group.size}"


@dataclass(frozen=True)
class ReduceScatter(_OfHome):
    """The library's reduce-scatter among the ranks of `own`'s home: every rank's partials #1, #2, ... go to their
    owners. Merged into one, those of #0 arrive at this rank, to be folded into its own.

    A library can only add. Gradients are added on the way where the transport can do that; outputs, which are weighted
    by their lse, are exchanged by an all-to-all and merged by their owner.
    """

    @cached_property
    def reads(self) -> tuple[Chunk, ...]:
        return tuple(self.own.at(u) for u in range(1, self.group.size))

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.own.arriving(),)

    def __str__(self) -> str:
        return f"ReduceScatter[{self.lane}] {self.own} of {self.group.size}"


class Round(NamedTuple):
    """A round of a TreeReduce: every rank sends partials of so many `owners`, in one message, to the rank `shift` ahead
    in `group`, and merges those that come with its own of the same owners.
    """

    group: Group
    shift: int
    first: int
    """The place of the first of them; those that come are for the places from 0 on (TreeReduce.place)."""
    owners: int


@dataclass(frozen=True)
class TreeReduce(ReduceScatter):
    """A ReduceScatter in rounds that merge on the way: ceil(log2(n)) of them, for any n, or as many at each of two
    levels.

    In a group of m the ranks of distances d = 2^k < m, from the largest, get the partials of owners d to 2 d - 1 ahead,
    which are 0 to d - 1 ahead of themselves: Bruck's all-gather (Bruck et al. 1997) backwards. With `inner` below n,
    that many neighbours reduce what they have for all owners first, and then those of one place in their groups.
    """

    inner: int = 1

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds, in order. They send each of the n - 1 partials of other owners once."""
        all_rounds = list[Round]()
        for group, each in zip(self.levels, (self.levels[1].size, 1), strict=True):
            for distance in (2**k for k in reversed(range((group.size - 1).bit_length()))):
                count = min(distance, group.size - distance) * each
                all_rounds.append(Round(group, distance, distance * each, count))
        return tuple(all_rounds)

    @property
    def levels(self) -> tuple[Group, Group]:
        """The groups of neighbours, and those of the same place in these."""
        home = self.group
        return home._replace(size=self.inner), Group(home.stride * self.inner, home.size // self.inner)

    def place(self, rank, owner):
        """The place of an owner's partial on a rank: as many of the outer level as it is ahead of the rank in it, and
        all of these for each that it is ahead among neighbours. 0 is the rank itself.
        """
        near, far = self.levels
        inward, outward = ((level.digit(owner) - level.digit(rank)) % level.size for level in (near, far))
        return inward * far.size + outward

    def owner(self, rank, place: int):
        """The owner whose partial is at a place of a rank."""
        near, far = self.levels
        return far.member(near.member(rank, place // far.size), place % far.size)

    def __str__(self) -> str:
        levels = f" in {self.inner}" if self.inner > 1 else ""
        return f"TreeReduce[{self.lane}] {self.own} of {self.group.size}{levels}"


@dataclass(frozen=True)
class _OfRows(_OfHome):
    """A collective that moves those rows of key chunks that queries see (plan.casts), or those rows of query chunks
    that see keys: a message to each member.
    """

    members: tuple[int, ...]
    """The chunks #u that a rank has to do with, as seen from it; `own` is not among them."""
    against: Chunk
    """The rank's own chunk that decides which rows: its queries for rows of keys, its keys for rows of queries."""
    pairs: Pairs = field(default="all", kw_only=True)
    """The pairs of chunks of which it moves rows; "queries" if and only if `own` is of queries."""

    @property
    def forward(self) -> bool:
        """Whether it is part of a forward."""
        return {self.own.tensor.by_tokens, self.against.tensor.by_tokens}.isdisjoint(_BACKWARD)

    @property
    def group(self) -> Group:
        """The ranks that take part: the home, or the ranks along one of a Grid's rings."""
        home = self.own.home
        if isinstance(home, Group):
            return home
        return home.inner if self._inside else home.outer

    def shift(self, u: int) -> int:
        """How far ahead in `group` the rank is that #u has to do with."""
        if isinstance(self.own.home, Group):
            return u
        inward, outward = u % self.own.home.inner.size, u // self.own.home.inner.size
        return inward if self._inside else outward

    @property
    def _inside(self) -> bool:
        """Whether the ranks of a Grid's inner ring take part."""
        assert isinstance(self.own.home, Grid)
        return all(u // self.own.home.inner.size == self.own.index // self.own.home.inner.size for u in self.members)

    @property
    def of_members(self) -> tuple[Chunk, ...]:
        """The chunks of these members."""
        return tuple(self.own.at(u) for u in self.members)


@dataclass(frozen=True)
class GroupCast(_OfRows):
    """Each rank receives, of the chunks #u of its `members`, the rows that its queries see, or that see its keys.

    Source: MagiAttention (github SandAI-org/MagiAttention). Only a Gathered block reads what came.

    Where `own` is at home in a Grid, it goes along one of its rings. Along the outer ring a rank receives, for all
    ranks of its inner ring, the rows that any of them sees (relayed). Along the inner ring it passes these on: `own` is
    then what it received, and #u is that chunk of the rank that holds it.
    """

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.own,)

    @cached_property
    def writes(self) -> tuple[Chunk, ...]:
        return self.of_members

    def __str__(self) -> str:
        sees = "sees it" if self.own.tensor.of_keys else "it sees"
        return f"GroupCast[{self.lane}] {self.own} to ranks whose {self.against} {sees}, {_listed(self.members)}"


@dataclass(frozen=True)
class GroupReduce(_OfRows):
    """The way back: partials of the rows that a GroupCast brought go to their owners, where they arrive as one.

    The rows of several members may be the same. The owner adds all of them, or merges outputs by their lse.
    """

    arrival: int = 1
    """The number of the chunk that arrives (Chunk.arrival)."""

    @cached_property
    def reads(self) -> tuple[Chunk, ...]:
        return self.of_members

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.own.arriving(self.arrival),)

    def __str__(self) -> str:
        saw = "saw it" if self.own.tensor.of_keys else "it saw"
        return f"GroupReduce[{self.lane}] {self.own} from ranks whose {self.against} {saw}, {_listed(self.members)}"


def relays(chunk: Chunk) -> int:
    """For how many ranks a rank holds the rows of a chunk that a GroupCast brought: those that any of them sees."""
    if isinstance(chunk.home, Group) or not chunk.index or chunk.index % chunk.home.inner.size:
        return 1
    return chunk.home.inner.size


_BACKWARD = frozenset((ODOQ, DOQ, DQ, DKV))


def _listed(members: tuple[int, ...]) -> str:
    return f"#{members[0]}" if len(members) == 1 else f"#{members[0]}..#{members[-1]}"


@dataclass(frozen=True)
class Attend:
    """One block forward: attention of chunk `q` to chunk `kv`, folded into the accumulator `o`."""

    q: Chunk
    kv: Chunk
    o: Chunk

    stream = BLOCKS

    @property
    def blocks(self) -> tuple[Attend, ...]:
        """The blocks that it computes: itself."""
        return (self,)

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.q, self.kv)

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.o,)

    def __str__(self) -> str:
        return f"Attend {self.q} x {self.kv} into {self.o}"


@dataclass(frozen=True)
class AttendBackward:
    """One block backward: the gradients from chunks `odoq` and `kv`, added to the accumulators `dq` and `dkv`."""

    odoq: Chunk
    kv: Chunk
    dq: Chunk
    dkv: Chunk

    stream = BLOCKS

    @property
    def blocks(self) -> tuple[AttendBackward, ...]:
        """The blocks that it computes: itself."""
        return (self,)

    @property
    def q(self) -> Chunk:
        """The query chunk, with what its backward needs."""
        return self.odoq

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.odoq, self.kv)

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.dq, self.dkv)

    def __str__(self) -> str:
        return f"AttendBackward {self.odoq} x {self.kv} into {self.dq}, {self.dkv}"


@dataclass(frozen=True)
class _Blocks:
    """Several blocks as one operation: each of its query chunks has a block with each of its key chunks."""

    blocks: tuple[Attend, ...] | tuple[AttendBackward, ...]

    stream = BLOCKS

    @property
    def forward(self) -> bool:
        """Whether its blocks are those of a forward."""
        return isinstance(self.blocks[0], Attend)

    @cached_property
    def queries(self) -> tuple[Chunk, ...]:
        """The query chunks, in the order of their concatenation."""
        return tuple(dict.fromkeys(block.q for block in self.blocks))

    @cached_property
    def keys(self) -> tuple[Chunk, ...]:
        """The key chunks, in the order of their concatenation."""
        return tuple(dict.fromkeys(block.kv for block in self.blocks))

    @cached_property
    def reads(self) -> tuple[Chunk, ...]:
        return (*self.queries, *self.keys)

    @cached_property
    def writes(self) -> tuple[Chunk, ...]:
        return tuple(dict.fromkeys(chunk for block in self.blocks for chunk in block.writes))

    def __str__(self) -> str:
        queries, keys, written = (", ".join(map(str, x)) for x in (self.queries, self.keys, self.writes))
        return f"{type(self.blocks[0]).__name__} ({queries}) x ({keys}) into {written}"


@dataclass(frozen=True)
class Fused(_Blocks):
    """Several blocks as one: attention of query chunks, end to end, to key chunks, end to end.

    What the mask leaves of them is computed by as few kernel calls as possible (plan.union), and each call's result is
    folded once into each chunk that it belongs to.
    """


@dataclass(frozen=True)
class Gathered(_Blocks):
    """Blocks of one query chunk with all key rows that GroupCasts brought, or with the rank's own: in few calls, for
    each of some slices of its heads. Or of all query rows that they brought with the rank's own keys, backward as doq.

    What they brought is put in the order of its positions, so that rows of a document are one run (plan.casts).
    """

    pairs: Pairs = "all"
    """The pairs of chunks that it computes blocks of."""

    @property
    def brought(self) -> tuple[Chunk, ...]:
        """The chunks of which a GroupCast brought rows, or the rank's own keys."""
        return self.queries if self.pairs == "queries" else self.keys

    @property
    def rank_own(self) -> Chunk:
        """The rank's own chunk that all its blocks have: of queries, or of keys where queries were brought."""
        return self.keys[0] if self.pairs == "queries" else self.queries[0]


@dataclass(frozen=True)
class Fold:
    """Merge an arrived partial into the accumulator `into`: weighted by the lse for an output, a sum for a gradient."""

    part: Chunk
    into: Chunk

    stream = BLOCKS

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.part,)

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.into,)

    def __str__(self) -> str:
        return f"Fold {self.part} into {self.into}"


@dataclass(frozen=True)
class Bundle:
    """Combine the fields of several chunks into one chunk, such as q_h, o_h and do_h into odoq_h. Copies nothing."""

    parts: tuple[Chunk, ...]
    into: Chunk

    stream = BLOCKS

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return self.parts

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.into,)

    def __str__(self) -> str:
        return f"Bundle {', '.join(map(str, self.parts))} as {self.into}"


@dataclass(frozen=True)
class RowSums(Bundle):
    """Put rowsum(dO * O) in the place of O (odoq -> doq), or in its place an O that has these row sums (doq -> odoq).

    The backward depends on O by its row sums alone. The O that is put there is the projection of O on dO, row by row:
    delta / |dO|^2 * dO. Other fields are not copied.
    """

    @property
    def made(self) -> tuple[Field, ...]:
        """The fields that are computed."""
        given = {field.name for part in self.parts for field in part.tensor.fields}
        return tuple(field for field in self.into.tensor.fields if field.name not in given)

    def __str__(self) -> str:
        return f"RowSums {', '.join(map(str, self.parts))} as {self.into}"


@dataclass(frozen=True)
class Join:
    """A local barrier of one rank: all operations before it end before any after it starts (a paper's lock-step)."""

    stream = BLOCKS
    reads: tuple[Chunk, ...] = ()
    writes: tuple[Chunk, ...] = ()

    def __str__(self) -> str:
        return "Join"


RowCollective = GroupCast | GroupReduce
Collective = AllToAll | AllGather | ReduceScatter | RowCollective
Transfer = Pass | Collective
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

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes in order of first use."""
        return tuple(dict.fromkeys(op.lane for op in self.ops if isinstance(op, Transfer)))

    def __iter__(self) -> Iterator[tuple[int, Op]]:
        return iter(enumerate(self.ops))


V = TypeVar("V")
_SHARED: WeakValueDictionary[Hashable, Plan] = WeakValueDictionary()
KEPT = 16
"""How many problems there may be of which a plan keeps what is found: it may serve any number of packs."""


def keep(found: dict[Any, V], key: Hashable, value: V) -> V:
    """The value, kept under its key in place of the oldest of KEPT others."""
    if len(found) >= KEPT:
        del found[next(iter(found))]
    found[key] = value
    return value


@dataclass
class Steps:
    """Collects operations step by step: `steps.next()` opens a step, `steps.do(op, ...)` adds to the open one."""

    ops: list[Op] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    current: int = -1

    def next(self) -> None:
        """Open the next step."""
        self.current += 1

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
