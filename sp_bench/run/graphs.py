"""A step's phases, and their parts alone, as CUDA graphs: each is captured once and then replayed, in one launch.

What can be captured follows from how a plan is executed on a GPU: one thread queues everything without waiting, lanes'
streams begin and end with the caller's, and buffers are the same each time. Before the capture the phase has been
executed once, so that kernels are loaded and NCCL's connections are open, as NCCL demands. All ranks capture, and
replay, together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sp_bench.run.devices import Device
from sp_bench.run.engine import Engine, Saved
from sp_bench.run.executor import Action, Spent
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.sms import SmShares
from sp_bench.run.transport import Transport

CALLBACKS = (
    "each replay starts transfers between nodes by callbacks on a thread of the host, which NCCL captures with them;"
    " those inside a node need none"
)
"""NCCL hands a network's work to its proxy thread by cudaLaunchHostFunc where it is captured (src/enqueue.cc)."""


@dataclass(frozen=True)
class _Captured:
    """A phase as a captured graph."""

    graph: Any
    inputs: tuple[Tensor, ...]
    """The tensors that it reads, kept alive."""
    results: Any
    """The tensors that it writes: the same tensors each time."""
    sent_bytes: Counter
    """Bytes that each replay sends."""


class GraphedEngine:
    """An engine whose executions are replays, but for those with a count of live bytes.

    Of parts alone too: a replayed step can't be compared with parts that are launched one by one.
    """

    def __init__(self, engine: Engine, device: Device, all_can: Callable[[bool], bool] | None = None) -> None:
        """With `all_can` phases are launched one by one from when a capture fails, on this rank or another.

        It tells whether all ranks could capture, given whether this one could. Without it a failure is raised.
        """
        self._engine, self._device, self._all_can = engine, device, all_can
        self._failed = ""
        """Why nothing is replayed any more."""
        self._captured: dict[tuple[str, Action], _Captured] = {}
        self._replayed: set[str] = set()
        """The phases whose last execution was a replay."""

    @property
    def transport(self) -> Transport:
        """The engine's transport, which counts what replays send, too."""
        return self._engine.transport

    @property
    def kernel_name(self) -> str:
        """The name of that kernel."""
        return self._engine.kernel_name

    @property
    def notes(self) -> tuple[str, ...]:
        """The engine's remarks on its kernels, and one on what a replay leaves to the host."""
        if self._failed:
            return (*self._engine.notes, f"cuda_graph=auto: nothing is replayed, as {self._failed}")
        return (*self._engine.notes, *((CALLBACKS,) if self.transport.crosses_nodes else ()))

    @property
    def shares(self) -> SmShares | None:
        """The engine's shares of the GPU."""
        return self._engine.shares

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, action: Action = Action.EVERYTHING, live: LiveBytes | None = None
    ) -> tuple[Tensor, Saved]:
        """As Engine.forward; the results of replays are the same tensors. Raises ValueError for other inputs."""
        return self._run("forward", (q, k, v), action, live, lambda *how: self._engine.forward(q, k, v, *how))

    def backward(
        self, dout: Tensor, saved: Saved, action: Action = Action.EVERYTHING, live: LiveBytes | None = None
    ) -> tuple[Tensor, ...]:
        """As Engine.backward, and with the limits of `forward`."""
        inputs = (dout, *(x for tensors in saved.values() for x in tensors))
        return self._run("backward", inputs, action, live, lambda *how: self._engine.backward(dout, saved, *how))

    def spent(self, phase: str) -> Spent | None:
        """The time breakdown of the last execution; None of a replay, in which nothing is timed."""
        return None if phase in self._replayed else self._engine.spent(phase)

    def close(self) -> None:
        """Let go of the graphs, which hold NCCL's communicators, and end the engine's streams."""
        self._captured.clear()
        self._engine.close()

    def _run(self, phase: str, inputs: tuple[Tensor, ...], action: Action, live: LiveBytes | None, execute: Any) -> Any:
        if live is None and not self._failed and (phase, action) not in self._captured:
            self._try(phase, action, inputs, lambda: execute(action, None))
        if live is not None or self._failed:
            self._replayed.discard(phase)
            return execute(action, live)
        captured = self._captured[phase, action]
        if any(x is not y for x, y in zip(captured.inputs, inputs, strict=True)):
            raise ValueError(f"the {phase} was captured with other tensors; a graph reads those of its capture")
        self._device.replay(captured.graph)
        self.transport.sent_bytes.update(captured.sent_bytes)
        self._replayed.add(phase)
        return captured.results

    def _try(self, phase: str, action: Action, inputs: tuple[Tensor, ...], execute: Any) -> None:
        """Capture a phase, or let go of all graphs if that fails and may."""
        execute()  # connections, kernels and buffers are made
        try:
            self._captured[phase, action] = self._capture(inputs, execute)
        except RuntimeError as error:
            if self._all_can is None:
                raise
            self._failed = f"a capture failed: {error}"
        if self._all_can is not None and not self._all_can(not self._failed):
            self._failed = self._failed or "a capture failed on another rank"
            self._captured.clear()

    def _capture(self, inputs: tuple[Tensor, ...], execute: Any) -> _Captured:
        sent = self.transport.sent_bytes
        before = Counter(sent)
        try:
            graph, results = self._device.capture(execute)
        finally:
            moved = Counter(sent) - before
            sent.subtract(moved)  # nothing was sent yet
        return _Captured(graph, inputs, results, moved)
