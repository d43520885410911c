"""Mesh-Attention with all that this suite adds to it: the class that `method=mesh` names.

    the paper's tile and algorithms      mesh.py, mesh_schedule.py
    placement, lanes                     mesh_places.py
    schedule, slices                     mesh_orders.py
    form, collectives                    mesh_gather.py
    ulysses                              mesh_heads.py
    row_sums                             here: a rewriting of the backward plan (plan.row_sums)

With `row_sums` the backward sends rowsum(dO * O) with Q, dO and the lse, in place of O, as it needs no more of O:
2 (a - 1) for 3 (a - 1), and one number a row more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from sp_bench.methods.mesh_heads import SplitMesh
from sp_bench.plan import CostProfile, Plan, Problem, Tensor, send_row_sums, without_o


@dataclass(frozen=True, kw_only=True)
class Mesh(SplitMesh):
    """Mesh-Attention with an a x b tile, and our variants of it."""

    formula: ClassVar[Mapping[str, str]] = {
        "forward": "(2 + 2*max(k, u/h))*(u-1)/u + 2*(a-1) + 2*max(k, u/h)*(b-1)",
        "backward": "(2 + 2*max(k, u/h))*(u-1)/u + (3 + o)*(a-1) + 4*max(k, u/h)*(b-1)",
    }

    row_sums: bool = False
    """Whether the backward sends rowsum(dO * O) in place of O."""

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The plan, with row sums in the place of O if the option says so."""
        plan = super().backward(problem, costs)
        return send_row_sums(plan) if self.row_sums else plan

    def variant(self, n: int) -> str:
        """The options that differ from the paper's, in words."""
        return super().variant(n) + (" row sums" if self.row_sums else "")

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The values of a, b and u; o is 1 if O travels in the backward, else 0."""
        return {**super().symbols(problem), "o": 1 - self.row_sums}

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """As many, of what is sent of each tensor."""
        return {self._sent(tensor): count for tensor, count in super().chunks_sent(problem, phase).items()}

    def _sent(self, tensor: Tensor) -> Tensor:
        return without_o(tensor) if self.row_sums else tensor
