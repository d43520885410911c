"""The single-GPU baseline: one GPU holds everything, so nothing travels.

Volume: none. Refuses more than one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    Group,
    Method,
    O,
    Plan,
    Problem,
    Q,
    RequestError,
    Steps,
    Tensor,
)


@dataclass(frozen=True, kw_only=True)
class Reference(Method):
    """The whole attention as one block on one GPU."""

    name: ClassVar[str] = "reference"
    citation: ClassVar[str] = "Dao et al. 2022"
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "0", "backward": "0"}

    limit: ClassVar[str] = "1"

    layout: str = "contiguous"

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for more than one GPU."""
        if problem.n != 1:
            raise RequestError(f"gpus={problem.n}", "reference keeps everything on one GPU", "gpus=1 would work")

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """One forward block."""
        q, kv, o = (Chunk(tensor, 0, Group(1, 1)) for tensor in (Q, KV, O))
        steps = Steps()
        steps.next(Attend(q, kv, o))
        return steps.plan("forward", 1, inputs=(q, kv), outputs=(o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """One backward block."""
        odoq, kv, dq, dkv = (Chunk(tensor, 0, Group(1, 1)) for tensor in (ODOQ, KV, DQ, DKV))
        steps = Steps()
        steps.next(AttendBackward(odoq, kv, dq, dkv))
        return steps.plan("backward", 1, inputs=(odoq, kv), outputs=(dq, dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float]:
        """Empty: nothing is sent."""
        return {}
