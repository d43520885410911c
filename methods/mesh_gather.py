"""Mesh-Attention by gathers: a rank has all chunks of its tile before it computes, and computes it as one block.

Source: Attention2D (arXiv 2503.15758), which TensorRT-LLM has; the tiles of UltraAttn (SC'25) work so. Q is gathered in
the Q group and KV in the KV group; the tile is one block; partial outputs are merged by their lse where their queries
are (ReduceScatter). Backward gathers OdOQ and KV, and reduces dQ and dKV.

`form=gather` has fewer and larger transfers and kernel calls than `form=ring`, and the same volume. Within a tile no
transfer hides behind a block, so that it suits short sequences. With `slices` the tile is computed once per slice of
the heads: gathering a slice, and reducing another, hide behind the block of a third.

The block is one operation where the mask leaves rectangles (plan.fuse.one_block): one kernel call of a full mask, few
of a causal one in zigzag order. Otherwise, as with stripes, it is a * b kernel calls one after the other.

Volume sent by each GPU: that of mesh.py. Where n doesn't divide N, the library's collectives pad chunks to the longest.
Peak memory, in chunks as in mesh.py: all of the tile at once, 3a + 2k b forward and 6a + 6k b backward, of up to three
slices.

Refuses a schedule other than the paper's with form=gather, as there is nothing to order, and collectives=library with
form=ring, whose transfers are messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, Self

from sp_bench.methods.mesh import blocks_of
from sp_bench.methods.mesh_orders import OrderedMesh, in_slices
from sp_bench.plan import (
    Chunk,
    CollectiveMethod,
    CostProfile,
    Grid,
    Group,
    Problem,
    RequestError,
    ScheduleTime,
    Steps,
    Tensor,
    all_gather,
    one_block,
    reduce_scatter,
)


@dataclass(frozen=True, kw_only=True)
class GatheredMesh(OrderedMesh, CollectiveMethod):
    """Mesh-Attention with rings, or with gathers."""

    form: Literal["ring", "gather", "auto"] = "ring"
    """ring: chunks go round, as in the paper; gather: they are gathered and the tile is one block; auto: both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form == "gather" and self.schedule not in ("paper", "auto"):
            rule = "form=gather has one block, and nothing to order"
            raise RequestError(f"method.schedule={self.schedule}", rule, "with method.form=ring it would work")
        if self.form == "ring" and self.collectives == "library":
            rule = "form=ring sends messages from rank to rank"
            raise RequestError("method.collectives=library", rule, "with method.form=gather it would work")

    def candidates(self, problem: Problem) -> tuple[Self, ...]:
        """Each of those with rings, and each tile and placement by gathers, in each number of slices."""
        self.refuse(problem)
        by_form = [super(GatheredMesh, one).candidates(problem) for one in self._forms()]
        return tuple(mesh for of_form in by_form for mesh in of_form)

    @property
    def blocks_are_pairs(self) -> bool:
        """By gathers, the tile is one block."""
        return super().blocks_are_pairs and not self._gathers

    def leaner(self) -> tuple[OrderedMesh, ...]:
        """The orders of mesh_lean.py, which have rings."""
        library = self.collectives == "library"
        rings = replace(self, form="ring", slices=1, collectives="auto" if library else self.collectives)
        return super(GatheredMesh, rings).leaner()

    def variant(self, n: int) -> str:
        """The tile and its form, in words."""
        return super().variant(n) + (" by gathers" if self._gathers else "")

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """As many chunks with either form; the library's are as long as the longest."""
        sent = super().chunks_sent(problem, phase)
        if not self._gathers:
            return sent
        return {tensor: count * self.padding(problem, self._held(problem, tensor)) for tensor, count in sent.items()}

    def schedule_time(self, problem: Problem, phase: str, costs: CostProfile) -> ScheduleTime | None:
        """That of the rings' steps; None by gathers, which have no steps to order."""
        return None if self._gathers else super().schedule_time(problem, phase, costs)

    def _attend(
        self, steps: Steps, problem: Problem, costs: CostProfile, phase: str, chunks: tuple[Chunk, ...]
    ) -> None:
        """By gathers, step i gathers slice i, computes slice i - 1 and reduces slice i - 2."""
        if not self._gathers:
            super()._attend(steps, problem, costs, phase, chunks)
            return
        slices, library, (a, b) = in_slices(problem, chunks), self.by_library(problem), self.tile_shape(problem.n)
        for i in range(len(slices) + 2):
            steps.next()
            for chunk in slices[i][:2] if i < len(slices) else ():
                steps.do(*all_gather(chunk, self._lane(chunk.tensor), library=library))
            behind = [
                reduce_scatter(chunk, self._lane(chunk.tensor), library=library)
                for chunk in (slices[i - 2][2:] if i >= 2 else ())
            ]
            steps.do(*(op for ops in behind for op in ops[:1]))
            if 1 <= i <= len(slices):
                block = blocks_of(slices[i - 1])
                steps.do(*one_block([block(u, v) for u in range(a) for v in range(b)], problem))
            steps.do(*(op for ops in behind for op in ops[1:]))

    def _groups(self, problem: Problem) -> tuple[Group | Grid, Group | Grid]:
        groups = super()._groups(problem)
        if not self._gathers:
            return groups
        q_group, kv_group = (group.as_group if isinstance(group, Grid) else group for group in groups)
        return q_group, kv_group

    def _held(self, problem: Problem, tensor: Tensor) -> Tensor:
        """The chunks of a tensor that are gathered: its chunks by heads where ranks split them."""
        return tensor.by_heads if problem.layout.head_parallel > 1 else tensor

    def _forms(self) -> list[Self]:
        """The forms that the options stand for. What only one of them has decides for it."""
        if self.form != "auto":
            return [self]
        forms = []
        for form in ("ring", "gather"):
            try:
                forms.append(replace(self, form=form))
            except RequestError:
                continue
        return forms

    def _schedules(self, problem: Problem) -> list[tuple[str, int]]:
        if not self._gathers:
            return super()._schedules(problem)
        return [("paper", s) for s in self._possible_slices(problem)]

    @property
    def _gathers(self) -> bool:
        assert self.form != "auto", "a caller picks one of the candidates first"
        return self.form == "gather"

    @property
    def _takes_slices(self) -> bool:
        return self.form != "ring" or super()._takes_slices
