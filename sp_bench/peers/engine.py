"""A peer's attention on one problem, on this rank, behind the interface of run.attention.Engine."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.peers.peer import Peer
from sp_bench.peers.traffic import Traffic
from sp_bench.plan.problem import Problem
from sp_bench.run.attention import Saved
from sp_bench.run.executor import Action
from sp_bench.run.holdings import LiveBytes


@dataclass
class Sent:
    """What stands in a transport's place."""

    sent_bytes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """Bytes handed to the network, by operation of torch.distributed; empty where they can't all be counted."""


class PeerEngine:
    """A peer on the ranks of the default group. It can be executed as a whole, not its blocks or transfers alone."""

    def __init__(self, peer: Peer, problem: Problem, phases: Sequence[str]) -> None:
        """`problem` as the peer deals it out. Runs once, on zeros, to count and to compile. All ranks must call it.

        Raises RequestError for a user's function that is not there or does not do what it must.
        """
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, about what packages still call
        self.phases, self.problem = tuple(phases), problem
        self.kernel_name, self.transport = peer.kernel_name, Sent()
        self._peer, self._attention = peer, peer.attention(problem)
        self._sent_bytes = {phase: Counter() for phase in phases}
        """In one execution: nothing until that has been counted."""
        self._sent_bytes = self._count()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, action: Action = Action.EVERYTHING, live: LiveBytes | None = None
    ) -> tuple[Tensor, Saved]:
        """out_BSHD of this rank's queries, and what the backward needs beside its gradient. `live` sees nothing."""
        assert action is Action.EVERYTHING
        differentiable = "backward" in self.phases
        with torch.set_grad_enabled(differentiable):
            leaves = tuple(x.detach().requires_grad_(differentiable) for x in (q, k, v))
            out = self._attention(*leaves)
        self._refuse(out, q)
        self.transport.sent_bytes.update(self._sent_bytes["forward"])
        return out.detach(), {"out": (out,), "qkv": leaves}

    def backward(
        self, dout: Tensor, saved: Saved, action: Action = Action.EVERYTHING, live: LiveBytes | None = None
    ) -> tuple[Tensor, ...]:
        """(dq, dk, dv) of this rank's tokens, in the compute dtype."""
        assert action is Action.EVERYTHING
        gradients = torch.autograd.grad(saved["out"], saved["qkv"], (dout,))
        self.transport.sent_bytes.update(self._sent_bytes["backward"])
        return gradients

    def spent(self, phase: str) -> None:
        """Where a package's time goes is not known."""

    def close(self) -> None:
        """A package's own state stays in the process."""

    def _count(self) -> dict[str, Counter[tuple[str, ...]]]:
        """Bytes sent by phase and operation, the same each time; empty where a package does what can't be counted."""
        problem, dtype = self.problem, getattr(torch, self.problem.dtype)
        q, k, v = (
            torch.zeros(problem.batch, problem.local_seqlen, heads, problem.head_dim, dtype=dtype)
            for heads in (problem.heads, problem.kv_heads, problem.kv_heads)
        )
        with Traffic() as forward:
            out, saved = self.forward(q, k, v)
        with Traffic() as backward:
            if "backward" in self.phases:
                self.backward(torch.zeros_like(out), saved)
        if forward.unknown or backward.unknown:
            return {phase: Counter() for phase in self.phases}
        return {phase: traffic.sent_bytes for phase, traffic in zip(self.phases, (forward, backward), strict=False)}

    def _refuse(self, out: Tensor, q: Tensor) -> None:
        """Raise RequestError for a result that is no attention's."""
        if not isinstance(out, Tensor) or out.shape != q.shape or out.dtype != q.dtype:
            found = f"{tuple(out.shape)} in {out.dtype}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise RequestError(
                f"impl={self._peer.impl}", f"returned {found}", f"{tuple(q.shape)} in {q.dtype} would work"
            )
        if "backward" in self.phases and not out.requires_grad:
            raise RequestError(
                f"impl={self._peer.impl}", "autograd can't go back through what it returned", "phase=forward would work"
            )
