"""The engine that executes the attention of a step, as records describe it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter

from sp_bench.peers.engine import PeerEngine
from sp_bench.run.engine import Engine
from sp_bench.run.graphs import GraphedEngine
from sp_bench.run.sms import SmShares


class EngineStep(ABC):
    """A step whose attention is computed by one engine, or by several that are alike but for their plans."""

    @property
    @abstractmethod
    def engine(self) -> Engine | GraphedEngine | PeerEngine:
        """The engine; one of several."""

    @property
    def kernel_name(self) -> str:
        """The kernel of its attention blocks."""
        return self.engine.kernel_name

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on its kernels for a reader of its times."""
        return self.engine.notes

    @property
    def communicators(self) -> tuple[str, ...]:
        """NCCL's communicators that its attention uses, in words."""
        return self.engine.transport.communicators

    @property
    def outside_bytes(self) -> int:
        """Bytes of a GPU that its attention's buffers take outside of torch's allocator."""
        return self.engine.transport.outside_bytes

    @property
    def shares(self) -> SmShares | None:
        """The shares of the GPU that lanes and blocks take; None on a CPU, or for a peer."""
        return self.engine.shares

    @property
    def sent_bytes(self) -> Counter[tuple[str, ...]]:
        """Bytes sent so far, including untimed executions; several engines share a transport."""
        return self.engine.transport.sent_bytes

    @property
    def losses(self) -> tuple[float, ...]:
        """An empty tuple: attention alone has no loss."""
        return ()
