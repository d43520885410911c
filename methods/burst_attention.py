"""BurstAttention: KV goes round a ring of two levels forward; backward, Q, dO and two numbers a row do, and KV stays.

Source: Sun et al., "BurstAttention: An Efficient Distributed Attention Framework for Extremely Long Sequences", 2024
(its global attention optimization), and Sun et al., "BurstEngine", 2025 (rings that know the nodes). The gradients of a
block need O only by the row sums of dO * O. So the backward passes on Q, dO, lse and these sums, and dQ follows one hop
behind: 3 chunks in place of Ring's 4 where kv_heads = heads. With kv_heads below 3/4 of heads, Ring sends less. KV and
dKV stay. Both phases go round rings of two levels, as DoubleRing's KV does (methods/double_ring.py); `inner` is how
many ranks a node has.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, k = kv_heads / heads, lse and sums apart:
    forward   2k (n - 1)
    backward  2 (n - 1) for Q and dO, n - 1 for dQ

Layouts: contiguous, striped, zigzag. Refuses an inner ring whose size doesn't divide n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from sp_bench.methods.double_ring import DoubleRing, pass_rounds_on
from sp_bench.plan import (
    DKV,
    DOQ,
    DQ,
    KV,
    ODOQ,
    AttendBackward,
    Chunk,
    CostProfile,
    Grid,
    Group,
    Op,
    Plan,
    Problem,
    Steps,
    Tensor,
    send_row_sums,
)


@dataclass(frozen=True, kw_only=True)
class BurstAttention(DoubleRing):
    """A double ring of KV forward, and of Q, dO and row sums backward."""

    name: ClassVar[str] = "burst_attention"
    colour: ClassVar[str] = "#2e4f4f"
    marker: ClassVar[str] = "H"
    citation: ClassVar[str] = "Sun et al. 2024"
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*k*(n-1)", "backward": "3*(n-1)"}

    def tile_shape(self, n: int) -> tuple[int, int] | None:
        """None: a rank computes a row of the assignment matrix forward, and a column backward."""
        return None

    def homes(self, problem: Problem, phase: str) -> tuple[Group | Grid, Group | Grid]:
        """A row of the assignment matrix forward, a column backward."""
        own, everyone = super().homes(problem, phase)
        return (own, everyone) if phase == "forward" else (everyone, own)

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Round r, step s computes with the Q and dO of the rank that is r inner rings and s positions behind."""
        odoq, dq = (self._chunk(tensor, problem) for tensor in (ODOQ, DQ))
        kv, dkv = (Chunk(tensor, 0, Group(1, problem.n)) for tensor in (KV, DKV))
        steps = Steps()

        def block(_: int, index: int) -> list[Op]:
            return [AttendBackward(odoq.at(index), kv, dq.at(index), dkv)]

        pass_rounds_on(steps, [odoq], [dq], block, lanes=("q", "dq"))
        return send_row_sums(steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv)))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float]:
        """n - 1 chunks of KV; backward as many of Q with dO, and of dQ."""
        hops = problem.n - 1
        return {KV: hops} if phase == "forward" else {DOQ: hops, DQ: hops}
