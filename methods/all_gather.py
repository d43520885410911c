"""All-gather attention: every rank gathers all of KV, some heads at a time, and keeps its Q.

Source: Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2 (context parallelism). Gathering a few key heads
at a time, so that a slice arrives while the one before is computed with, is the form of ring-flash-attention's Llama 3
variant. A slice is gathered as a whole before blocks use what came in, and at most two are held; the rank's own KV is
computed with meanwhile. Backward: KV is gathered again, and the dKV that a rank has for all others is added up along a
reduce-scatter, one slice behind.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, k = kv_heads / heads:
    forward   2k (n - 1)
    backward  2k (n - 1) for KV and 2k (n - 1) for dKV
It is Ring's; unlike Ring it holds all of KV, and its transfers needn't keep step with the blocks.

Layouts: zigzag (Llama 3's), striped, contiguous. Refuses a stride that doesn't divide kv_heads.
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
    Group,
    Plan,
    Problem,
    Sized,
    Steps,
    all_gather,
    divisors,
    reduce_next,
)

MOST_HOPS = 512
"""Of a phase: finer slices hide more of the first one, and then add about as much latency as they hide."""


@dataclass(frozen=True, kw_only=True)
class AllGather(Sized):
    """KV gathered in slices of `stride` key heads."""

    name: ClassVar[str] = "all_gather"
    citation: ClassVar[str] = "Llama Team 2024"
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*k*(n-1)", "backward": "4*k*(n-1)"}

    size_option: ClassVar[str] = "stride"

    stride: str | int = "auto"
    """Key heads that are gathered at a time; auto stands for every divisor of kv_heads that `candidates` leaves."""

    def sizes(self, problem: Problem) -> list[int]:
        """Slices must be equal."""
        return divisors(problem.kv_heads)

    def size_rule(self, problem: Problem) -> str:
        """In words."""
        return f"divide kv_heads={problem.kv_heads}"

    def candidates(self, problem: Problem) -> tuple[AllGather, ...]:
        """One for each stride, but for those whose slices take more than MOST_HOPS hops, if any takes fewer."""
        every = super().candidates(problem)
        return tuple(m for m in every if (problem.n - 1) * m.head_slices(problem) <= MOST_HOPS) or every[-1:]

    def head_slices(self, problem: Problem) -> int:
        """kv_heads / stride."""
        return problem.kv_heads // self.size

    def variant(self, n: int) -> str:
        """The stride."""
        return f"stride {self.stride}"

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Step i: gather slice i, beside its own block and those of slice i - 1 that came in."""
        q, kv, o = (self._slices(tensor, problem) for tensor in ("q", "kv", "o"))
        steps = Steps()
        for i in range(problem.head_slices + 1):
            self._gather(steps, kv, i)
            steps.do(*(Attend(q[j], kv[j].at(s), o[j]) for j, s in _blocks(problem, i)))
        return steps.plan("forward", problem.n, inputs=(*q, *kv), outputs=tuple(o))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The same, while the dKV of slice i - 2 is added up, a hop for each block."""
        odoq, kv, dq, dkv = (self._slices(tensor, problem) for tensor in ("odoq", "kv", "dq", "dkv"))
        steps = Steps()
        for i in range(problem.head_slices + 2):
            self._gather(steps, kv, i)
            blocks = [AttendBackward(odoq[j], kv[j].at(s), dq[j], dkv[j].at(s)) for j, s in _blocks(problem, i)]
            for s in range(problem.n):
                behind = reduce_next(dkv[i - 2], s, lane="dkv") if i >= 2 and s + 1 < problem.n else ()
                steps.do(*behind[:1], *blocks[s : s + 1], *behind[1:])
        return steps.plan("backward", problem.n, inputs=(*odoq, *kv), outputs=(*dq, *dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[str, float]:
        """As Ring; a chunk is a slice here, and there are so many times more."""
        hops = (problem.n - 1) * problem.head_slices
        return {"kv": hops} if phase == "forward" else {"kv": hops, "dkv": hops}

    def _slices(self, tensor: str, problem: Problem) -> list[Chunk]:
        """The rank's own chunk, by slices of its heads."""
        return Chunk(tensor, 0, Group(1, problem.n, DOWN)).slices(problem.head_slices)

    def _gather(self, steps: Steps, kv: list[Chunk], i: int) -> None:
        """Open step i: gather slice i."""
        steps.next()
        steps.do(*(all_gather(kv[i], lane="kv") if i < len(kv) else []))


def _blocks(problem: Problem, i: int) -> list[tuple[int, int]]:
    """(slice, hops that its KV has come) of step i's blocks: first with what came last, and so is there when all is.

    A rank needn't wait for its own KV.
    """
    gathered = [(i - 1, s) for s in reversed(range(1, problem.n))] if 1 <= i <= problem.head_slices else []
    return gathered + [(i, 0)] * (i < problem.head_slices)
