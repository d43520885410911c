"""Groups of ranks: ranks that differ in one or two digits, with ranks written in a mixed base.

A group of two digits counts them as one number: all places inside a node, then on to the next node.

Arguments called `rank` may be one rank or a numpy array of ranks, and those called `shift` one shift or an array that
broadcasts with it.
"""

from __future__ import annotations

from typing import NamedTuple

UP, DOWN = +1, -1
"""The two directions round a ring of ranks."""


class Group(NamedTuple):
    """Ranks that differ in one digit: rank = ... + stride * digit + ..., 0 <= digit < size.

    In the Mesh paper (section 3.2) a Q group has stride 1 and size a, a KV group stride a and size b; either direction.
    """

    stride: int
    size: int
    way: int = UP
    """UP: position #1 is the next higher digit. DOWN: it is the next lower one. Any other step that has no divisor in
    common with `size` goes round all digits, too: position #1 is `way` digits higher."""
    inner: int = 0
    """If set, only so many members are `stride` apart; the next as many are `jump` from these, and so on: digits are
    inner digit + inner * outer digit."""
    jump: int = 0

    def times(self, factor: int) -> Group:
        """The group with its strides multiplied."""
        return self._replace(stride=factor * self.stride, jump=factor * self.jump)

    def position(self, rank):
        """The position of `rank` within its own group."""
        return pow(self.way, -1, self.size) * self.digit(rank) % self.size

    def digit(self, rank):
        """The digit of `rank`, its position if the group counts UP."""
        if not self.inner:
            return rank // self.stride % self.size
        return rank // self.stride % self.inner + rank // self.jump % (self.size // self.inner) * self.inner

    def offset(self, digit):
        """How far the member with a digit is from the one with digit 0."""
        if not self.inner:
            return digit * self.stride
        return digit % self.inner * self.stride + digit // self.inner * self.jump

    def first(self, rank):
        """The member of the group of `rank` with digit 0."""
        return rank - self.offset(self.digit(rank))

    def member(self, rank, shift):
        """The rank that is `shift` positions ahead of `rank` in its group, around the ring."""
        digit = self.digit(rank)
        if not self.inner:
            return rank + ((digit + self.way * shift) % self.size - digit) * self.stride
        return rank + self.offset((digit + self.way * shift) % self.size) - self.offset(digit)

    @property
    def span(self) -> int:
        """Groups of this kind tile the ranks in aligned runs of `span` ranks."""
        return self.jump * (self.size // self.inner) if self.inner else self.stride * self.size


class Exchange(NamedTuple):
    """A pair of ranks that differ by an exchange of two digits, or a single rank whose two digits are equal."""

    low: Group
    high: Group

    def member(self, rank, shift):
        """The rank with both digits exchanged if `shift` is odd, else `rank` itself."""
        move = (self.high.digit(rank) - self.low.digit(rank)) * (shift % 2)
        return rank + move * (self.low.stride - self.high.stride)

    @property
    def span(self) -> int:
        """Exchanges of this kind tile the ranks in aligned runs of `span` ranks."""
        return self.high.span


def is_shared(group: Group | Exchange) -> bool:
    """Whether ranks have others in their group."""
    return isinstance(group, Exchange) or group.size > 1


class Grid(NamedTuple):
    """Ranks that differ in two digits; positions and shifts are numbered inner + inner.size * outer.

    It is the home of chunks that move along rings of two levels, such as inside a node and across nodes.
    """

    inner: Group
    outer: Group
    exchange: Exchange | None = None
    """If set, positions are counted from the rank's partner in this exchange."""
    own_last: bool = False
    """Whether, in all inner rings but the rank's own, its own inner position is the last one and not the first."""

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return self.inner.size * self.outer.size

    @property
    def as_group(self) -> Group:
        """All its ranks as one group: around the inner ring, then on along the outer one."""
        return Group(self.inner.stride, self.size, self.inner.way, self.inner.size, self.outer.stride)

    def times(self, factor: int) -> Grid:
        """The grid with its strides multiplied."""
        assert self.exchange is None
        return self._replace(inner=self.inner.times(factor), outer=self.outer.times(factor))

    def member(self, rank, shift):
        """The rank shift % inner.size ahead along the inner ring and shift // inner.size ahead along the outer ring."""
        start = rank if self.exchange is None else self.exchange.member(rank, 1)
        inward, outward = shift % self.inner.size, shift // self.inner.size
        if self.own_last:
            inward = inward + (outward != 0)
        return self.outer.member(self.inner.member(start, inward), outward)
