"""Ring Attention: every rank keeps its Q chunk while the KV chunks go round.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3.
A rank sends KV to rank + 1, so that KV of lower ranks arrives first: on the contiguous layout a causal mask then leaves
its last blocks empty, not its first ones. KV goes this way in all other methods, too.
Backward: KV goes round the same ring, and dKV follows one hop behind and ends at its owner.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, k = kv_heads / heads:
    forward   2k (n - 1)
    backward  2k (n - 1) for KV and 2k (n - 1) for dKV. The usual form sends the dKV accumulator all the way round, one
              hop more. Here the owner's own part stays, and the last arrival is added to it.

Layouts: striped (causal, balanced), zigzag (causal, balanced), contiguous (the paper's own; if causal, rank i has
i + 1 of n blocks to do). Masks: full, causal. Refuses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    Group,
    Method,
    O,
    Plan,
    Problem,
    Q,
    Steps,
    Tensor,
    receive_next,
    reduce_next,
)


@dataclass(frozen=True, kw_only=True)
class Ring(Method):
    """Ring Attention: KV goes round a ring of all ranks."""

    name: ClassVar[str] = "ring"
    colour: ClassVar[str] = "#0173b2"
    marker: ClassVar[str] = "o"
    citation: ClassVar[str] = "Liu et al. 2023"
    by_blocks: ClassVar[bool] = True
    folds_arrivals: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*k*(n-1)", "backward": "4*k*(n-1)"}

    def tile_shape(self, n: int) -> tuple[int, int]:
        """(1, n): a rank computes a row of the assignment matrix."""
        return (1, n)

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """One round of the ring (pass_round, pass_round_backward)."""
        q, kv, o = (Chunk(tensor, 0, Group(1, problem.n, DOWN)) for tensor in (Q, KV, O))
        steps = Steps()
        pass_round(steps, q, kv, o)
        return steps.plan("forward", problem.n, inputs=(q, kv), outputs=(o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """One round of the ring (pass_round, pass_round_backward)."""
        odoq, kv, dq, dkv = (Chunk(tensor, 0, Group(1, problem.n, DOWN)) for tensor in (ODOQ, KV, DQ, DKV))
        steps = Steps()
        pass_round_backward(steps, odoq, kv, dq, dkv)
        return steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float]:
        """n - 1 chunks of KV, and backward as many of dKV."""
        hops = problem.n - 1
        return {KV: hops} if phase == "forward" else {KV: hops, DKV: hops}


def pass_round(steps: Steps, q: Chunk, kv: Chunk, o: Chunk) -> None:
    """Add one round of the ring: step s computes with KV#s while KV#(s+1) arrives."""
    size = kv.home.size
    for s in range(size):
        steps.next()
        if s + 1 < size:
            steps.do(receive_next(kv, s, lane="kv"))
        steps.do(Attend(q, kv.at(s), o))


def pass_round_backward(steps: Steps, odoq: Chunk, kv: Chunk, dq: Chunk, dkv: Chunk) -> None:
    """Add one backward round: step s computes with KV#s while KV#(s+1) arrives and dKV#(s-1) goes to the next rank."""
    size = kv.home.size
    for s in range(size):
        steps.next()
        if s + 1 < size:
            steps.do(receive_next(kv, s, lane="kv"))
        behind = reduce_next(dkv, s - 2, lane="dkv") if s >= 2 else ()
        steps.do(*behind[:1], AttendBackward(odoq, kv.at(s), dq, dkv.at(s)), *behind[1:])
    if size > 1:
        steps.next(*reduce_next(dkv, size - 2, lane="dkv"))
