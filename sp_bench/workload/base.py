"""The interfaces of workloads: for requests, and for the ranks that time them. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from sp_bench.cluster import Cluster
from sp_bench.cluster.device import DeviceCosts
from sp_bench.errors import unknown
from sp_bench.lower import DEFAULT_TRANSPORT, TransportOptions
from sp_bench.peers.peer import Peer
from sp_bench.plan.mask import Mask
from sp_bench.plan.method import Method
from sp_bench.plan.ops import Plan
from sp_bench.plan.problem import Problem
from sp_bench.records.quantities import DecodeStep, Prompt, TrainingStep
from sp_bench.workload.gate import GateErrors

if TYPE_CHECKING:
    import torch

    from sp_bench.peers.engine import PeerEngine
    from sp_bench.run.engine import Engine
    from sp_bench.run.executor import Action
    from sp_bench.run.graphs import GraphedEngine
    from sp_bench.run.holdings import LiveBytes
    from sp_bench.run.transport import Transport


SINKS = "sinks"
"""The key of a config that says whether an attention has sinks, and the attribute of a workload that does."""
SUNK = "a pass over outputs, by which sinks enter them, and one for their gradient are not simulated"
"""The note of simulated points with sinks."""


@dataclass(frozen=True)
class RankContext:
    """The rank that a workload runs on."""

    rank: int
    device: torch.device
    transport: Callable[[Mapping[str, Plan], int | None], Transport]
    """Makes the transport of plans between all ranks, given the CTAs that a lane takes at most on a GPU. All ranks must
    call it."""
    alive: Callable[[], None]
    """Shows that this rank doesn't hang. Call it between long pieces of work."""
    cuda_graph: bool | Literal["auto"] = False
    """Whether phases are captured and replayed; auto: where that works."""


