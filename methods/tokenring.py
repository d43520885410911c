"""TokenRing: Q goes round the ring one way, and partial outputs go straight to their owners the other way.

Source: Wang et al., "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via Bidirectional
Communication", 2024, algorithm 1. At step s a rank computes with the Q chunk of the rank s behind it, sends that Q to
the next rank, and on a second lane sends the partial (out, lse) of the step before to its owner.

Backward (the paper has none): OdOQ moves like Q, dQ returns like the partial outputs, KV and dKV stay.

nodes > 1 is the hybrid of case study III: TokenRing runs among the ranks of a node, once for each KV chunk that Ring
Attention brings from another node. dKV follows KV from node to node as in Ring.

Volume sent by each GPU, m = n / nodes ranks in a node, in chunks, k = kv_heads / heads, lse apart:
    forward   nodes (m - 1) Q + nodes (m - 1) O + 2k (nodes - 1) KV; with one node (n - 1) Q + (n - 1) O
    backward  3 nodes (m - 1) OdOQ + nodes (m - 1) dQ + 2k (nodes - 1) KV + 2k (nodes - 1) dKV

On the zigzag layout with a causal mask (section 3.3.2 of the paper), `trim` leaves out the rows that no rank needs any
more. The whole Q chunk of rank i sees KV chunks below i, and only its second half sees those above. Q therefore moves
to lower ranks here: all of it as far as rank 0, then only the second half. (To higher ranks, the first half would be
needed last.) Partial outputs have the rows that were computed. On average a rank then sends the share s = 3/4 of the Q
and O above.

Layouts: zigzag (the paper's for causal), striped, contiguous. Refuses nodes that don't divide n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from sp_bench.plan import (
    DKV,
    DOWN,
    DQ,
    KV,
    ODOQ,
    UP,
    Attend,
    AttendBackward,
    Chunk,
    CostProfile,
    Grid,
    Group,
    Method,
    O,
    Op,
    Pass,
    Plan,
    Problem,
    Q,
    Steps,
    Tensor,
    divisors,
    impossible,
    receive_next,
    reduce_next,
    return_home,
)


@dataclass(frozen=True, kw_only=True)
class TokenRing(Method):
    """TokenRing inside nodes of n / nodes ranks, Ring Attention between nodes."""

    name: ClassVar[str] = "tokenring"
    colour: ClassVar[str] = "#029e73"
    marker: ClassVar[str] = "X"
    citation: ClassVar[str] = "Wang et al. 2024"
    by_blocks: ClassVar[bool] = True
    folds_arrivals: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {
        "forward": "2*s*(n-nodes) + 2*k*(nodes-1)",
        "backward": "4*s*(n-nodes) + 4*k*(nodes-1)",
    }

    nodes: int = 1
    """How many nodes exchange KV by Ring Attention; 1 is TokenRing among all ranks."""
    trim: bool = True
    """With zigzag and a causal mask, send only the rows that are needed."""

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError where `nodes` doesn't divide n."""
        if problem.n % self.nodes:
            raise impossible(f"method.nodes={self.nodes}", f"must divide gpus={problem.n}", divisors(problem.n))

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Algorithm 1, once for each node's KV."""
        ring, across = self._groups(problem)
        q, o, kv = Chunk(Q, 0, ring), Chunk(O, 0, ring), Chunk(KV, 0, across)
        steps, move = Steps(), self._move(problem)
        for node in range(across.size):
            blocks = [Attend(q.at(-move * s), kv.at(node), o.at(-move * s)) for s in range(ring.size)]
            self._round(steps, problem, blocks, self._bring(kv, node))
        return steps.plan("forward", problem.n, inputs=(q, kv), outputs=(o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Algorithm 1 with OdOQ and dQ. After each round, dKV of that round's KV goes on to the next node."""
        ring, across = self._groups(problem)
        odoq, dq = Chunk(ODOQ, 0, ring), Chunk(DQ, 0, ring)
        kv, dkv = Chunk(KV, 0, across), Chunk(DKV, 0, across)
        steps, unfolded, move = Steps(), [], self._move(problem)
        for node in range(across.size):
            blocks = [
                AttendBackward(odoq.at(-move * s), kv.at(node), dq.at(-move * s), dkv.at(node))
                for s in range(ring.size)
            ]
            self._round(steps, problem, blocks, self._bring(kv, node))
            if node:
                steps.do(*unfolded)
                hop, fold = reduce_next(dkv, node - 1, lane="dkv")
                steps.do(hop)
                unfolded = [fold]
        steps.do(*unfolded)
        return steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv))

    def homes(self, problem: Problem, phase: str) -> tuple[Group | Grid, Group | Grid]:
        """The queries of its node, and the keys of the ranks with its position in every node."""
        return self._groups(problem)

    def variant(self, n: int) -> str:
        """The number of nodes if more than one, and `untrimmed` if `trim` is off."""
        return ", ".join([f"{self.nodes} nodes"] * (self.nodes > 1) + ["untrimmed"] * (not self.trim))

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The number of nodes, and the share s of Q that is sent."""
        return {"nodes": self.nodes, "s": float(self._share(problem))}

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """The header's formulas, by tensor."""
        ring, across = self._groups(problem)
        within, between = self._share(problem) * across.size * (ring.size - 1), across.size - 1
        if phase == "forward":
            return {Q: within, O: within, KV: between}
        return {ODOQ: within, DQ: within, KV: between, DKV: between}

    def _trims(self, problem: Problem) -> bool:
        # A history that not all ranks have some of is seen by queries that see nothing behind it.
        return self.trim and problem.blocks.skips_queries and problem.layout.name == "zigzag" and not problem.history

    def _share(self, problem: Problem) -> Fraction:
        """The mean share of Q's rows sent to other ranks: 3/4 where all pieces are equal, 1 without trimming."""
        if not self._trims(problem) or problem.n == self.nodes:
            return Fraction(1)
        n, ring, sent = problem.n, problem.n // self.nodes, 0
        for rank in range(n):  # ranks of one place in all nodes exchange no Q
            before, behind = rank - rank // ring, n - 1 - rank - (self.nodes - 1 - rank // ring)
            sent += before * problem.rows_seen(rank, 0) + behind * problem.rows_seen(rank, n - 1)
        return Fraction(sent, (n - self.nodes) * problem.seqlen)

    def _move(self, problem: Problem) -> int:
        return DOWN if self._trims(problem) else UP

    def _groups(self, problem: Problem) -> tuple[Group, Group]:
        """The ring inside a node, and the ring of the ranks with the same position in every node."""
        inside = problem.n // self.nodes
        return Group(1, inside), Group(inside, self.nodes, DOWN)

    def _bring(self, kv: Chunk, node: int) -> list[Op]:
        """The receive of the next node's KV, which overlaps the round of this one."""
        return [receive_next(kv, node, lane="kv")] if node + 1 < self.nodes else []

    def _round(
        self, steps: Steps, problem: Problem, blocks: Sequence[Attend] | Sequence[AttendBackward], bring: Sequence[Op]
    ) -> None:
        """One round of the ring: blocks[s] computes with the Q that has moved s times."""
        ring, size, unfolded = blocks[0].q.home, len(blocks), []
        assert isinstance(ring, Group)
        seen = blocks[0].kv if self._trims(problem) else None
        for s in range(size + 1):
            steps.next(*(bring if s == 0 else ()))
            if s + 1 < size:
                steps.do(Pass("q", blocks[s].q, blocks[s + 1].q, ring, self._move(problem), against=seen))
            if s >= 2:
                hop, fold = return_home(blocks[s - 1].writes[0], lane="o", against=seen)
                steps.do(hop)
                unfolded.append(fold)
            steps.do(*blocks[s : s + 1])
            # What arrives in this step is folded in the next, so that no block waits for it.
            if len(unfolded) > 1:
                steps.do(unfolded.pop(0))
        steps.do(*unfolded)
