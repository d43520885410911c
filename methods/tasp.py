"""TASP: KV goes round several rings at once, which share no link, so that all links between GPUs are used.

Source: Wang et al., "TASP: Topology-aware Sequence Parallelism", 2025. Where n GPUs are all joined in pairs, one ring
uses one of each GPU's n - 1 links. A Hamiltonian decomposition of the complete directed graph gives n - 1 rings of all
GPUs that have no link in common (but for n = 4 and 6). Ring Attention's all-gather is split likewise: each ring carries
its own part of every KV chunk, and all rings turn at once. Across nodes, each GPU sends over its own NIC.

Here the w ranks of a node (`inner`) are joined by the rings i -> i + s mod w, one for each step s without a divisor in
common with w. They have no link in common, as a link's ends differ by its ring's step. These are all w - 1 rings of the
decomposition where w is a prime number, and w / 2 of them where it is a power of two. A ring carries one of `rings`
equal slices of the heads (the paper splits tokens); their number must divide kv_heads. Outer rings join nodes, as
in DoubleRing (methods/double_ring.py). Backward: dKV follows KV on the same rings.

Volume, layouts and masks are Ring's (methods/ring.py); of what an inner ring sends, each link has 1 / `rings`.
Refuses an inner ring whose size doesn't divide n, and rings that don't divide kv_heads or are more than the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar

from sp_bench.methods.double_ring import DoubleRing, pass_rounds, pass_rounds_backward, rings
from sp_bench.plan import (
    DKV,
    DOWN,
    DQ,
    KV,
    ODOQ,
    Chunk,
    CostProfile,
    Group,
    O,
    Plan,
    Problem,
    Q,
    Steps,
    Tensor,
    divisors,
    impossible,
)


@dataclass(frozen=True, kw_only=True)
class TASP(DoubleRing):
    """Ring Attention on several rings of a node at once, and on rings across nodes."""

    name: ClassVar[str] = "tasp"
    colour: ClassVar[str] = "#808000"
    marker: ClassVar[str] = "p"
    citation: ClassVar[str] = "Wang et al. 2025"

    rings: str | int = "auto"
    """How many inner rings turn at once; auto stands for the most that divide kv_heads."""

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for an inner size or a number of rings that is not possible."""
        super().refuse(problem)
        sizes = self.sizes(problem) if self.inner == "auto" else [int(self.inner)]
        possible = sorted({count for size in sizes for count in _counts(size, problem)})
        if self.rings != "auto" and (type(self.rings) is not int or self.rings not in possible):
            rule = f"must be auto or divide kv_heads={problem.kv_heads}"
            rule += ", with a ring for each step round the inner ranks"
            raise impossible(f"method.rings={self.rings}", rule, possible)

    def candidates(self, problem: Problem) -> tuple[TASP, ...]:
        """One variant for each inner size that has so many rings."""
        variants = []
        for method in super().candidates(problem):
            counts = _counts(method.size, problem)
            wanted = counts[-1] if self.rings == "auto" else self.rings
            variants += [replace(method, rings=count) for count in counts if count == wanted]
        return tuple(variants)

    def head_slices(self, problem: Problem) -> int:
        """The number of rings."""
        assert isinstance(self.rings, int), "a caller picks one of the candidates first"
        return self.rings

    def variant(self, n: int) -> str:
        """The size and the number of the inner rings, in words."""
        return f"inner {self.inner}, {self.rings} rings"

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Both levels of rings, the inner ones side by side (pass_rounds)."""
        q, kv, o = (self._slices(tensor, problem) for tensor in (Q, KV, O))
        steps = Steps()
        pass_rounds(steps, q, kv, o)
        return steps.plan("forward", problem.n, inputs=(*q, *kv), outputs=tuple(o))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Both levels of rings, the inner ones side by side (pass_rounds_backward)."""
        odoq, kv, dq, dkv = (self._slices(tensor, problem) for tensor in (ODOQ, KV, DQ, DKV))
        steps = Steps()
        pass_rounds_backward(steps, odoq, kv, dq, dkv)
        return steps.plan("backward", problem.n, inputs=(*odoq, *kv), outputs=(*dq, *dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float]:
        """As DoubleRing's in each slice; a chunk holds one slice here."""
        return {name: count * problem.head_slices for name, count in super().chunks_sent(problem, phase).items()}

    def _slices(self, tensor: Tensor, problem: Problem) -> list[Chunk]:
        """The rank's own chunk in slices; each slice of KV and dKV is at home in its own ring."""
        if not tensor.of_keys:
            return Chunk(tensor, 0, Group(1, problem.n)).slices(problem.head_slices)
        ways = [DOWN * step for step in _steps(self.size)[: problem.head_slices]]
        return [Chunk(tensor, 0, rings(problem.n, self.size, way=way), heads=i) for i, way in enumerate(ways)]


def _steps(size: int) -> list[int]:
    """The steps of rings that go round all of `size` ranks and have no link in common."""
    return [step for step in range(1, max(size, 2)) if gcd(step, size) == 1]


def _counts(size: int, problem: Problem) -> list[int]:
    """The possible numbers of rings of `size` ranks, ascending."""
    return [count for count in divisors(problem.kv_heads) if count <= len(_steps(size))]