class Step(ABC):
    """A workload on a rank, with inputs and buffers. An iteration is `untimed`, then each timed phase.

    Its attention is computed by one engine, or by several that are alike but for their plans and share a transport.
    """

    @property
    @abstractmethod
    def engine(self) -> Engine | GraphedEngine | PeerEngine:
        """The engine; one of several."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on its kernels for a reader of its times."""
        return self.engine.notes

    @property
    def sent_bytes(self) -> Counter[tuple[str, ...]]:
        """Bytes sent so far, untimed ones too: by lane, tensor and field of a plan, or by a peer's operation."""
        return self.engine.transport.sent_bytes

    @property
    def losses(self) -> Sequence[float]:
        """The loss of each complete iteration so far; empty if nothing is trained."""
        return ()

    def untimed(self) -> None:  # noqa: B027  # a prompt writes its cache again before it reads it
        """Prepare an iteration: make what its timed phases need."""

    def capture(self) -> None:  # noqa: B027  # steps of a model or a prompt aren't replayed
        """Capture the timed phases, if they are replayed as graphs; they have been executed once. All ranks call it."""

    @abstractmethod
    def run(self, phase: str, action: Action, live: LiveBytes | None = None) -> None:
        """Execute a phase, or only its blocks or its transfers. `live` counts the bytes of live tensors."""

    @abstractmethod
    def parts(self, phase: str) -> Mapping[str, float]:
        """Seconds of the last execution of a phase by part; empty if they are not known."""

    def memory(self) -> Mapping[str, int]:
        """Bytes held by kind; empty if the attention's are all."""
        return {}

    @abstractmethod
    def finite(self) -> bool:
        """Whether the last results are finite."""

    def keep(self) -> None:  # noqa: B027  # a model's `errors` executes a step of its own
        """Keep rows of the last results, sampled by the workload's seed, for `errors`."""

    @abstractmethod
    def errors(self) -> GateErrors:
        """Errors of sampled rows of results against fp64, the same on all ranks. All ranks must call it, at the end."""

    def close(self) -> None:
        """Release threads and streams."""
        self.engine.close()


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """An operation that is timed."""

    name: ClassVar[str]
    """The value of the key `workload`."""
    phase_choices: ClassVar[Mapping[str, tuple[str, ...]]]
    """The phases that are timed, in order, for each value of the key `phase`."""
    keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the config that only this workload reads."""
    baselines: ClassVar[Mapping[str, str]] = {}
    """Methods that it can't have, and what stands for each as the baseline that a config has unless it says so."""
    degree_key: ClassVar[str] = "train.tensor_parallel"
    """The key of `tensor_parallel`, where the workload has one."""
    simulated_as: ClassVar[str] = "attention"
    """Its simulation (sp_bench.point.simulations)."""

    phases: tuple[str, ...]
    """The phases that are timed."""

    @classmethod
    def build(cls, config: Mapping[str, Any], phases: tuple[str, ...]) -> Self:
        """The workload of a config. Raises RequestError for its invalid keys."""
        return cls(phases=phases)

    @classmethod
    def kv_seqlen(cls, config: Mapping[str, Any], seqlen: int, asked: int | None) -> int | None:
        """The keys of the problem, of which `asked` is the value of the key kv_seqlen; None for as many as queries."""
        return asked

    @classmethod
    def filled(cls, config: Mapping[str, Any], *, here: bool) -> dict[str, Any]:
        """Values for keys of a config that are null, and mean something else for this workload than for attention;
        `here` says whether the point is for this machine.
        """
        return {}

    @classmethod
    def mask_tokens(cls, values: Any) -> tuple[int, int | None]:
        """(queries, keys) that the mask of a config is of, from its numbers; None for as many keys as queries."""
        return values.seqlen, values.kv_seqlen

    @classmethod
    def mask_of_layout(cls, config: Mapping[str, Any], mask: Mask) -> Mask:
        """The mask whose layout a method has unless it chooses one: that of the attention with most work."""
        return mask

    @classmethod
    def attention_of(
        cls, config: Mapping[str, Any], shape: Mapping[str, Any], mask: Mask, n: int
    ) -> tuple[dict[str, Any], Mask]:
        """The shape (fields of a Problem by name) and mask of the attention on n ranks, of those that a config has."""
        return dict(shape), mask

    @classmethod  # noqa: B027  # most take all
    def refuse_method(cls, method: Method | Peer) -> None:
        """Raise RequestError if the workload can't have the method."""

    def refuse(self, problem: Problem, mode: str, peer: Peer | None) -> None:  # noqa: B027  # attention runs on all
        """Raise RequestError if the workload can't have such a problem, run in the mode, or call a peer."""

    def refuse_device(self, kind: str) -> None:  # noqa: B027  # attention runs on all
        """Raise RequestError for what measured ranks on this kind of device, cuda or cpu, can't do."""

    def cluster_of(self, cluster: Cluster, gpus: int) -> Cluster:
        """The cluster that the ranks of the attention have, of that of all GPUs."""
        return cluster

    def on(self, device: DeviceCosts, problem: Problem) -> Self:
        """The workload on such a device, with what the device's memory decides."""
        return self

    @classmethod
    def phases_of(cls, phase: str) -> tuple[str, ...]:
        """The phases that are timed for a value of the key `phase`. Raises RequestError if it is unknown."""
        if phase not in cls.phase_choices:
            raise unknown("phase", phase, cls.phase_choices)
        return cls.phase_choices[phase]

    @classmethod
    def tensor_parallel(cls, config: Mapping[str, Any]) -> int:
        """How many GPUs share the tokens of each rank of the attention, with a part of the heads each."""
        return 1

    @classmethod
    def data_parallel(cls, config: Mapping[str, Any]) -> int:
        """How many groups of ranks have sequences of their own."""
        return 1

    @property
    def groups(self) -> int:
        """The number of groups of ranks that each have sequences of their own."""
        return 1

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for a reader of its records, on what it stands for."""
        return ()

    @classmethod
    @abstractmethod
    def executed(cls, phases: tuple[str, ...]) -> tuple[str, ...]:
        """The phases that ranks execute if `phases` are timed: a backward needs its forward."""

    def attentions(self, problem: Problem) -> tuple[Problem, ...]:
        """The attentions that a step computes, each by plans of its own; the last one may be `problem` itself."""
        return (problem,)

    @property
    def in_one_layout(self) -> bool:
        """Whether all its attentions are of the same tokens on each rank, so that they have one layout."""
        return False

    @property
    def plan_phases(self) -> tuple[str, ...]:
        """The phases of the method's plans that the timed phases execute."""
        return self.phases

    def times_executed(self, phase: str, attention: int = 0) -> Mapping[str, int]:
        """How often each plan of one of the `attentions` is executed in a timed phase, by the plan's phase."""
        return {phase: 1}

    def executions(self, attention: int = 0) -> Counter[str]:
        """How often a step executes each plan of one of the `attentions`, by the plan's phase."""
        return sum((Counter(self.times_executed(phase, attention)) for phase in self.phases), Counter())

    def sent_otherwise(self, phase: str, problem: Problem) -> Mapping[tuple[str, ...], int]:
        """Bytes that each rank sends in a timed phase beside the plans, by operation."""
        return {}

    def tokens(self, problem: Problem) -> int:
        """Tokens of a step, of all groups and turns."""
        return problem.batch * problem.seqlen * self.groups

    def decoded(self, problem: Problem) -> DecodeStep:
        """The fields of a record that describe a decode step."""
        return DecodeStep()

    def described(self, problem: Problem) -> TrainingStep:
        """The fields of a record that describe a training step."""
        return TrainingStep()

    def prompt(self, problem: Problem) -> Prompt:
        """The fields of a record that describe how a prompt is computed."""
        return Prompt()

    def held_bytes(self, device: DeviceCosts, problem: Problem) -> Mapping[str, int]:
        """Bytes that a rank holds beside its attention, by kind."""
        return {}

    def beside_bytes(self, problem: Problem, attention: Problem) -> int:
        """Bytes that a simulated rank holds beside one of the attentions of a step of `problem`."""
        return 0

    def standing_bytes(self, attention: Problem, every: Sequence[Problem]) -> int:
        """Bytes that a measured rank holds beside what one of its step's attentions does, for the others."""
        return 0

    @abstractmethod
    def flops(self, phase: str, problem: Problem) -> float:
        """Model FLOPs of one timed phase on all ranks together, as MFU counts them."""

    @abstractmethod
    def gate(self, spec: Spec, context: RankContext) -> GateErrors:
        """Errors against fp64 on a scaled-down problem, the same on all ranks. All ranks must call it."""

    @abstractmethod
    def prepare(self, spec: Spec, context: RankContext) -> Step:
        """Make the inputs and the engine of a step. All ranks must call it."""


