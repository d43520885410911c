"""Placement of a Mesh-Attention tile's groups on ranks, and the lanes that they send on: ours, not the paper's.

`placement` says which groups are consecutive ranks, which fill a node: with the paper's Q groups, KV crosses nodes;
with KV groups (a Q group is then the ranks equal mod b), Q and O cross nodes. Tile, algorithms and volume are the same.

`lanes=each` gives each tensor a lane of its own, so that transfers of different tensors overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sp_bench.methods.mesh import MeshAttention
from sp_bench.plan import DOWN, Group, Problem, Tensor


@dataclass(frozen=True, kw_only=True)
class PlacedMesh(MeshAttention):
    """Mesh-Attention with either kind of group inside nodes."""

    placement: Literal["q", "kv", "auto"] = "q"
    """Which groups are consecutive ranks: q (the paper's) or kv; auto stands for both."""
    lanes: Literal["one", "each"] = "one"
    """one: all transfers share a lane, as in the paper's steps; each: a lane per tensor."""

    def candidates(self, problem: Problem) -> tuple[MeshAttention, ...]:
        """Each of the paper's, with each placement."""
        return tuple(
            replace(mesh, placement=placement)
            for mesh in super().candidates(problem)
            for placement in self._placements(*mesh.tile_shape(problem.n))
        )

    def variant(self, n: int) -> str:
        """The tile, and whether KV groups are inside nodes, in words."""
        return super().variant(n) + (" kv inside" if self.placement == "kv" else "")

    def _placements(self, a: int, b: int) -> tuple[str, ...]:
        if self.placement != "auto":
            return (self.placement,)
        # With a side of 1 there is one ring, of all ranks in order: both placements are the same.
        return ("q", "kv") if a > 1 and b > 1 else ("q",)

    def _groups(self, problem: Problem) -> tuple[Group, Group]:
        assert self.placement != "auto", "a caller picks one of the candidates first"
        if self.placement == "q":
            return super()._groups(problem)
        a, b = self.tile_shape(problem.n)
        return Group(stride=b, size=a), Group(stride=1, size=b, way=DOWN)

    def _lane(self, tensor: Tensor) -> str:
        return super()._lane(tensor) if self.lanes == "one" else self._sent(tensor).name
