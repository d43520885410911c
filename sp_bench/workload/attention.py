"""workload=attention: one exact attention over the whole sequence, forward, backward or both. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sp_bench import account
from sp_bench.errors import RequestError
from sp_bench.peers.peer import Peer
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import DTYPE_BYTES, Problem
from sp_bench.reading import read
from sp_bench.workload.base import SINKS, RankContext, Spec, Step, Workload
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.training import ring_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping


SINKS_SUM = ("sinks", "all_reduce", "sum")
"""The key of what the summation of their gradient sends."""


@dataclass(frozen=True, kw_only=True)
class Attention(Workload):
    """softmax(q k^T / sqrt(D)) v, by a method's plans or a peer's code."""

    name: ClassVar[str] = "attention"
    phase_choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "forward": ("forward",),
        "backward": ("backward",),
        "forward_backward": PHASES,
    }
    keys: ClassVar[tuple[str, ...]] = (SINKS,)

    sinks: bool = False
    """Whether every softmax has one score more, learned by head, besides those of keys (gpt-oss, OpenAI 2025)."""

    @classmethod
    def build(cls, config: Mapping[str, Any], phases: tuple[str, ...]) -> Self:
        return cls(phases=phases, sinks=read(bool, config.get(SINKS, False), SINKS))

    def refuse(self, problem: Problem, mode: str, peer: Peer | None) -> None:
        """Raise RequestError for sinks of a peer, and of a rank alone."""
        if self.sinks and peer:
            rule = "are the suite's own: no other package's call takes them"
            raise RequestError(f"sinks=true of impl={peer.impl}", rule, "sinks=false, or method=ring, would work")
        if self.sinks and mode == "alone":
            rule = "are summed over ranks, and mode=alone has one at a time"
            raise RequestError("sinks=true", rule, "mode=measure would work")

    def sent_otherwise(self, phase: str, problem: Problem) -> Mapping[tuple[str, ...], int]:
        """Bytes that each rank sends, in a ring, to sum the gradient of sinks: a number of statistics for each head."""
        if not self.sinks or phase != "backward" or problem.n == 1:
            return {}
        return {SINKS_SUM: ring_bytes(DTYPE_BYTES[problem.accumulate_dtype] * problem.heads, problem.n)}

    @classmethod
    def executed(cls, phases: tuple[str, ...]) -> tuple[str, ...]:
        """The forward, and the backward if it is timed."""
        return PHASES if "backward" in phases else PHASES[:1]

    def flops(self, phase: str, problem: Problem) -> float:
        return account.model_flops(problem, phase)

    def gate(self, spec: Spec, context: RankContext) -> GateErrors:
        """Errors of out, dq, dk and dv, or of out if only the forward is executed."""
        from sp_bench.workload.attention_step import gate

        return gate(spec, context)

    def prepare(self, spec: Spec, context: RankContext) -> Step:
        """Make this rank's random q, k, v and dout, and an engine for the plans or the peer."""
        from sp_bench.workload.attention_step import AttentionStep

        return AttentionStep(spec, context)
