"""Mesh-Attention: a rank computes an a x b tile of the assignment matrix. Q, KV and O all travel, each only a little.

Source: Chen et al., "Mesh-Attention: A New Communication-Efficient Distributed Attention with Improved Data Locality".
    tile, Q groups, KV groups          section 3.2: a Q group is a consecutive ranks, a KV group the ranks equal mod a
    local to global chunk indices      table 1: a chunk's home group and index (Chunk). KV goes the other way round the
                                       same ring: KV#u is chunk (i - a*u) mod n here (methods/ring.py)
    Recv Q, Recv KV, Send O            section 3.4: receive_next and reduce_next along the group's ring
    forward schedule                   section 3.5, algorithm 2: mesh_schedule.forward_schedule
    backward schedule                  section 3.6, algorithm 3: mesh_schedule.backward_schedule
    causal mask                        section 3.7: the striped layout
    volume                             section 3.8: MeshAttention.chunks_sent

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, k = kv_heads / heads (section 3.8):
    forward   (a - 1) Q + 2k (b - 1) KV + (a - 1) O; a = 1 is Ring, a = n Pass-Q, a = sqrt(k n) the minimum
    backward  3 (a - 1) OdOQ + 2k (b - 1) KV + (a - 1) dQ + 2k (b - 1) dKV
    the lse travels with each O and each OdOQ and is counted apart

Layouts: striped (causal), contiguous, zigzag. Masks: full, causal. Refuses tiles with a * b != n.

This file and mesh_schedule.py are the paper's alone. What we add is in files of its own, and `method=mesh` has all of
it (mesh_variants.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import ClassVar, Literal, Self, TypeVar

from sp_bench.methods.mesh_schedule import SCHEDULES, Tile
from sp_bench.plan import (
    DKV,
    DOWN,
    DQ,
    KV,
    ODOQ,
    Attend,
    AttendBackward,
    Chunk,
    CostProfile,
    Fold,
    Grid,
    Group,
    Method,
    O,
    Op,
    Pass,
    Plan,
    Problem,
    Q,
    Steps,
    Tensor,
    divisors,
    impossible,
    line_of,
    receive_next,
    reduce_next,
)

Transfer = TypeVar("Transfer", bound=Hashable)
"""The name of a transfer of a schedule: its tensor, or its tensor and slice."""


@dataclass(frozen=True, kw_only=True)
class MeshAttention(Method):
    """Mesh-Attention with an a x b tile."""

    name: ClassVar[str] = "mesh"
    colour: ClassVar[str] = "#1a1a1a"
    marker: ClassVar[str] = "h"
    citation: ClassVar[str] = "Chen et al. 2025"
    by_blocks: ClassVar[bool] = True
    folds_arrivals: ClassVar[bool] = True
    plans_by_size: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*(a-1) + 2*k*(b-1)", "backward": "4*(a-1) + 4*k*(b-1)"}

    tile: Literal["auto"] | tuple[int, int] = "auto"
    """(a, b): ranks of a Q group and of a KV group; auto stands for every factorisation of n."""

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError where a * b is not n."""
        sizes = self._tile_sizes(problem)
        if self.tile == "auto" or self.tile[0] * self.tile[1] in sizes:
            return
        shapes = (f"[{a},{b}]" for size in sizes for a, b in tiles(size))
        raise impossible(f"method.tile=[{self.tile[0]},{self.tile[1]}]", f"{self._tile_rule}={problem.n}", shapes)

    def candidates(self, problem: Problem) -> tuple[Self, ...]:
        """One variant for each tile."""
        self.refuse(problem)
        (size,) = self._tile_sizes(problem)
        return tuple(replace(self, tile=tile) for tile in (tiles(size) if self.tile == "auto" else [self.tile]))

    def tile_shape(self, n: int) -> tuple[int, int]:
        """The tile's sides (a, b)."""
        assert not isinstance(self.tile, str), "a caller picks one of the candidates first"
        return self.tile

    def homes(self, problem: Problem, phase: str) -> tuple[Group | Grid, Group | Grid]:
        """The Q group and the KV group."""
        return self._groups(problem)

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The values of a and b."""
        a, b = self.tile_shape(problem.n)
        return {"a": a, "b": b}

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """Section 3.8: a - 1 chunks of each tensor of the Q group and b - 1 of each of the KV group."""
        a, b = self.tile_shape(problem.n)
        return {tensor: (b if tensor.of_keys else a) - 1 for tensor in travelling(phase)}

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The plan of algorithm 2."""
        return self._planned(problem, costs, "forward")

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The plan of algorithm 3."""
        return self._planned(problem, costs, "backward")

    def _planned(self, problem: Problem, costs: CostProfile, phase: str) -> Plan:
        chunks, steps = self._chunks(problem, *travelling(phase)), Steps()
        self._attend(steps, problem, costs, phase, chunks)
        return steps.plan(phase, problem.n, inputs=chunks[:2], outputs=chunks[2:])

    def _attend(
        self, steps: Steps, problem: Problem, costs: CostProfile, phase: str, chunks: tuple[Chunk, ...]
    ) -> None:
        """Add the tile of a phase, of the rank's own chunks of what travels in it."""
        c = self._hiding(problem, costs, phase, *chunks)
        schedule = SCHEDULES[phase](*self.tile_shape(problem.n), c, self._tile_kind(phase))
        own = {x.tensor.by_tokens: x for x in chunks}
        self._add(steps, [(step.transfer, step.blocks) for step in schedule], own, blocks_of(chunks))

    def _add(
        self,
        steps: Steps,
        moves: Iterable[tuple[Transfer | None, Iterable[tuple[int, ...]]]],
        chunks: Mapping[Transfer, Chunk],
        block: Callable[..., Op],
    ) -> None:
        """Add the operations of a schedule: each step's transfer, then the blocks that overlap it.

        The arrival of a reduce hop is folded just before the next hop sends the sum on, so that blocks scheduled in
        between don't wait for it.
        """
        hops = Counter[Transfer]()
        unfolded: dict[Transfer, Fold] = {}
        for transfer, blocks in moves:
            steps.next()
            if transfer is not None:
                own, have = chunks[transfer], hops[transfer]
                if own.tensor.is_partial:
                    steps.do(*([unfolded.pop(transfer)] if transfer in unfolded else []))
                    hop, unfolded[transfer] = self._reduce_next(own, have)
                else:
                    hop = self._receive_next(own, have)
                steps.do(hop)
                hops[transfer] += 1
            for each in blocks:
                steps.do(block(*each))
        steps.next(*unfolded.values())

    def _hiding(self, problem: Problem, costs: CostProfile, phase: str, *chunks: Chunk) -> dict[Tensor, int]:
        """The paper's c_Q, c_KV, ..., by tensor (CostProfile.hiding_blocks)."""
        return {
            x.tensor.by_tokens: costs.hiding_blocks(problem, self._sent(x.tensor), self._ring(x), phase) for x in chunks
        }

    def _chunks(self, problem: Problem, *tensors: Tensor) -> tuple[Chunk, ...]:
        """The rank's own chunks. The home of KV and dKV is the KV group, of others the Q group (table 1)."""
        q_group, kv_group = self._groups(problem)
        return tuple(Chunk(tensor, 0, kv_group if tensor.of_keys else q_group) for tensor in tensors)

    def _groups(self, problem: Problem) -> tuple[Group | Grid, Group | Grid]:
        """(Q group, KV group) of section 3.2."""
        a, b = self.tile_shape(problem.n)
        return Group(stride=1, size=a), Group(stride=a, size=b, way=DOWN)

    # What variants of ours change (mesh_variants.py)

    def _tile_sizes(self, problem: Problem) -> list[int]:
        """How many ranks may share a tile: all of them."""
        return [problem.n]

    @property
    def _tile_rule(self) -> str:
        return "a * b must be gpus"

    def _tile_kind(self, phase: str) -> type[Tile]:
        """The rules by which a tile's blocks are chosen: the paper's."""
        return Tile

    def _receive_next(self, own: Chunk, have: int) -> Pass:
        """A hop of a gather: section 3.4."""
        return receive_next(own, have, self._lane(own.tensor))

    def _reduce_next(self, own: Chunk, sent: int) -> tuple[Pass, Fold]:
        """A hop of a reduction, and the fold of what it brings: section 3.4."""
        return reduce_next(own, sent, self._lane(own.tensor))

    def _ring(self, chunk: Chunk) -> Group:
        """The group whose links a hop of a chunk crosses: its home."""
        return line_of(chunk).group

    def _lane(self, tensor: Tensor) -> str:
        """The lane that a tensor travels on: one for all, as a step has one transfer."""
        return "rings"

    def _sent(self, tensor: Tensor) -> Tensor:
        """The tensor that is sent in place of one: itself."""
        return tensor


def travelling(phase: str) -> tuple[Tensor, ...]:
    """The tensors that travel in a phase: the two that are gathered, then those that are reduced."""
    return (Q, KV, O) if phase == "forward" else (ODOQ, KV, DQ, DKV)


def blocks_of(chunks: Sequence[Chunk]) -> Callable[[int, int], Attend | AttendBackward]:
    """A function that makes the block of row u and column v of a tile, of the rank's own chunks of what travels."""
    at = [cache(chunk.at) for chunk in chunks]  # a tile has a + b chunks of each, and a * b blocks
    if len(at) == 3:
        q, kv, o = at
        return lambda u, v: Attend(q(u), kv(v), o(u))
    odoq, kv, dq, dkv = at
    return lambda u, v: AttendBackward(odoq(u), kv(v), dq(u), dkv(v))


def tiles(n: int) -> list[tuple[int, int]]:
    """Every tile (a, b) with a * b = n."""
    return [(a, n // a) for a in divisors(n)]
