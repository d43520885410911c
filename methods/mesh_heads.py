"""Heads as a third axis of Mesh-Attention: ours, not the paper's.

All-to-alls give each of u = `ulysses` consecutive ranks its heads of the tokens of all of them (methods/ulysses.py).
The tile, now a * b = n / u, is computed with these, and its groups are of stride u. u = 1 is Mesh-Attention; a = 1
sends what USP sends, and u = n what DeepSpeed-Ulysses does. With K = max(kv_heads, u) / heads, as a rank needs at least
one key head, each GPU sends
    forward   (2 + 2K) (u - 1) / u + 2 (a - 1) + 2K (b - 1)
    backward  (2 + 2K) (u - 1) / u for dO, dQ and dKV, and 4 (a - 1) + 4K (b - 1) in the tile
With K = 1 and a = b the forward is 4 sqrt(n / u) - 4 + 4 (u - 1) / u chunks: below Mesh by sqrt(u) where n is large,
below USP by sqrt(n / u) / 2.

Refuses tiles with a * b * u != n, a u that doesn't divide heads or neither divides kv_heads nor is a multiple of it
(with `pad_heads` one above heads), and more than one slice of the heads with u > 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, Self

from sp_bench.methods.mesh import travelling
from sp_bench.methods.mesh_gather import GatheredMesh
from sp_bench.methods.ulysses import by_heads, by_heads_backward, settled_degree
from sp_bench.plan import (
    DKV,
    DO,
    DQ,
    KV,
    OUT,
    Chunk,
    CostProfile,
    Grid,
    Group,
    Plan,
    Problem,
    Q,
    RequestError,
    SplitsHeads,
    Steps,
    Tensor,
    impossible,
)


@dataclass(frozen=True, kw_only=True)
class SplitMesh(SplitsHeads, GatheredMesh):
    """Mesh-Attention between all-to-alls that split the heads."""

    ulysses: Literal["auto"] | int = 1
    """u, how many consecutive ranks split the heads; auto stands for every possible degree."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 1 not in (self.ulysses, self.slices) and "auto" not in (self.ulysses, self.slices):
            raise RequestError(
                f"method.slices={self.slices}",
                f"heads are split among ranks already, by method.ulysses={self.ulysses}",
                "method.slices=1, or method.ulysses=1, would work",
            )

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError where u ranks can't split the heads, or tile or `slices` doesn't fit."""
        possible = self._possible(problem)
        if self.ulysses != "auto" and self.ulysses not in possible:
            rule, or_else = self.degree_rule(problem), self.if_padded(problem, self.ulysses)
            rule = f"must divide gpus={problem.n} and {rule}"
            raise impossible(f"method.ulysses={self.ulysses}", rule, possible, or_else)
        super().refuse(problem)

    def candidates(self, problem: Problem) -> tuple[Self, ...]:
        """Each variant of the tile, for each degree that the options allow."""
        self.refuse(problem)
        variants: list[Self] = []
        for u in self._degrees(problem):
            if u == 1 or self.slices in (1, "auto"):
                variants += super(SplitMesh, replace(self, ulysses=u)).candidates(problem)
        return tuple(variants)

    def head_parallel(self, n: int) -> int:
        """The degree u. Raises RequestError where it doesn't divide n, or while it is auto and matters."""
        return settled_degree(self.ulysses, n)

    def variant(self, n: int) -> str:
        """The degree, if heads are split, and the variant of the tile, in words."""
        return (f"ulysses {self.ulysses} x " if self.ulysses != 1 else "") + super().variant(n)

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The values of a, b and u."""
        return {**super().symbols(problem), "u": self.head_parallel(problem.n)}

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """All-to-alls send (u - 1) / u chunks of each tensor; a chunk of KV by heads has max(kv_heads, u) heads."""
        sent, u = super().chunks_sent(problem, phase), problem.layout.head_parallel
        if u == 1:
            return sent
        by_tensor: dict[Tensor, float | Fraction] = {tensor.by_heads: count for tensor, count in sent.items()}
        for tensor in (Q, KV.by_heads, OUT) if phase == "forward" else (DO, DQ, DKV.by_heads):
            by_tensor[tensor] = by_tensor.get(tensor, 0) + Fraction(u - 1, u)
        return by_tensor

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The tile's plan; between all-to-alls where heads are split."""
        if problem.layout.head_parallel == 1:
            return super().forward(problem, costs)
        return by_heads(problem, *self._between(problem, costs, "forward"))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The tile's plan; between all-to-alls where heads are split."""
        if problem.layout.head_parallel == 1:
            return super().backward(problem, costs)
        return by_heads_backward(problem, *self._between(problem, costs, "backward"))

    def _between(
        self, problem: Problem, costs: CostProfile, phase: str
    ) -> tuple[tuple[Chunk, ...], Callable[[Steps], None]]:
        """The tile's chunks, by heads, and what adds it between all-to-alls."""
        chunks = self._chunks(problem, *(tensor.by_heads for tensor in travelling(phase)))
        return chunks, lambda steps: self._attend(steps, problem, costs, phase, chunks)

    def _schedules(self, problem: Problem) -> list[tuple[str, int]]:
        return [(schedule, s) for schedule, s in super()._schedules(problem) if 1 in (self.ulysses, s)]

    def _groups(self, problem: Problem) -> tuple[Group | Grid, Group | Grid]:
        u = problem.layout.head_parallel
        q_group, kv_group = super()._groups(problem)
        return q_group.times(u), kv_group.times(u)

    def _tile_sizes(self, problem: Problem) -> list[int]:
        return [problem.n // u for u in (self._possible(problem) if self.ulysses == "auto" else [self.ulysses])]

    @property
    def _tile_rule(self) -> str:
        return super()._tile_rule if self.ulysses == 1 else f"a * b times ulysses={self.ulysses} must be gpus"

    def _degrees(self, problem: Problem) -> list[int]:
        """The degrees u that the options stand for."""
        degrees = self._possible(problem) if self.ulysses == "auto" else [self.ulysses]
        return [u for u in degrees if self.tile == "auto" or self.tile[0] * self.tile[1] * u == problem.n]

    def _possible(self, problem: Problem) -> list[int]:
        """Every u that divides n and splits heads and key heads."""
        return [u for u in self.degrees(problem) if problem.n % u == 0]
