"""What a workload is to a request, and what it is to the ranks that time it. Imports no torch."""

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
    """What a rank's process gives a workload."""

    rank: int
    device: torch.device
    transport: Callable[[Mapping[str, Plan]], Transport]
    """How plans exchange tensors between all ranks. All ranks must call it."""
    alive: Callable[[], None]
    """To be called between long pieces of work: shows that this rank doesn't hang."""


class Step(Protocol):
    """A workload that is ready on a rank, with inputs and buffers. An iteration is `untimed`, then each timed phase."""

    @property
    def kernel_name(self) -> str:
        """What computes its attention blocks."""
        ...

    @property
    def sent_bytes(self) -> Counter[tuple[str, ...]]:
        """Bytes sent so far: by lane, tensor and field of a plan, or by operation where a peer's code runs."""
        ...

    def untimed(self) -> None:
        """Make what the timed phases need anew in each iteration."""
        ...

    def run(self, phase: str, action: Action, live: LiveBytes | None = None) -> None:
        """Execute a phase, or only its blocks or its transfers. `live` is told which tensors there are at once."""
        ...

    def spent(self, phase: str) -> Spent | None:
        """Where the time of the last execution of a phase went; None where that isn't known."""
        ...

    def finite(self) -> bool:
        """Whether the last results are."""
        ...

    def close(self) -> None:
        """Release threads and streams."""
        ...


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """What is timed, with all that a rank must know of it. It is pickled on its way to the ranks."""

    name: ClassVar[str]
    """The value of the key `workload`."""
    phase_choices: ClassVar[Mapping[str, tuple[str, ...]]]
    """The phases that are timed, in order, for each value of the key `phase`."""

    phases: tuple[str, ...]
    """The phases that are timed."""
    problem: Problem
    """As the plans' method, or the peer, deals it out."""
    plans: Mapping[str, Plan]
    """Of each phase that is executed. Empty where a peer's code runs."""
    peer: Peer | None = None
    """Somebody else's attention, in place of plans."""
    kernel: str = "auto"
    seed: int = 0
    alone: int | None = None
    """The rank whose plans one process executes without peers, receiving copies of what it sends."""

    @classmethod
    @abstractmethod
    def executed(cls, phases: tuple[str, ...]) -> tuple[str, ...]:
        """The phases that ranks execute when `phases` are timed: a backward needs what its forward leaves."""

    @classmethod
    @abstractmethod
    def flops(cls, problem: Problem, phase: str) -> float:
        """Model FLOPs of one phase on all ranks together, as MFU counts them."""

    @abstractmethod
    def gate(self, context: RankContext) -> GateErrors:
        """Errors against fp64 of the same code on a scaled-down problem, the same on all ranks. All must call it."""

    @abstractmethod
    def prepare(self, context: RankContext) -> Step:
        """Make the inputs and whatever executes a step. All ranks must call it."""
