"""TokenRing: Q moves round the ring one way, while partial outputs go straight back to their owners the other way.

Source: Wang et al., "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via Bidirectional
Communication", 2024, algorithm 1. At step s a rank computes with the Q chunk of the rank s behind it, passes that Q on
to the next rank, and sends the partial (out, lse) of the step before to its owner: two lanes at once.

Backward (the paper has none): OdOQ moves as Q does and dQ goes home as the partial outputs do, while KV and its
gradient stay.

nodes > 1 is the hybrid of case study III: TokenRing among the ranks of a node, once for each KV chunk that Ring
Attention brings from the other nodes; dKV follows KV from node to node as in Ring.

Volume sent by each GPU, m = n / nodes ranks in a node, in chunks, k = kv_heads / heads, lse apart:
    forward   nodes (m - 1) Q + nodes (m - 1) O + 2k (nodes - 1) KV; with one node (n - 1) Q + (n - 1) O
    backward  3 nodes (m - 1) OdOQ + nodes (m - 1) dQ + 2k (nodes - 1) KV + 2k (nodes - 1) dKV

Layouts: zigzag (the paper's for causal), striped, contiguous. Refuses nodes that don't divide n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sp_bench.plan import (
    Attend,
    AttendBackward,
    Chunk,
    CostProfile,
    Group,
    Method,
    Op,
    Pass,
    Plan,
    Problem,
    RequestError,
    Steps,
    divisors,
    receive_next,
    reduce_next,
    return_home,
)

ONWARD = +1


@dataclass(frozen=True, kw_only=True)
class TokenRing(Method):
    """TokenRing, within nodes of n / nodes ranks."""

    name: ClassVar[str] = "tokenring"
    citation: ClassVar[str] = "Wang et al. 2024"
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {
        "forward": "2*(n-nodes) + 2*k*(nodes-1)",
        "backward": "4*(n-nodes) + 4*k*(nodes-1)",
    }

    nodes: int = 1
    """How many nodes exchange KV by Ring Attention; 1 is TokenRing among all ranks."""

    def refuse(self, problem: Problem) -> None:
        """Nodes must be equal."""
        if type(self.nodes) is not int or self.nodes < 1 or problem.n % self.nodes:
            raise RequestError(
                f"method.nodes={self.nodes}",
                f"must divide gpus={problem.n}",
                f"one of {', '.join(map(str, divisors(problem.n)))} would work",
            )

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Algorithm 1, once for the KV of each node."""
        ring, across = self._groups(problem)
        q, o, kv = Chunk("q", 0, ring), Chunk("o", 0, ring), Chunk("kv", 0, across)
        steps = Steps()
        for node in range(across.size):
            blocks = [Attend(q.at(-s), kv.at(node), o.at(-s)) for s in range(ring.size)]
            self._round(steps, q, o, blocks, self._bring(kv, node))
        return steps.plan("forward", problem.n, inputs=(q, kv), outputs=(o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The same for OdOQ and dQ. The dKV of a node's KV is complete after its round and goes on along the nodes."""
        ring, across = self._groups(problem)
        odoq, dq = Chunk("odoq", 0, ring), Chunk("dq", 0, ring)
        kv, dkv = Chunk("kv", 0, across), Chunk("dkv", 0, across)
        steps, unfolded = Steps(), []
        for node in range(across.size):
            blocks = [AttendBackward(odoq.at(-s), kv.at(node), dq.at(-s), dkv.at(node)) for s in range(ring.size)]
            self._round(steps, odoq, dq, blocks, self._bring(kv, node))
            if node:
                steps.do(*unfolded)
                hop, fold = reduce_next(dkv, node - 1, lane="dkv")
                steps.do(hop)
                unfolded = [fold]
        steps.do(*unfolded)
        return steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv))

    def symbols(self, n: int) -> Mapping[str, int]:
        """How many nodes."""
        return {"nodes": self.nodes}

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[str, float]:
        """The header's formulas."""
        ring, across = self._groups(problem)
        within, between = across.size * (ring.size - 1), across.size - 1
        if phase == "forward":
            return {"q": within, "o": within, "kv": between}
        return {"odoq": within, "dq": within, "kv": between, "dkv": between}

    def _groups(self, problem: Problem) -> tuple[Group, Group]:
        """The ring inside a node, and the ranks of equal place in all nodes."""
        inside = problem.n // self.nodes
        return Group(1, inside), Group(inside, self.nodes)

    def _bring(self, kv: Chunk, node: int) -> list[Op]:
        """While a node's KV is computed with, the next one's comes."""
        return [receive_next(kv, node, lane="kv")] if node + 1 < self.nodes else []

    def _round(self, steps: Steps, q: Chunk, o: Chunk, blocks: Sequence[Op], bring: Sequence[Op]) -> None:
        """One time round the ring: blocks[s] computes with the Q of the rank s behind and adds to its o."""
        ring, size, unfolded = q.home, len(blocks), []
        assert isinstance(ring, Group)
        for s in range(size + 1):
            steps.next()
            steps.do(*(bring if s == 0 else ()))
            if s + 1 < size:
                steps.do(Pass("q", send=q.at(-s), recv=q.at(-s - 1), group=ring, shift=ONWARD))
            if s >= 2:
                hop, fold = return_home(o.at(1 - s), lane="o")
                steps.do(hop)
                unfolded.append(fold)
            steps.do(*blocks[s : s + 1])
            # What arrives in this step is folded in the next, so that no block waits for it.
            if len(unfolded) > 1:
                steps.do(unfolded.pop(0))
        steps.do(*unfolded)
