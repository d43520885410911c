"""Ring Attention: every rank keeps its Q chunk while the KV chunks go round.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3.
Backward: the same ring for KV, while dKV follows it one hop behind and ends at its owner.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, k = kv_heads / heads:
    forward   2k (n - 1)
    backward  2k (n - 1) for KV and 2k (n - 1) for dKV. The usual form has one hop more: it carries an accumulator all
              the way round. Here the owner's own part never travels: what arrives last is added to it.

Layouts: striped (causal, balanced), zigzag (causal, balanced), contiguous (the paper's own; if causal, rank i has
i + 1 of n blocks to do). Masks: full, causal. Refuses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from sp_bench.plan import (
    Attend,
    AttendBackward,
    Chunk,
    CostProfile,
    Group,
    Method,
    Plan,
    Problem,
    Steps,
    receive_next,
    reduce_next,
)


@dataclass(frozen=True, kw_only=True)
class Ring(Method):
    """Ring Attention."""

    name: ClassVar[str] = "ring"
    citation: ClassVar[str] = "Liu et al. 2023"
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*k*(n-1)", "backward": "4*k*(n-1)"}

    def tile_shape(self, n: int) -> tuple[int, int]:
        """A row of the assignment matrix."""
        return (1, n)

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Step s: compute with KV#s while KV#(s+1) comes in."""
        ring = Group(1, problem.n)
        q, kv, o = (Chunk(tensor, 0, ring) for tensor in ("q", "kv", "o"))
        steps = Steps()
        for s in range(problem.n):
            steps.next()
            if s + 1 < problem.n:
                steps.do(receive_next(kv, s, lane="kv"))
            steps.do(Attend(q, kv.at(s), o))
        return steps.plan("forward", problem.n, inputs=(q, kv), outputs=(o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Step s: compute with KV#s while KV#(s+1) comes in and dKV#(s-1) goes on to the rank that adds to it next."""
        ring = Group(1, problem.n)
        odoq, kv, dq, dkv = (Chunk(tensor, 0, ring) for tensor in ("odoq", "kv", "dq", "dkv"))
        steps = Steps()
        for s in range(problem.n):
            steps.next()
            if s + 1 < problem.n:
                steps.do(receive_next(kv, s, lane="kv"))
            if s < 2:
                steps.do(AttendBackward(odoq, kv.at(s), dq, dkv.at(s)))
            else:
                hop, fold = reduce_next(dkv, s - 2, lane="dkv")
                steps.do(hop, AttendBackward(odoq, kv.at(s), dq, dkv.at(s)), fold)
        if problem.n > 1:
            steps.next()
            steps.do(*reduce_next(dkv, problem.n - 2, lane="dkv"))
        return steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[str, float]:
        """All KV chunks but its own, and backward as many dKV chunks."""
        hops = problem.n - 1
        return {"kv": hops} if phase == "forward" else {"kv": hops, "dkv": hops}
