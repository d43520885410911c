"""Tree decoding: partial outputs are merged on the way to their owners, in rounds that halve what is left to send.

Source: Shyam et al., "Tree Attention: Topology-Aware Decoding for Long-Context Attention on GPU Clusters", 2024 (arXiv
2408.04093), algorithm 3: all ranks have the query, each attends to its part of the keys, and the partial outputs are
merged by their lse, which is associative, so that a tree of ranks can do it: log n rounds, inside nodes first. The
paper sums numerators and denominators by all-reduces, after which every rank has the output; an all-reduce is a
reduce-scatter and an all-gather, and here a rank goes on with some of the rows, as in Helix, so that the first half of
it is all. Outputs travel with their lse in one message a round.

It is Helix (methods/helix.py) with a TreeReduce in place of its exchange: as many bytes, in ceil(log2 n) messages for
n - 1, and with `inner` neighbours that reduce first only n / inner - 1 chunks of them leave a node, where Helix sends
n - inner. Each round waits for the one before. As Helix, it gathers Q first where it is no decode step.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, lse apart: (n - 1) O in a decode step.
Chunks are as long as the longest. Layouts: zigzag, striped, contiguous. Refuses neighbours whose number doesn't divide
n.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from sp_bench.methods.helix import Helix
from sp_bench.plan import Chunk, O, Op, Problem, Sized, Tensor, divisors, tree_reduce


@dataclass(frozen=True, kw_only=True)
class Tree(Sized, Helix):
    """Queries that all ranks compute, keys that stay, and outputs that a tree of ranks merges."""

    name: ClassVar[str] = "tree"
    citation: ClassVar[str] = "Shyam et al. 2024"
    size_option: ClassVar[str] = "inner"

    inner: Literal["auto"] | int = 1
    """Neighbours that reduce among themselves first; 1 or all of them: one tree of all ranks. auto stands for every
    divisor of n below n."""

    def sizes(self, problem: Problem) -> list[int]:
        """Every divisor of n below n: all ranks would be the tree that 1 is."""
        return divisors(problem.n)[:-1] or [1]

    def size_rule(self, problem: Problem) -> str:
        """The rule for `inner`, in words that follow "must"."""
        return f"divide gpus={problem.n}, and be less"

    def variant(self, n: int) -> str:
        """How many neighbours reduce first, in words; empty for one tree of all."""
        return f"inner {self.inner}" if self.inner != 1 else ""

    def _reduced(self, o: Chunk, problem: Problem) -> list[Op]:
        """Rounds of a tree in place of an exchange."""
        return tree_reduce(o, lane="o", inner=self.size)

    def padding(self, problem: Problem, tensor: Tensor) -> Fraction:
        """The longest chunk over the mean one, of outputs in any case: a message has those of many owners."""
        if tensor == O:
            return problem.chunk_bytes(tensor, wire=True) / problem.mean_wire_bytes(tensor)
        return super().padding(problem, tensor)
