"""Groups of ranks: a rank's digits in a mixed base, and what moves when one of them, or two, change.

Everything here takes a single rank or a numpy array of them.
"""

from __future__ import annotations

from typing import NamedTuple

UP, DOWN = +1, -1
"""The two ways round a ring of ranks."""


class Group(NamedTuple):
    """Ranks that differ in one digit: rank = ... + stride * digit + ..., 0 <= digit < size.

    Stride 1 and size a is a Q group of the Mesh paper (section 3.2), stride a and size b a KV group, whichever way.
    """

    stride: int
    size: int
    way: int = UP
    """How positions are counted: UP with the digit or DOWN against it, so that #1 is the rank before."""

    def position(self, rank):
        """The position of `rank` within its own group."""
        return self.way * self.digit(rank) % self.size

    def digit(self, rank):
        """The digit of `rank`, which is its position in a group that counts UP."""
        return rank // self.stride % self.size

    def member(self, rank, shift):
        """The rank that is `shift` positions ahead of `rank` in its group, around the ring."""
        digit = self.digit(rank)
        return rank + ((digit + self.way * shift) % self.size - digit) * self.stride

    @property
    def span(self) -> int:
        """Groups tile the ranks in aligned runs of this many."""
        return self.stride * self.size


class Exchange(NamedTuple):
    """Ranks of which two digits are exchanged: a pair of ranks, or a single one whose digits are equal."""

    low: Group
    high: Group

    def member(self, rank, shift):
        """The rank with both digits exchanged if `shift` is odd, else `rank` itself."""
        move = (self.high.digit(rank) - self.low.digit(rank)) * (shift % 2)
        return rank + move * (self.low.stride - self.high.stride)

    @property
    def span(self) -> int:
        """As a group's."""
        return self.high.span


class Grid(NamedTuple):
    """Ranks that differ in two digits. Position inner + inner.size * outer; a shift is made of two in the same way.

    The home of chunks that move along rings of two levels, such as inside a node and across nodes.
    """

    inner: Group
    outer: Group
    exchange: Exchange | None = None
    """The chunks are those of the partner in this exchange."""

    @property
    def size(self) -> int:
        return self.inner.size * self.outer.size

    def member(self, rank, shift):
        """The rank that is shift % inner.size ahead along the inner ring and shift // inner.size along the outer."""
        start = rank if self.exchange is None else self.exchange.member(rank, 1)
        return self.outer.member(self.inner.member(start, shift % self.inner.size), shift // self.inner.size)
