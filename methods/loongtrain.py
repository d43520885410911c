"""LoongTrain's 2D-Attention: DeepSpeed-Ulysses inside groups of ranks, Double-Ring-Attention between the groups.

Source: Gu et al., "LoongTrain: Efficient Training of Long-Sequence LLMs with Head-Context Parallelism", 2024: the
n = u * n / u ranks are head-parallel in one dimension (its d_hp is u = `ulysses`) and context-parallel in the other,
whose ring is a double one. An inner ring has w = `inner` of the n / u ranks with the same heads. It is USP
(methods/usp.py) whose ring is DoubleRing's (methods/double_ring.py): w = 1 is USP, u = 1 is DoubleRing.

A group of u ranks is consecutive, which the paper calls head-first placement. In context-first placement, the ranks of
an inner ring would be; a layout's chunks belong to consecutive ranks here, so that it isn't there. If u is larger than
kv_heads, key heads are replicated, as in the paper.

Volume, layouts and masks are USP's. Of the ring's hops, n / (u w) - 1 are outer ones.
Refuses a u as USP does, and a w that doesn't divide n / u.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from sp_bench.methods.double_ring import pass_rounds, pass_rounds_backward, rings
from sp_bench.methods.usp import USP
from sp_bench.plan import Chunk, Problem, Steps, Tensor, divisors, impossible


@dataclass(frozen=True, kw_only=True)
class LoongTrain(USP):
    """Ulysses inside groups, a double ring between them."""

    name: ClassVar[str] = "loongtrain"
    colour: ClassVar[str] = "#872154"
    marker: ClassVar[str] = "8"
    citation: ClassVar[str] = "Gu et al. 2024"

    inner: str | int = "auto"
    """w, ranks of an inner ring; auto stands for every divisor of n / u but n / u itself, as that ring is w = 1's."""

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for a u that is not possible, or a w that divides no n / u."""
        super().refuse(problem)
        degrees = self.sizes(problem) if self.ulysses == "auto" else [int(self.ulysses)]
        possible = sorted({w for u in degrees for w in divisors(problem.n // u)})
        if self.inner != "auto" and (type(self.inner) is not int or self.inner not in possible):
            rule = "gpus / ulysses" if self.ulysses == "auto" else f"gpus / ulysses = {problem.n // degrees[0]}"
            rule = f"must be auto or divide {rule}, where gpus={problem.n}"
            raise impossible(f"method.inner={self.inner}", rule, possible)

    def candidates(self, problem: Problem) -> tuple[LoongTrain, ...]:
        """One variant for each u and each w that the options allow."""
        variants = []
        for method in super().candidates(problem):
            ring = problem.n // method.size
            possible = [w for w in divisors(ring) if w < ring or ring == 1] if self.inner == "auto" else [self.inner]
            variants += [replace(method, inner=w) for w in possible if ring % int(w) == 0]
        return tuple(variants)

    def variant(self, n: int) -> str:
        """The Ulysses degree and the sizes of the outer and the inner rings, in words."""
        u = self.head_parallel(n)
        return f"ulysses {u} x ring {n // (u * self._inner)} x {self._inner}"

    @property
    def _inner(self) -> int:
        assert isinstance(self.inner, int), "a caller picks one of the candidates first"
        return self.inner

    def _chunks(self, problem: Problem, *tensors: Tensor) -> tuple[Chunk, ...]:
        """As Ulysses', but KV and dKV by heads are at home in rings of two levels."""
        home = rings(problem.n, self._inner, stride=self.head_parallel(problem.n))
        chunks = super()._chunks(problem, *tensors)
        return tuple(c._replace(home=home) if c.tensor.of_keys else c for c in chunks)

    def _attend(self, problem: Problem, steps: Steps, *chunks: Chunk) -> None:
        pass_rounds(steps, *([chunk] for chunk in chunks))

    def _attend_backward(self, problem: Problem, steps: Steps, *chunks: Chunk) -> None:
        pass_rounds_backward(steps, *([chunk] for chunk in chunks))
