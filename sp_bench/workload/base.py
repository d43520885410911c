"""The interfaces of workloads: for requests, and for the ranks that time them. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from sp_bench.peers.peer import Peer
from sp_bench.plan.ops import Plan
from sp_bench.plan.problem import Problem
from sp_bench.workload.gate import GateErrors

if TYPE_CHECKING:
    import torch

    from sp_bench.run.executor import Action, Spent
    from sp_bench.run.holdings import LiveBytes
    from sp_bench.run.transport import Transport


@dataclass(frozen=True)
class RankContext:
    """The rank that a workload runs on."""

    rank: int
    device: torch.device
    transport: Callable[[Mapping[str, Plan]], Transport]
    """Makes the transport of plans between all ranks. All ranks must call it."""
    alive: Callable[[], None]
    """Shows that this rank doesn't hang. Call it between long pieces of work."""


class Step(Protocol):
    """A workload on a rank, with inputs and buffers. An iteration is `untimed`, then each timed phase."""

    @property
    def kernel_name(self) -> str:
        """The kernel of its attention blocks."""
        ...

    @property
    def sent_bytes(self) -> Counter[tuple[str, ...]]:
        """Bytes sent so far: by lane, tensor and field of a plan, or by operation of a peer's code."""
        ...

    def untimed(self) -> None:
        """Prepare an iteration: make what its timed phases need."""

    def run(self, phase: str, action: Action, live: LiveBytes | None = None) -> None:
        """Execute a phase, or only its blocks or its transfers. `live` counts the bytes of live tensors."""

    def spent(self, phase: str) -> Spent | None:
        """The time breakdown of the last execution of a phase; None if it is not known."""
        ...

    def finite(self) -> bool:
        """Whether the last results are finite."""
        ...

    def close(self) -> None:
        """Release threads and streams."""


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """An operation that is timed, with all that a rank needs to run it. It is pickled for the ranks."""

    name: ClassVar[str]
    """The value of the key `workload`."""
    phase_choices: ClassVar[Mapping[str, tuple[str, ...]]]
    """The phases that are timed, in order, for each value of the key `phase`."""

    phases: tuple[str, ...]
    """The phases that are timed."""
    problem: Problem
    """The problem in the layout of the plans' method, or the peer."""
    plans: Mapping[str, Plan]
    """The plan of each phase that is executed; empty for a peer."""
    peer: Peer | None = None
    """A peer's attention, in place of plans."""
    kernel: str = "auto"
    seed: int = 0
    alone: int | None = None
    """With mode=alone: the rank whose plans this process executes alone, receiving copies of what it sends."""

    @classmethod
    @abstractmethod
    def executed(cls, phases: tuple[str, ...]) -> tuple[str, ...]:
        """The phases that ranks execute if `phases` are timed: a backward needs its forward."""

    @classmethod
    @abstractmethod
    def flops(cls, problem: Problem, phase: str) -> float:
        """Model FLOPs of one phase on all ranks together, as MFU counts them."""

    @abstractmethod
    def gate(self, context: RankContext) -> GateErrors:
        """Errors against fp64 on a scaled-down problem, the same on all ranks. All ranks must call it."""

    @abstractmethod
    def prepare(self, context: RankContext) -> Step:
        """Make the inputs and the engine of a step. All ranks must call it."""
