"""All-gather attention: every rank keeps its Q and gathers all of KV, a few key heads at a time.

Source: Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2 (context parallelism). Gathering a slice of key
heads while the blocks of the slice before are computed is ring-flash-attention's Llama 3 variant. Blocks use a slice
once all of it has arrived, except for the rank's own KV, which needs no transfer. At most two slices are held.
Backward: KV is gathered again, and dKV is summed by a reduce-scatter that runs one slice behind.
Both are the library's collectives; with `collectives=messages` they are hops of a ring.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, k = kv_heads / heads:
    forward   2k (n - 1)
    backward  2k (n - 1) for KV and 2k (n - 1) for dKV
Where n doesn't divide N, the library's collectives pad chunks to the longest. This is Ring's volume. Unlike Ring, a
rank holds all of KV, and transfers needn't keep step with the blocks.

Layouts: zigzag (Llama 3's), striped, contiguous. Refuses a stride that doesn't divide kv_heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
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
    CollectiveMethod,
    CostProfile,
    Group,
    O,
    Plan,
    Problem,
    Q,
    Sized,
    Steps,
    Tensor,
    all_gather,
    divisors,
    reduce_next,
    reduce_scatter,
)

MOST_HOPS = 512
"""Most hops, or gathers, of a phase. Beyond it, finer slices add about as much latency as they hide."""


@dataclass(frozen=True, kw_only=True)
class AllGatherKV(Sized, CollectiveMethod):
    """All-gather attention with KV in slices of `stride` key heads."""

    name: ClassVar[str] = "all_gather"
    colour: ClassVar[str] = "#ece133"
    marker: ClassVar[str] = "P"
    citation: ClassVar[str] = "Llama Team 2024"
    gathers: ClassVar[bool] = True
    by_blocks: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*k*(n-1)", "backward": "4*k*(n-1)"}

    size_option: ClassVar[str] = "stride"

    stride: str | int = "auto"
    """Key heads gathered at a time; auto stands for every divisor of kv_heads that `candidates` keeps."""

    def sizes(self, problem: Problem) -> list[int]:
        """Every divisor of kv_heads, as slices must be equal."""
        return divisors(problem.kv_heads)

    def size_rule(self, problem: Problem) -> str:
        """The rule for `stride`, in words that follow "must"."""
        return f"divide kv_heads={problem.kv_heads}"

    def candidates(self, problem: Problem) -> tuple[AllGatherKV, ...]:
        """One variant per stride that takes at most MOST_HOPS hops; the largest stride if none does."""
        every = super().candidates(problem)
        each = 1 if self.by_library(problem) else problem.n - 1
        return tuple(m for m in every if each * m.head_slices(problem) <= MOST_HOPS) or every[-1:]

    def head_slices(self, problem: Problem) -> int:
        """The number of head slices: kv_heads / stride."""
        return problem.kv_heads // self.size

    def variant(self, n: int) -> str:
        """The stride, in words."""
        return f"stride {self.stride}"

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Step i gathers slice i, and computes slice i's own block and the remaining blocks of slice i - 1."""
        q, kv, o = (self._slices(tensor, problem) for tensor in (Q, KV, O))
        steps = Steps()
        for i in range(problem.head_slices + 1):
            self._gather(steps, kv, i, problem)
            steps.do(*(Attend(q[j], kv[j].at(s), o[j]) for j, s in _blocks(problem, i)))
        return steps.plan("forward", problem.n, inputs=(*q, *kv), outputs=tuple(o))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Step i is as in the forward, and also reduce-scatters the dKV of slice i - 2; hops, one per block."""
        odoq, kv, dq, dkv = (self._slices(tensor, problem) for tensor in (ODOQ, KV, DQ, DKV))
        steps = Steps()
        for i in range(problem.head_slices + 2):
            self._gather(steps, kv, i, problem)
            hops = not self.by_library(problem)
            behind = reduce_scatter(dkv[i - 2], lane="dkv", library=True) if i >= 2 and not hops else []
            steps.do(*behind[:1])
            blocks = [AttendBackward(odoq[j], kv[j].at(s), dq[j], dkv[j].at(s)) for j, s in _blocks(problem, i)]
            for s in range(problem.n):
                hop = reduce_next(dkv[i - 2], s, lane="dkv") if hops and i >= 2 and s + 1 < problem.n else ()
                steps.do(*hop[:1], *blocks[s : s + 1], *hop[1:])
            steps.do(*behind[1:])
        return steps.plan("backward", problem.n, inputs=(*odoq, *kv), outputs=(*dq, *dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """n - 1 chunks of KV per head slice, and backward as many of dKV; a chunk holds one slice here."""
        hops = (problem.n - 1) * problem.head_slices * self.padding(problem, KV)
        return {KV: hops} if phase == "forward" else {KV: hops, DKV: hops}

    def _slices(self, tensor: Tensor, problem: Problem) -> list[Chunk]:
        return Chunk(tensor, 0, Group(1, problem.n, DOWN)).slices(problem.head_slices)

    def _gather(self, steps: Steps, kv: list[Chunk], i: int, problem: Problem) -> None:
        steps.next(*(all_gather(kv[i], lane="kv", library=self.by_library(problem)) if i < len(kv) else []))


def _blocks(problem: Problem, i: int) -> list[tuple[int, int]]:
    """(slice, hops that its KV has travelled) of step i's blocks, the slice that was gathered before first.

    Blocks use the last arrival first. The rank's own KV, 0 hops, needs no wait.
    """
    gathered = [(i - 1, s) for s in reversed(range(1, problem.n))] if 1 <= i <= problem.head_slices else []
    return gathered + [(i, 0)] * (i < problem.head_slices)
