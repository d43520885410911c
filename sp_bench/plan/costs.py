"""What a schedule may know of the machine: a small value, so that methods stay pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sp_bench.plan.groups import Group
from sp_bench.plan.problem import Problem


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """Seconds of one block, and what a transfer costs inside a node and across nodes."""

    forward_block_s: float
    backward_block_s: float
    node_size: int = 1
    intra_latency_s: float = 0.0
    intra_bytes_per_s: float = math.inf
    inter_latency_s: float = 0.0
    inter_bytes_per_s: float = math.inf

    def of_a_slice(self, problem: Problem) -> CostProfile:
        """The same for blocks of one slice of the heads, as the problem is dealt."""
        slices = problem.head_slices
        return replace(
            self, forward_block_s=self.forward_block_s / slices, backward_block_s=self.backward_block_s / slices
        )

    def block_s(self, phase: str) -> float:
        """Seconds of one whole block, its fold included."""
        return self.forward_block_s if phase == "forward" else self.backward_block_s

    def transfer_s(self, n_bytes: float, group: Group) -> float:
        """Seconds of one hop along a group's ring: that of its slowest hop."""
        if self.node_size % group.span == 0:
            return self.intra_latency_s + n_bytes / self.intra_bytes_per_s
        return self.inter_latency_s + n_bytes / self.inter_bytes_per_s

    def hiding_blocks(self, problem: Problem, tensor: str, group: Group, phase: str) -> int:
        """c_Q, c_KV, c_O and their backward twins: the least number of blocks that hide one hop of one chunk.

        Source: Mesh-Attention, section 3.5.
        """
        hop_s = self.transfer_s(problem.chunk_bytes(tensor, wire=True), group)
        return max(1, math.ceil(hop_s / self.block_s(phase)))


COMPUTE_BOUND = CostProfile(forward_block_s=math.inf, backward_block_s=math.inf)
"""Where nothing is known of the machine: every transfer hides behind one block."""
