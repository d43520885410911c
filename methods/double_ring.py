"""Double-Ring-Attention: KV goes round inner rings, and along outer rings from one inner ring to the next.

Source: Gu et al., "LoongTrain: Efficient Training of Long-Sequence LLMs with Head-Context Parallelism", 2024.
The n ranks form n / inner rings of `inner` consecutive ranks. During a round of the inner ring, each rank also receives
the first chunk of the next round along its outer ring, so that this hop has a whole round to arrive. Only one hop in
`inner` leaves a node. dKV is summed along the inner ring in each round, then goes on along the outer ring.

Volume, layouts and masks are Ring's (methods/ring.py). Of the volume, n / inner - 1 chunks cross nodes.
Refuses an inner ring whose size doesn't divide n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
    Grid,
    Group,
    Line,
    O,
    Op,
    Plan,
    Problem,
    Q,
    Sized,
    Steps,
    Tensor,
    divisors,
    inner,
    outer,
    receive_next,
    reduce_next,
)

Slices = Sequence[Chunk]
"""All head slices of one chunk."""


@dataclass(frozen=True, kw_only=True)
class DoubleRing(Sized):
    """Ring Attention on rings of two levels."""

    name: ClassVar[str] = "double_ring"
    colour: ClassVar[str] = "#cc78bc"
    marker: ClassVar[str] = "^"
    citation: ClassVar[str] = "Gu et al. 2024"
    by_blocks: ClassVar[bool] = True
    folds_arrivals: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*k*(n-1)", "backward": "4*k*(n-1)"}

    size_option: ClassVar[str] = "inner"

    inner: str | int = "auto"
    """Ranks of an inner ring; auto stands for every divisor of n."""

    def sizes(self, problem: Problem) -> list[int]:
        """Every divisor of n, as inner rings must be equal."""
        return divisors(problem.n)

    def size_rule(self, problem: Problem) -> str:
        """The rule for `inner`, in words that follow "must"."""
        return f"divide gpus={problem.n}"

    def variant(self, n: int) -> str:
        """The size of the inner rings, in words."""
        return f"inner {self.inner}"

    def tile_shape(self, n: int) -> tuple[int, int] | None:
        """(1, n): a rank computes a row of the assignment matrix."""
        return (1, n)

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Both levels of rings (pass_rounds)."""
        q, o, kv = Chunk(Q, 0, Group(1, problem.n)), Chunk(O, 0, Group(1, problem.n)), self._chunk(KV, problem)
        steps = Steps()
        pass_rounds(steps, [q], [kv], [o])
        return steps.plan("forward", problem.n, inputs=(q, kv), outputs=(o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Both levels of rings (pass_rounds_backward)."""
        odoq, dq = Chunk(ODOQ, 0, Group(1, problem.n)), Chunk(DQ, 0, Group(1, problem.n))
        kv, dkv = self._chunk(KV, problem), self._chunk(DKV, problem)
        steps = Steps()
        pass_rounds_backward(steps, [odoq], [kv], [dq], [dkv])
        return steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float]:
        """n - 1 chunks of KV, and backward as many of dKV."""
        hops = problem.n - 1
        return {KV: hops} if phase == "forward" else {KV: hops, DKV: hops}

    def _chunk(self, tensor: Tensor, problem: Problem) -> Chunk:
        return Chunk(tensor, 0, rings(problem.n, self.size))


def rings(n: int, size: int, stride: int = 1, way: int = DOWN) -> Grid:
    """The home of chunks that go round inner rings of `size` ranks, each `stride` from the next, and outer rings."""
    return Grid(Group(stride, size, way), Group(stride * size, n // (stride * size), DOWN))


def pass_rounds(steps: Steps, q: Slices, kv: Slices, o: Slices) -> None:
    """Add all rounds: round r, step s uses the KV of the rank that is r inner rings and s positions behind.

    Each slice of the heads goes round the inner ring of its own home, on a lane of its own.
    """
    for r in range(outer(kv[0]).group.size):
        rings_of_kv = [inner(chunk, r) for chunk in kv]
        for s in range(rings_of_kv[0].group.size):
            _receive(steps, kv, rings_of_kv, r, s)
            steps.do(*(Attend(q_i, ring.at(s), o_i) for q_i, ring, o_i in zip(q, rings_of_kv, o, strict=True)))


def pass_rounds_backward(steps: Steps, odoq: Slices, kv: Slices, dq: Slices, dkv: Slices) -> None:
    """Add all backward rounds: dKV follows KV one hop behind; after each round its sum takes an outer hop."""

    def block(i: int, index: int) -> list[Op]:
        return [AttendBackward(odoq[i], kv[i].at(index), dq[i], dkv[i].at(index))]

    pass_rounds_on(steps, kv, dkv, block, lanes=("kv", "dkv"))


def pass_rounds_on(
    steps: Steps, moved: Slices, partial: Slices, block: Callable[[int, int], list[Op]], lanes: tuple[str, str]
) -> None:
    """Add all rounds of chunks that move and of partial sums that follow them and end at their owners.

    `block(i, index)` is what computes with chunk `index` of slice i; `lanes` are names for chunks and sums.
    """
    ahead, behind = lanes
    arriving = []
    for r in range(outer(moved[0]).group.size):
        lines, of_moved = [inner(chunk, r) for chunk in partial], [inner(chunk, r) for chunk in moved]
        for s in range(lines[0].group.size):
            _receive(steps, moved, of_moved, r, s, ahead)
            sums = [reduce_next(line, s - 2, _lane(f"inner {behind}", i)) for i, line in enumerate(lines) if s >= 2]
            steps.do(*(hop for hop, _ in sums))
            for i, line in enumerate(lines):
                steps.do(*block(i, line.at(s).index))
            steps.do(*(fold for _, fold in sums))
        for i, line in enumerate(lines) if lines[0].group.size > 1 else ():
            steps.do(*reduce_next(line, line.group.size - 2, _lane(f"inner {behind}", i)))
        if r:
            steps.do(*arriving)
            sums = [reduce_next(outer(chunk), r - 1, lane=f"outer {behind}", arrival=2) for chunk in partial]
            steps.do(*(hop for hop, _ in sums))
            arriving = [fold for _, fold in sums]
    steps.do(*arriving)


def _receive(steps: Steps, moved: Slices, lines: Sequence[Line], r: int, s: int, lane: str = "kv") -> None:
    """Open a step: receive the inner rings' next chunks, and at a round's start the next round's first."""
    steps.next()
    if s == 0 and r + 1 < outer(moved[0]).group.size:
        steps.do(*(receive_next(outer(chunk), r, lane=f"outer {lane}") for chunk in moved))
    if s + 1 < lines[0].group.size:
        steps.do(*(receive_next(line, s, _lane(f"inner {lane}", i)) for i, line in enumerate(lines)))


def _lane(name: str, i: int) -> str:
    return f"{name} {i}" if i else name
