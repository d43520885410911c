"""Decode context parallelism: keys stay, Q is gathered, and one block later partial outputs go to their owners.

Source: DCP of vLLM (`--decode-context-parallel-size`), and SGLang's: the cache is sharded by tokens, Q is all-gathered,
and outputs are merged by their lse and reduce-scattered. It is pass-Q (methods/pass_q.py) without its ring: two
collectives and one kernel call, where a ring would have n small ones. It suits queries that are few beside the keys.
The backward is ours: OdOQ is gathered, dQ reduce-scattered, and dKV stays.

The block is one operation where the mask leaves rectangles (plan.fuse.one_block), as a decode step's does.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, lse apart:
    forward   (n - 1) Q + (n - 1) O
    backward  3 (n - 1) OdOQ + (n - 1) dQ
Where n doesn't divide N, the library's collectives pad chunks to the longest.

Layouts: zigzag, striped, contiguous. Refuses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from sp_bench.plan import (
    DKV,
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
    Op,
    Plan,
    Problem,
    Q,
    Steps,
    Tensor,
    all_gather,
    one_block,
    reduce_scatter,
)


@dataclass(frozen=True, kw_only=True)
class DCP(CollectiveMethod):
    """Gathered queries, keys that stay, and outputs that are reduced."""

    name: ClassVar[str] = "dcp"
    citation: ClassVar[str] = "vLLM 2025"
    gathers: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*(n-1)", "backward": "4*(n-1)"}
    takes_caches: ClassVar[bool] = True

    def tile_shape(self, n: int) -> tuple[int, int]:
        """(n, 1): a rank computes a column of the assignment matrix."""
        return (n, 1)

    def variant(self, n: int) -> str:
        """Empty: there is one variant, but for how its collectives are made."""
        return ""

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Gather Q, compute all of it with the rank's own KV, reduce O."""
        q, kv, o = self._chunks(problem, Q, KV, O)
        library, steps = self.by_library(problem), Steps()
        steps.next(*(() if problem.queries_everywhere else all_gather(q, lane="q", library=library)))
        steps.do(*one_block([Attend(q.at(u), kv, o.at(u)) for u in range(problem.n)], problem))
        steps.next(*self._reduced(o, problem))
        queries = [q.at(u) for u in range(problem.n)] if problem.queries_everywhere else [q]
        return steps.plan("forward", problem.n, inputs=(*queries, kv), outputs=(o,))

    def _reduced(self, o: Chunk, problem: Problem) -> list[Op]:
        """The operations that bring all partial outputs to their owners."""
        return reduce_scatter(o, lane="o", library=self.by_library(problem))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Gather OdOQ, compute all of it with the rank's own KV, reduce dQ."""
        odoq, kv, dq, dkv = self._chunks(problem, ODOQ, KV, DQ, DKV)
        library, steps = self.by_library(problem), Steps()
        steps.next(*all_gather(odoq, lane="q", library=library))
        blocks = [AttendBackward(odoq.at(u), kv, dq.at(u), dkv) for u in range(problem.n)]
        steps.do(*one_block(blocks, problem))
        steps.next(*reduce_scatter(dq, lane="o", library=library))
        return steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """n - 1 chunks of Q (OdOQ), and as many of O (dQ)."""
        tensors = (Q, O) if phase == "forward" else (ODOQ, DQ)
        return {tensor: (problem.n - 1) * self.padding(problem, tensor) for tensor in tensors}

    def _chunks(self, problem: Problem, *tensors: Tensor) -> list[Chunk]:
        return [Chunk(tensor, 0, Group(1, problem.n)) for tensor in tensors]
