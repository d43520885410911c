"""workload=attention: one exact attention over the whole sequence, forward, backward or both. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sp_bench import account
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import Problem
from sp_bench.workload.base import RankContext, Spec, Step, Workload
from sp_bench.workload.gate import GateErrors

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Attention(Workload):
    """softmax(q k^T / sqrt(D)) v, by a method's plans or a peer's code."""

    name: ClassVar[str] = "attention"
    phase_choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "forward": ("forward",),
        "backward": ("backward",),
        "forward_backward": PHASES,
    }

    @classmethod
    def executed(cls, phases: tuple[str, ...]) -> tuple[str, ...]:
        """The forward, and the backward if it is timed."""
        return PHASES if "backward" in phases else PHASES[:1]

    def flops(self, phase: str, problem: Problem) -> float:
        """Model FLOPs of one phase on all ranks together (account.model_flops)."""
        return account.model_flops(problem, phase)

    def gate(self, spec: Spec, context: RankContext) -> GateErrors:
        """Errors of out, dq, dk and dv, or of out if only the forward is executed."""
        from sp_bench.workload.attention_gate import gate

        return gate(spec, context)

    def prepare(self, spec: Spec, context: RankContext) -> Step:
        """Make this rank's random q, k, v and dout, and an engine for the plans or the peer."""
        from sp_bench.workload.attention_step import AttentionStep

        return AttentionStep(spec, context)
