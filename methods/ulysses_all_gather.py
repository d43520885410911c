"""Ulysses x all-gather: DeepSpeed-Ulysses inside groups of consecutive ranks, all-gather of KV between the groups.

Source: USP (Fang, Zhao, 2024) with Llama 3's context parallelism (Llama Team, "The Llama 3 Herd of Models", 2024,
section 3.3.2) in place of the ring. We know of no paper on the pair: this is its natural form. The n ranks form n / u
groups of u = `ulysses`. After the all-to-alls, ranks with the same heads gather all of KV by heads. Blocks wait for the
whole gather, as a library's collective gives its result at once; only the block with the rank's own KV needs no wait.
Backward: KV is gathered again, and dKV is reduce-scattered after the last block.

Gather and reduce-scatter are the library's; with `collectives=messages` they are hops of a ring. Volume, layouts, masks
and refusals are USP's (methods/usp.py). Unlike USP, a rank holds all of KV of its heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from sp_bench.methods.usp import USP
from sp_bench.plan import DKV, KV, Attend, AttendBackward, Chunk, Problem, Steps, Tensor, all_gather, reduce_scatter


@dataclass(frozen=True, kw_only=True)
class UlyssesAllGather(USP):
    """Ulysses inside groups, all-gather of KV between them."""

    name: ClassVar[str] = "ulysses_all_gather"
    colour: ClassVar[str] = "#6b4c94"
    marker: ClassVar[str] = "d"
    citation: ClassVar[str] = "Llama Team 2024, Fang and Zhao 2024"
    gathers: ClassVar[bool] = True

    def variant(self, n: int) -> str:
        """The Ulysses degree and the ranks of a gather, in words."""
        u = self.head_parallel(n)
        return f"ulysses {u} x all-gather {n // u}"

    def partials_folded(self, problem: Problem, phase: str, tensor: Tensor) -> int:
        """None: the library adds them up, or hops that only `collectives=messages` has."""
        return 0

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """USP's, with KV and dKV padded where the library gathers them."""
        others = problem.n // self.head_parallel(problem.n) - 1
        gathered = (KV.by_heads,) if phase == "forward" else (KV.by_heads, DKV.by_heads)
        more = {tensor: others * (self.padding(problem, tensor) - 1) for tensor in gathered}
        return {tensor: count + more.get(tensor, 0) for tensor, count in super().chunks_sent(problem, phase).items()}

    def _attend(self, problem: Problem, steps: Steps, *chunks: Chunk) -> None:
        q_h, kv_h, o_h = chunks
        steps.next(*all_gather(kv_h, lane="kv", library=self.by_library(problem)), Attend(q_h, kv_h, o_h))
        steps.next(*(Attend(q_h, kv_h.at(s), o_h) for s in _last_first(kv_h)))

    def _attend_backward(self, problem: Problem, steps: Steps, *chunks: Chunk) -> None:
        odoq_h, kv_h, dq_h, dkv_h = chunks
        steps.next(
            *all_gather(kv_h, lane="kv", library=self.by_library(problem)), AttendBackward(odoq_h, kv_h, dq_h, dkv_h)
        )
        steps.next(*(AttendBackward(odoq_h, kv_h.at(s), dq_h, dkv_h.at(s)) for s in _last_first(kv_h)))
        steps.next(*reduce_scatter(dkv_h, lane="dkv", library=self.by_library(problem)))


def _last_first(kv_h: Chunk) -> list[int]:
    """Hops that other ranks' KV has travelled. The last arrival is used first, so that blocks wait for the gather."""
    return list(range(kv_h.home.size - 1, 0, -1))
