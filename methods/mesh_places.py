"""Placement of a Mesh-Attention tile's groups on ranks, and the lanes that they send on: ours, not the paper's.

`placement` says which groups are consecutive ranks, which fill a node: with the paper's Q groups, KV crosses nodes;
with KV groups (a Q group is then the ranks equal mod b), Q and O cross nodes. Tile, algorithms and volume are the same.

With placement=[p,q] each p * q consecutive ranks, which fill a node, are a tile themselves: p of each Q group and q of
each KV group. Rings go over two levels: of every p chunks of a Q group, p - 1 come from inside the node and one from
the same place in the next one, so that each GPU receives a / p - 1 chunks of Q from other nodes and b / q - 1 of KV
(placement=q: b - 1 of KV). Into a node of g = p q GPUs come, in chunks of N/n tokens, k = kv_heads / heads, forward
    2 g (a/p - 1) + 2k g (b/q - 1), at least 4 sqrt(k n g) - (2 + 2k) g
The bound is that of section 3.8's volume for n / g nodes of g chunks each. It is met where a/p = k b/q.

`lanes=each` gives each tensor a lane of its own, so that transfers of different tensors overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from sp_bench.methods.mesh import MeshAttention, tiles
from sp_bench.plan import BACK, DOWN, UP, Chunk, Fold, Grid, Group, Pass, Problem, RequestError, Tensor

NODES = (4, 8, 16)
"""The ranks of a node that placement=node stands for."""


@dataclass(frozen=True, kw_only=True)
class PlacedMesh(MeshAttention):
    """Mesh-Attention with either kind of group inside nodes."""

    placement: Literal["q", "kv", "node", "auto"] | tuple[int, int] = "q"
    """The groups that are consecutive ranks: q (the paper's) or kv; auto stands for both. [p,q]: each p * q consecutive
    ranks are a p x q tile; node stands for those of NODES ranks with p and q above 1."""
    lanes: Literal["one", "each"] = "one"
    """one: all transfers share a lane, as in the paper's steps; each: a lane per tensor."""

    def candidates(self, problem: Problem) -> tuple[Self, ...]:
        """Each of the paper's, with each placement."""
        return tuple(
            replace(mesh, placement=placement)
            for mesh in super().candidates(problem)
            for placement in self._placements(*mesh.tile_shape(problem.n))
        )

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError where the tile, or a tile inside it, doesn't fit."""
        super().refuse(problem)
        if isinstance(self.placement, str) and self.placement != "node":
            return
        shapes = self._tiles(problem)
        if not any(self._placements(*shape) for shape in shapes):
            shown = self.placement if isinstance(self.placement, str) else "[{},{}]".format(*self.placement)
            fitting = sorted({inside for a, b in shapes for inside in _inside(a, b)})
            listed = ", ".join(f"[{p},{q}]" for p, q in fitting) or "q or kv"
            rule = f"must be [p,q] with p a divisor of a and q of b, for a tile [a,b] of {problem.n} GPUs"
            raise RequestError(
                f"method.placement={shown}", rule, f"method.placement={listed.split(', ')[0]} would work"
            )

    def variant(self, n: int) -> str:
        """The tile, and what is inside nodes, in words."""
        if isinstance(self.placement, tuple):
            return super().variant(n) + " of {}x{}".format(*self.placement)
        return super().variant(n) + (" kv inside" if self.placement == "kv" else "")

    def _placements(self, a: int, b: int) -> tuple[str | tuple[int, int], ...]:
        if self.placement == "node":
            return tuple(_inside(a, b))
        if isinstance(self.placement, tuple):
            p, q = self.placement
            return (self.placement,) if a % p == 0 and b % q == 0 else ()
        if self.placement != "auto":
            return (self.placement,)
        # With a side of 1 there is one ring, of all ranks in order: both placements are the same.
        return ("q", "kv") if a > 1 and b > 1 else ("q",)

    def _groups(self, problem: Problem) -> tuple[Group | Grid, Group | Grid]:
        assert self.placement not in ("auto", "node"), "a caller picks one of the candidates first"
        if isinstance(self.placement, tuple):
            return self._groups_of_tiles(*self.tile_shape(problem.n), *self.placement)
        if self.placement == "q":
            return super()._groups(problem)
        a, b = self.tile_shape(problem.n)
        return Group(stride=b, size=a), Group(stride=1, size=b, way=DOWN)

    def _groups_of_tiles(self, a: int, b: int, p: int, q: int) -> tuple[Group | Grid, Group | Grid]:
        """Ranks are i + p (j + q (i' + a/p j')), with i and i' along the Q group and j and j' along the KV group."""
        return _two_levels(1, p, p * q, a // p), _two_levels(p, q, q * a, b // q, DOWN)

    def _receive_next(self, own: Chunk, have: int) -> Pass:
        home, u = own.home, have + 1
        if not isinstance(home, Grid):
            return super()._receive_next(own, have)
        p, lane = home.inner.size, self._lane(own.tensor)
        if u % p:
            return Pass(lane, send=own.at(have), recv=own.at(u), group=home.inner, shift=BACK)
        # The first of a node is at the next place there: that of the node before it came first too.
        return Pass(lane, send=own.at(max(u - p, 1)), recv=own.at(u), group=home.outer, shift=BACK)

    def _reduce_next(self, own: Chunk, sent: int) -> tuple[Pass, Fold]:
        home, u = own.home, sent + 1
        if not isinstance(home, Grid):
            return super()._reduce_next(own, sent)
        p, lane = home.inner.size, self._lane(own.tensor)
        outward = u >= p and u % p == p - 1
        into = own.at((u + p if u + p < home.size else 0) if outward else (u + 1 if u + 1 != p else 0))
        group = home.outer if outward else home.inner
        hop = Pass(lane, send=own.at(u), recv=into.arriving(), group=group, shift=BACK)
        return hop, Fold(into.arriving(), into)

    def _ring(self, chunk: Chunk) -> Group:
        return chunk.home.outer if isinstance(chunk.home, Grid) else super()._ring(chunk)

    def _tiles(self, problem: Problem) -> list[tuple[int, int]]:
        """The shapes that the option `tile` stands for."""
        if self.tile != "auto":
            return [self.tile]
        return [shape for size in self._tile_sizes(problem) for shape in tiles(size)]

    def _lane(self, tensor: Tensor) -> str:
        return super()._lane(tensor) if self.lanes == "one" else self._sent(tensor).name


def _inside(a: int, b: int) -> list[tuple[int, int]]:
    """The tiles [p,q] of NODES ranks, both sides above 1, that divide an a x b tile and are not all of it."""
    shapes = [shape for size in NODES for shape in tiles(size) if 1 not in shape and shape != (a, b)]
    return [(p, q) for p, q in shapes if a % p == 0 and b % q == 0]


def _two_levels(stride: int, inner: int, jump: int, outer: int, way: int = UP) -> Group | Grid:
    """`inner` ranks that are `stride` apart in each of `outer` nodes that are `jump` apart; one group if one is 1."""
    if outer == 1:
        return Group(stride, inner, way)
    if inner == 1:
        return Group(jump, outer, way)
    return Grid(Group(stride, inner, way), Group(jump, outer, way), own_last=True)
