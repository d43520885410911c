"""Run a peer's attention on this rank, with the interface of run.attention.Engine."""

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
from sp_bench.run.engine import Saved
from sp_bench.run.executor import Action
from sp_bench.run.holdings import LiveBytes

CPU = torch.device("cpu")


@dataclass
class Sent:
    """Takes the place of a transport."""

    sent_bytes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """Bytes sent, by operation of torch.distributed; empty if some can't be counted."""
    communicators: tuple[str, ...] = ()
    """None that are known."""
    outside_bytes: int = 0
    """None that are known."""


class PeerEngine:
    """A peer on the ranks of the default group. It only runs as a whole, not its blocks or transfers alone."""

    def __init__(self, peer: Peer, problem: Problem, phases: Sequence[str], device: torch.device = CPU) -> None:
        """Run the peer once on zeros, to count bytes and to compile. `problem` has its layout. All ranks must call it.

        Raises RequestError if a user's function doesn't exist, or returns no attention.
        """
        warnings.filterwarnings("ignore", category=FutureWarning)  # from torch, about calls in the packages
        self.phases, self.problem = tuple(phases), problem
        self.kernel_name, self.transport, self._device = peer.kernel_on(device.type), Sent(), device
        self._peer, self._attention = peer, peer.attention(problem, device)
        self._sent_bytes = {phase: Counter() for phase in phases}
        """Bytes sent in one execution; none until they have been counted."""
        self._sent_bytes = self._count()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, action: Action = Action.EVERYTHING, live: LiveBytes | None = None
    ) -> tuple[Tensor, Saved]:
        """out (B, S / n, H, D), and the tensors that the backward needs. `live` is not told of any."""
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
        """(dq, dk, dv), shaped as q, k and v, in the compute dtype."""
        assert action is Action.EVERYTHING
        gradients = torch.autograd.grad(saved["out"], saved["qkv"], (dout,))
        self.transport.sent_bytes.update(self._sent_bytes["backward"])
        return gradients

    @property
    def notes(self) -> tuple[str, ...]:
        """None: a package chooses its kernels itself."""
        return ()

    @property
    def shares(self) -> None:
        """None: a package shares a GPU's SMs as it likes."""

    def spent(self, phase: str) -> None:
        """None: the time breakdown of a package is not known."""

    def close(self) -> None:
        """Do nothing: a package's state stays in the process."""

    def _count(self) -> dict[str, Counter[tuple[str, ...]]]:
        """Bytes sent by phase and operation, the same each time; empty if some operations can't be counted."""
        problem, dtype = self.problem, getattr(torch, self.problem.dtype)
        q, k, v = (
            torch.zeros(problem.batch, problem.queries.most, heads, problem.head_dim, dtype=dtype, device=self._device)
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
        impl = f"impl={self._peer.impl}"
        if not isinstance(out, Tensor) or out.shape != q.shape or out.dtype != q.dtype:
            returned = f"{tuple(out.shape)} in {out.dtype}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise RequestError(impl, f"returned {returned}", f"{tuple(q.shape)} in {q.dtype} would work")
        if "backward" in self.phases and not out.requires_grad:
            raise RequestError(impl, "autograd can't differentiate its output", "phase=forward would work")
