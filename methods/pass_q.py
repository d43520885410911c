"""Pass-Q ring attention: KV stays, Q goes round the ring, and an all-to-all at the end returns the partial outputs.

Source: Yang et al., "Context Parallelism for Scalable Million-Token Inference", 2024, section 3.5.3: the ring passes Q,
then an all-to-all returns every rank's partial (out, lse) to the owners of the queries. A rank computes a column of the
assignment matrix. The backward is ours, as the paper is about inference: OdOQ goes round, dQ returns at the end, dKV
stays.

Volume sent by each GPU, in chunks, lse apart: forward (n - 1) Q + (n - 1) O; backward 3 (n - 1) OdOQ + (n - 1) dQ.
With `row_sums`, rowsum(dO * O) goes round in place of O, which the backward doesn't need: 2 (n - 1) for 3 (n - 1).
It doesn't depend on kv_heads: the fewer there are, the further Pass-Q falls behind Ring.

Layouts: zigzag, striped, contiguous. Refuses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sp_bench.plan import (
    DKV,
    DQ,
    KV,
    ODOQ,
    Attend,
    AttendBackward,
    Chunk,
    CostProfile,
    Grid,
    Group,
    Join,
    Method,
    O,
    Op,
    Plan,
    Problem,
    Q,
    Steps,
    Tensor,
    receive_next,
    return_home,
    send_row_sums,
    without_o,
)


@dataclass(frozen=True, kw_only=True)
class PassQ(Method):
    """Pass-Q ring attention."""

    name: ClassVar[str] = "pass_q"
    colour: ClassVar[str] = "#fbafe4"
    marker: ClassVar[str] = "v"
    citation: ClassVar[str] = "Yang et al. 2024"
    by_blocks: ClassVar[bool] = True
    folds_arrivals: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*(n-1)", "backward": "(3 + o)*(n-1)"}

    takes_caches: ClassVar[bool] = True

    row_sums: bool = False
    """Whether the backward sends rowsum(dO * O) in place of O."""

    def variant(self, n: int) -> str:
        """Whether row sums travel, in words."""
        return super().variant(n) + (" row sums" if self.row_sums else "")

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """o is 1 if O travels in the backward, else 0."""
        return {"o": 1 - self.row_sums}

    def tile_shape(self, n: int) -> tuple[int, int]:
        """(n, 1): a rank computes a column of the assignment matrix."""
        return (n, 1)

    def homes(self, problem: Problem, phase: str) -> tuple[Group | Grid, Group | Grid]:
        """All ranks' queries, and its own keys."""
        return Group(1, problem.n), Group(1, 1)

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Step s computes with Q#s while Q#(s+1) arrives. At the end every O#s goes to its owner."""
        ring = Group(1, problem.n)
        q, kv, o = (Chunk(tensor, 0, ring) for tensor in (Q, KV, O))
        steps = Steps()
        self._ring(steps, q, [[Attend(q.at(s), kv, o.at(s))] for s in range(problem.n)])
        self._all_home(steps, o)
        return steps.plan("forward", problem.n, inputs=(q, kv), outputs=(o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Step s computes with OdOQ#s while OdOQ#(s+1) arrives. At the end every dQ#s goes to its owner."""
        ring = Group(1, problem.n)
        odoq, kv, dq, dkv = (Chunk(tensor, 0, ring) for tensor in (ODOQ, KV, DQ, DKV))
        steps = Steps()
        self._ring(steps, odoq, [[AttendBackward(odoq.at(s), kv, dq.at(s), dkv)] for s in range(problem.n)])
        self._all_home(steps, dq)
        plan = steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv))
        return send_row_sums(plan) if self.row_sums else plan

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float]:
        """n - 1 chunks of Q (OdOQ), and as many of O (dQ)."""
        hops, sent = problem.n - 1, without_o(ODOQ) if self.row_sums else ODOQ
        return {Q: hops, O: hops} if phase == "forward" else {sent: hops, DQ: hops}

    def _ring(self, steps: Steps, q: Chunk, blocks: Sequence[Sequence[Op]]) -> None:
        for s, block in enumerate(blocks):
            steps.next()
            if s + 1 < len(blocks):
                steps.do(receive_next(q, s, lane="q"))
            steps.do(*block)

    def _all_home(self, steps: Steps, partial: Chunk) -> None:
        """The all-to-all at the end: one pairwise exchange after another, none before the last block has ended."""
        steps.next()
        homeward = [return_home(partial.at(s), lane="o") for s in range(1, partial.home.size)]
        if homeward:
            steps.do(Join(), *(hop for hop, _ in homeward), *(fold for _, fold in homeward))