@dataclass(frozen=True)
class PlannedAttention:
    """One of several attentions of a step, with its plans."""

    problem: Problem
    plans: Mapping[str, Plan]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A point, as ranks get it. It is pickled for them."""

    workload: Workload
    problem: Problem
    """The problem in the layout of the plans' method, or the peer."""
    plans: Mapping[str, Plan] = field(default_factory=dict)
    """The plan of each phase that is executed; empty for a peer."""
    attentions: tuple[PlannedAttention, ...] = ()
    """The attentions of a step (Workload.attentions), of which `problem` and `plans` are the last one's."""
    peer: Peer | None = None
    """A peer's attention, in place of plans."""
    kernel: str = "auto"
    sm_margin: int | None = None
    """SMs of a GPU that persistent block kernels leave free; None: as many as lanes take."""
    seed: int = 0
    alone: int | None = None
    """With mode=alone: the rank whose plans this process executes alone, receiving copies of what it sends."""
    verify: bool = True
    """Whether the correctness gate runs before any timing, and rows of what was timed are compared after it."""
    parts: bool = False
    """Whether to also time blocks alone and transfers alone."""
    transport: TransportOptions = DEFAULT_TRANSPORT
    """The transport of the ranks."""

    @property
    def executed(self) -> tuple[str, ...]:
        """The phases that ranks execute."""
        return self.workload.executed(self.workload.phases)
