"""The machine costs that a schedule may use, as a small value: methods stay pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sp_bench.plan.groups import Group
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Tensor


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """Seconds of one block, and latency and bandwidth of a transfer inside a node and across nodes."""

    forward_block_s: float
    backward_block_s: float
    node_size: int = 1
    intra_latency_s: float = 0.0
    intra_bytes_per_s: float = math.inf
    inter_latency_s: float = 0.0
    inter_bytes_per_s: float = math.inf

    def of_a_slice(self, problem: Problem) -> CostProfile:
        """The costs with block times divided by the problem's head slices."""
        slices = problem.head_slices
        return replace(
            self, forward_block_s=self.forward_block_s / slices, backward_block_s=self.backward_block_s / slices
        )

    def block_s(self, phase: str) -> float:
        """Seconds of one block of a phase, its fold included."""
        return self.forward_block_s if phase == "forward" else self.backward_block_s

    def transfer_s(self, n_bytes: float, group: Group) -> float:
        """Seconds of one hop along a group's ring; the slowest hop counts."""
        if self.node_size % group.span == 0:
            return self.intra_latency_s + n_bytes / self.intra_bytes_per_s
        return self.inter_latency_s + n_bytes / self.inter_bytes_per_s

    def hiding_blocks(self, problem: Problem, tensor: Tensor, group: Group, phase: str) -> int:
        """The least number of blocks that hide one hop of one chunk of `tensor`: c_Q, c_KV, c_O, c_OdOQ, ...

        Source: Mesh-Attention, section 3.5.
        """
        hop_s = self.transfer_s(problem.chunk_bytes(tensor, wire=True), group)
        return max(1, math.ceil(hop_s / self.block_s(phase)))


COMPUTE_BOUND = CostProfile(forward_block_s=math.inf, backward_block_s=math.inf)
"""Costs for an unknown machine: every transfer hides behind one block."""
