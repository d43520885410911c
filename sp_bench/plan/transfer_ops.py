"""Operations that move chunks between ranks: messages around a ring, collectives of a group, and casts of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from sp_bench.plan.chunks import Chunk
from sp_bench.plan.groups import Exchange, Grid, Group
from sp_bench.plan.members import ahead
from sp_bench.plan.tensors import DKV, DOQ, DQ, ODOQ, Tensor

Pairs = Literal["all", "keys", "queries"]
"""The pairs of a query chunk and another chunk of keys that an operation has to do with: all; those of which rows of
keys go to the queries; or those of which rows of queries go to the keys, and what is computed with them comes back. The
mask, the layout and the number of heads decide which are which (plan.travel)."""


@dataclass(frozen=True)
class _OfOneChunk:
    """A transfer that sends one chunk and receives another."""

    lane: str
    send: Chunk
    recv: Chunk

    @property
    def stream(self) -> str:
        return self.lane

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.send,)

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.recv,)


@dataclass(frozen=True)
class Pass(_OfOneChunk):
    """Send one chunk to the rank `shift` ahead in `group` while receiving one from the rank `shift` behind.

    In an Exchange, a rank that is its own partner sends nothing and copies the chunk.
    """

    group: Group | Exchange
    shift: int
    against: Chunk | None = None
    """Send only the rows that see this KV chunk: the receiver's, if `send` is a query chunk; the sender's, if it is a
    partial. None sends all rows."""

    @property
    def tensor(self) -> Tensor:
        """The tensor that travels."""
        return self.send.tensor

    def target(self, rank, n: int | None = None):
        """The rank that `rank` sends to; for arrays of n ranks looked up."""
        return ahead(self.group, self.shift, rank, n)

    def source(self, rank, n: int | None = None):
        """The rank that `rank` receives from; for arrays of n ranks looked up."""
        return ahead(self.group, -self.shift, rank, n)

    def seen_by(self, rank, n: int | None = None):
        """(owner of the queries, owner of the keys) that decide which rows `rank` sends; for arrays of n ranks looked
        up.
        """
        assert self.against is not None
        keys_at = rank if self.send.tensor.is_partial else self.target(rank, n)
        return self.send.owner(rank, n), self.against.owner(keys_at, n)

    def __str__(self) -> str:
        seen = f" seeing {self.against}" if self.against else ""
        if isinstance(self.group, Exchange):
            return f"Pass[{self.lane}] {self.send}{seen} -> partner, {self.recv} <- partner"
        places = self.shift * self.group.way
        return f"Pass[{self.lane}] {self.send}{seen} -> {places:+d}, {self.recv} <- {-places:+d}"


@dataclass(frozen=True)
class AllToAll(_OfOneChunk):
    """An all-to-all in a group, from tokens to heads (q -> q_h) or back (o_h -> out).

    From tokens to heads, every rank gets its own heads of all members' tokens; with fewer key heads than ranks, each
    key head goes to every rank that needs it. Back, every rank gets all heads of its own tokens; gradients of one key
    head from several ranks are summed.
    """

    group: Group
    by_messages: bool = False
    """Whether it is a message to each member instead of the library's all-to-all."""

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

    def shift(self, u):
        """How far ahead in `group` the rank is that #u has to do with; `u` is one member or an array."""
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


RowCollective = GroupCast | GroupReduce
Collective = AllToAll | AllGather | ReduceScatter | RowCollective
Transfer = Pass | Collective
