"""Double-Ring-Attention: KV goes round small inner rings, and from one inner ring to the next along outer rings.

Source: Gu et al., "LoongTrain: Efficient Training of Long-Sequence LLMs with Head-Context Parallelism", 2024.
The n ranks are n / inner rings of `inner` consecutive ranks. While an inner ring passes its KV chunks round, each rank
already receives the first chunk of the next round along its outer ring, which has a whole round to arrive in: only one
hop in `inner` leaves a node. dKV is summed along the inner ring after each round and goes on along the outer one.

Volume is Ring's (methods/ring.py), forward and backward, and so are layouts and masks; of it, n / inner - 1 chunks
cross nodes. Refuses an inner ring that doesn't divide n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from sp_bench.plan import (
    DOWN,
    Attend,
    AttendBackward,
    Chunk,
    CostProfile,
    Grid,
    Group,
    Plan,
    Problem,
    Sized,
    Steps,
    divisors,
    inner,
    outer,
    receive_next,
    reduce_next,
)


@dataclass(frozen=True, kw_only=True)
class DoubleRing(Sized):
    """Ring Attention on rings of two levels."""

    name: ClassVar[str] = "double_ring"
    citation: ClassVar[str] = "Gu et al. 2024"
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*k*(n-1)", "backward": "4*k*(n-1)"}

    size_option: ClassVar[str] = "inner"

    inner: str | int = "auto"
    """Ranks of an inner ring; auto stands for every divisor of n."""

    def sizes(self, problem: Problem) -> list[int]:
        """Inner rings must be equal."""
        return divisors(problem.n)

    def size_rule(self, problem: Problem) -> str:
        """In words."""
        return f"divide gpus={problem.n}"

    def variant(self, n: int) -> str:
        """The size of the inner rings."""
        return f"inner {self.inner}"

    def tile_shape(self, n: int) -> tuple[int, int]:
        """A row of the assignment matrix."""
        return (1, n)

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Round r, step s: compute with the KV of the rank s before in the inner ring r before."""
        q, o, kv = Chunk("q", 0, Group(1, problem.n)), Chunk("o", 0, Group(1, problem.n)), self._chunk("kv", problem)
        steps = Steps()
        for r in range(outer(kv).group.size):
            for s in range(inner(kv, r).group.size):
                self._receive(steps, kv, r, s)
                steps.do(Attend(q, inner(kv, r).at(s), o))
        return steps.plan("forward", problem.n, inputs=(q, kv), outputs=(o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """KV moves as forward. In each round dKV follows it one hop behind; what a round summed up goes outward."""
        odoq, dq = Chunk("odoq", 0, Group(1, problem.n)), Chunk("dq", 0, Group(1, problem.n))
        kv, dkv = self._chunk("kv", problem), self._chunk("dkv", problem)
        steps, arriving = Steps(), []
        for r in range(outer(kv).group.size):
            line = inner(dkv, r)
            for s in range(line.group.size):
                self._receive(steps, kv, r, s)
                behind = reduce_next(line, s - 2, lane="inner dkv") if s >= 2 else ()
                steps.do(*behind[:1], AttendBackward(odoq, inner(kv, r).at(s), dq, line.at(s)), *behind[1:])
            if line.group.size > 1:
                steps.do(*reduce_next(line, line.group.size - 2, lane="inner dkv"))
            if r:
                steps.do(*arriving)
                hop, fold = reduce_next(outer(dkv), r - 1, lane="outer dkv", arrival=2)
                steps.do(hop)
                arriving = [fold]
        steps.do(*arriving)
        return steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[str, float]:
        """As Ring."""
        hops = problem.n - 1
        return {"kv": hops} if phase == "forward" else {"kv": hops, "dkv": hops}

    def _chunk(self, tensor: str, problem: Problem) -> Chunk:
        return Chunk(tensor, 0, Grid(Group(1, self.size, DOWN), Group(self.size, problem.n // self.size, DOWN)))

    def _receive(self, steps: Steps, kv: Chunk, r: int, s: int) -> None:
        """Open a step: the next round's first KV at the start of a round, and the inner ring's next one."""
        steps.next()
        if s == 0 and r + 1 < outer(kv).group.size:
            steps.do(receive_next(outer(kv), r, lane="outer kv"))
        if s + 1 < inner(kv, r).group.size:
            steps.do(receive_next(inner(kv, r), s, lane="inner kv"))
