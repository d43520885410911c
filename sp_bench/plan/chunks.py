"""Chunks: the named pieces of tensors that the operations of a plan are about."""

from __future__ import annotations

from typing import NamedTuple

from sp_bench.plan.groups import Grid, Group
from sp_bench.plan.members import ahead
from sp_bench.plan.tensors import Tensor


class Place(NamedTuple):
    """The owner of a chunk's tokens: the rank `index` ahead in the group `home`."""

    home: Group | Grid
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]

    def owner(self, rank):
        """The global index of the chunk, which is the rank that owns its tokens."""
        return self.home.member(rank, self.index)


class Chunk(NamedTuple):
    """A chunk of a tensor on a rank: Chunk(Q, 2, home), `q#2`, is that of queries of the rank 2 ahead in its home.

    This is table 1 of the Mesh paper: Q#u on rank i is chunk a*floor(i/a) + (i+u) mod a, KV#u is (i + a*u) mod n, and
    (i - a*u) mod n in a group that counts DOWN.
    """

    tensor: Tensor
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    home: Group | Grid
    arrival: int = 0
    """0: the chunk that the rank holds. 1, 2, ...: a peer's partial in the wire dtype, to be folded into the held one;
    partials that are there at the same time have different numbers."""
    heads: int = 0
    """The slice of the heads, out of Problem.head_slices; of chunks of keys, out of Problem.key_slices."""

    @property
    def place(self) -> Place:
        """The owner of the chunk's tokens, as a Place."""
        return Place(self.home, self.index)

    def owner(self, rank, n: int | None = None):
        """The global index of the chunk, which is the rank that owns its tokens; for arrays of n ranks looked up."""
        return ahead(self.home, self.index, rank, n)

    def at(self, index: int) -> Chunk:
        """The chunk with another local index."""
        return Chunk(self.tensor, index % self.home.size, self.home, 0, self.heads)

    def slice(self, heads: int) -> Chunk:
        """The same tokens with another slice of the heads."""
        return Chunk(self.tensor, self.index, self.home, self.arrival, heads)

    def slices(self, count: int) -> list[Chunk]:
        """The same tokens in each of `count` head slices."""
        return [self.slice(heads) for heads in range(count)]

    def arriving(self, number: int = 1) -> Chunk:
        """The buffer for a peer's partial of this chunk."""
        return Chunk(self.tensor, self.index, self.home, number, self.heads)

    @property
    def is_arriving(self) -> bool:
        """Whether it is a peer's partial."""
        return self.arrival > 0

    def __str__(self) -> str:
        arrival = {0: "", 1: " arriving"}.get(self.arrival, f" arriving {self.arrival}")
        heads = f" heads/{self.heads}" if self.heads else ""
        return f"{self.tensor}#{self.index}{heads}{arrival}"
