"""A step of workload=train or dit on one rank, with the times of its parts and its memory by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sp_bench.plan.method import PHASES
from sp_bench.plan.tensors import KV
from sp_bench.run.devices import Clock, clock_of
from sp_bench.run.engine import Engine, Saved
from sp_bench.run.executor import Action, Spent
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.latents import Latents
from sp_bench.workload.attention_step import make_engines, summed
from sp_bench.workload.base import RankContext, Spec, Step
from sp_bench.workload.collectives import Call
from sp_bench.workload.exact_rows import SunkRows, errors_of_rows
from sp_bench.workload.exactness import NAMES
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.sampled_rows import sampled
from sp_bench.workload.states import Replicated
from sp_bench.workload.trainer import Batch, Trainer, group_on
from sp_bench.workload.training import UPDATE

if TYPE_CHECKING:
    from sp_bench.workload.sharded import Sharded
    from sp_bench.workload.train import Train

HOST = "host"
"""The kind of memory that is the host's."""


@dataclass
class Watched:
    """The attention of the last layer: the forward before the first backward, and that one. Once both are there they
    are on the host, so that the step takes no more of a GPU's memory than when it was timed.
    """

    of_queries: tuple[Tensor, ...] = ()
    """q, k, v, the keys and values that all ranks hold if there are some, and out."""
    gradients: tuple[Tensor, ...] = ()
    """dout, dq, dk and dv."""
    sinks: Tensor | None = None
    latents: Latents | None = None


@dataclass
class MarkedEngine:
    """An engine whose calls are marked, to know the time of attention within a phase."""

    engine: Engine
    clock: Clock
    action: Action = Action.EVERYTHING
    live: LiveBytes | None = None
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    readings: list[Callable[[], Spent]] = field(default_factory=list)
    watched: Watched | None = None
    """The holder of the tensors of the last layer; None: nowhere."""

    @property
    def latents(self) -> Latents | None:
        """The matrices that the engine makes keys and values with; None if no latents travel."""
        return self.engine.latents

    def begin(self, action: Action, live: LiveBytes | None) -> None:
        """Forget the calls so far; the next ones are of this action."""
        self.action, self.live = action, live
        self.marks, self.readings = [], []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, held: tuple[Tensor, ...] = (), sinks: Tensor | None = None
    ) -> tuple[Tensor, Saved]:
        """The engine's forward, marked; `held` are tensors that it holds besides."""
        start = self.clock.mark()
        results = self.engine.forward(q, k, v, self.action, self.live, sinks, held)
        self._keep("forward", start)
        if self.watched and not self.watched.gradients:
            self.watched.of_queries = (q, k, v, *held, results[0])
            self.watched.sinks = None if sinks is None else sinks.detach().clone()
            self.watched.latents = self.latents.copied() if self.latents else None
        return results

    def backward(self, dout: Tensor, saved: Saved) -> tuple[Tensor, ...]:
        """The engine's backward, marked."""
        start = self.clock.mark()
        gradients = self.engine.backward(dout, saved, self.action, self.live)
        self._keep("backward", start)
        if self.watched and not self.watched.gradients:
            self.watched.gradients = tuple(x.detach().cpu() for x in (dout, *gradients[:3]))
            self.watched.of_queries = tuple(x.detach().cpu() for x in self.watched.of_queries)
        return gradients

    def _keep(self, phase: str, start: Any) -> None:
        self.marks.append((start, self.clock.mark()))
        self.readings.append(self.engine.reading(phase))


class TrainStep(Step):
    """A trainer, timed by phase: forward, backward, update."""

    def __init__(self, workload: Train, spec: Spec, context: RankContext) -> None:
        """Make model, optimizer and engine. All ranks must call it."""
        self._workload, self._spec, self._context, self._clock = workload, spec, context, clock_of(context.device)
        problem, model = spec.problem, workload.model
        group = group_on(context.device) if problem.n > 1 else None
        given = model, problem, workload.training, spec.seed, context.rank, context.device, group
        self._trainer = Trainer(*given, sharded=workload.sharded)
        self._states = self._trainer.states
        self._collectives = self._states.collectives
        self._calls: dict[str, list[Call]] = {}
        engines = make_engines(spec, spec.attentions, context, timed=True)
        self._attentions = [MarkedEngine(engine, self._clock) for engine in engines]
        self._sent: Counter[tuple[str, ...]] = Counter()
        self._marks: dict[str, list[tuple[Any, Any]]] = {}
        self._number = 0
        self._loss: Tensor | None = None
        self._arbitrary_tensors: tuple[tuple[Tensor, ...], list[Saved]] | None = None
        self._activation_bytes, self._attention_bytes = 0, 0
        self._losses: list[float] = []

    @property
    def engine(self) -> Engine:
        """The engine of the first attention; all have one transport."""
        return self._attentions[0].engine

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(self._losses)

    @property
    def sent_bytes(self) -> Counter[tuple[str, ...]]:
        """Bytes sent so far by the attention, to gather parameters and to sum gradients."""
        sharded = self._collectives.sent if self._collectives else Counter()
        return super().sent_bytes + self._sent + sharded

    def untimed(self) -> None:
        self._batch: Batch = self._trainer.batch(self._number)

    def run(self, phase: str, action: Action, live: LiveBytes | None = None) -> None:
        """Execute a phase. Without transfers the optimizer gets no gradients, so that parameters stay equal."""
        for attention in self._attentions:
            attention.begin(action, LiveBytes() if live else None)
        self._marks = {}
        if self._collectives:
            self._collectives.begin(executed=action is not Action.COMPUTE)
        if action is Action.COMMUNICATION:
            self._communicate(phase)
        elif phase == "forward":
            self._forward(measured=live is not None)
        elif phase == "backward":
            assert self._loss is not None
            self._loss.backward()
            self._loss = None
        else:
            self._update(action)
        if self._collectives:
            self._calls.setdefault(phase, self._collectives.calls)
            # On a GPU they run beside the rest, on streams of their own: what they cost isn't known.
            if self._trainer.device.type == "cpu":
                self._marks.setdefault("gradient_sync", []).extend(self._collectives.marks)
        if live:
            peaks = (attention.live.peak for attention in self._attentions if attention.live)
            self._attention_bytes = max(self._attention_bytes, *peaks)
            live.peak = sum(size for kind, size in self.memory().items() if kind != HOST)

    def parts(self, phase: str) -> Mapping[str, float]:
        """Seconds of the last phase by part: the attention's own, and attention, loss, gradient_sync, optimizer."""
        marks = dict(self._marks)
        if phase in PHASES:
            marks["attention"] = [pair for each in self._attentions for pair in each.marks]
            if len(self._attentions) > 1:
                marks["full_attention"] = self._attentions[0].marks
        seconds = {name: sum(self._clock.seconds(*pair) for pair in pairs) for name, pairs in marks.items()}
        return seconds | summed(reading() for each in self._attentions for reading in each.readings)

    def memory(self) -> Mapping[str, int]:
        """Bytes by kind; activations and the attention's own are those of the execution that was measured."""
        own = {"activations": self._activation_bytes, "attention": self._attention_bytes}
        offload = self._trainer.offload
        return self._trainer.bytes_held() | own | ({HOST: offload.copied_bytes} if offload else {})

    def finite(self) -> bool:
        """Whether all parameters are finite."""
        return all(bool(self._states.local(p).isfinite().all()) for p in self._states.parameters)

    def errors(self) -> GateErrors:
        """Errors of sampled rows of the last layer's attention, in one more forward and backward of the timed step."""
        context, watched = self._context, Watched()
        last = self._workload.model.attention_of(self._workload.model.layers - 1)
        problem = self._spec.attentions[last].problem
        self._attentions[last].watched = watched
        self.untimed()
        for phase in PHASES:
            context.alive()
            self.run(phase, Action.EVERYTHING)
        self._clock.synchronize()
        self._attentions[last].watched = None
        (q, k, v, out), (dout, *gradients) = watched.of_queries, watched.gradients
        sample = sampled(problem, context.rank, self._spec.seed)
        rows = sample.of(dict(zip(NAMES, (out, *gradients), strict=True)))
        sunk = None if watched.sinks is None else SunkRows(watched.sinks)
        return errors_of_rows(problem, context, (q, k, v, dout), rows, sample, sunk, latents=watched.latents)

    def close(self) -> None:
        for attention in self._attentions:
            attention.engine.close()

    def _forward(self, *, measured: bool) -> None:
        self._states.forget()
        if self._trainer.offload:
            self._trainer.offload.copied_bytes = 0
        kept = _Kept(self._trainer.network, self._states)
        with kept.watch() if measured else nullcontext():
            hidden = self._trainer.hidden(self._batch, *self._attentions)
            start = self._clock.mark()
            self._loss = self._trainer.loss(hidden, self._batch)
            self._marks["loss"] = [(start, self._clock.mark())]
        if measured:
            self._activation_bytes = kept.bytes

    def _update(self, action: Action) -> None:
        everything = action is Action.EVERYTHING
        start = self._clock.mark()
        if everything:
            self._synchronize()
        else:
            self._states.forget()
        between = self._clock.mark()
        rate = self._workload.training.learning_rate if everything else 0.0
        for group in self._trainer.optimizer.param_groups:
            group["lr"] = rate
        self._trainer.update()
        self._marks = {"gradient_sync": [(start, between)], "optimizer": [(between, self._clock.mark())]}
        if everything:
            self._losses.append(self._trainer.global_loss)
            self._number += 1

    def _synchronize(self) -> None:
        self._states.synchronize()
        self._sent.update(self._workload.sent_otherwise(UPDATE, self._spec.problem))

    def _communicate(self, phase: str) -> None:
        """Transfers only, of arbitrary data: those of each layer, or of the gradients."""
        if phase == UPDATE:
            self._synchronize()
            return
        if self._collectives:
            self._collectives.again(self._calls[phase])
        (q, k, v, dout), saved = self._arbitrary()
        for index, attention in enumerate(self._attentions):
            for name, times in self._workload.times_executed(phase, index).items():
                for _ in range(times):
                    if name == "forward":
                        attention.forward(q, k, v)
                    else:
                        attention.backward(dout, saved[index])

    def _arbitrary(self) -> tuple[tuple[Tensor, ...], list[Saved]]:
        """q, k, v and dout of the rank's shape, and what each forward keeps for its backward. All ranks call it."""
        if self._arbitrary_tensors is None:
            problem, rank, device = self._spec.problem, self._trainer.rank, self._trainer.device
            heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
            widths = (problem.head_dim, *map(problem.width, KV.fields), problem.value_dim)
            shapes = [(problem.batch, problem.queries.tokens(rank), *each) for each in zip(heads, widths, strict=True)]
            tensors = tuple(torch.zeros(s, dtype=getattr(torch, problem.dtype), device=device) for s in shapes)
            q, k, v, _ = tensors
            self._arbitrary_tensors = tensors, [each.engine.forward(q, k, v)[1] for each in self._attentions]
        return self._arbitrary_tensors


class _Kept:
    """Counts the bytes that autograd keeps for the backward, parameters aside; tensors of one storage count once."""

    def __init__(self, network: torch.nn.Module, states: Replicated | Sharded) -> None:
        self._network, self._states, self._storages = network, states, dict[int, int]()

    @property
    def bytes(self) -> int:
        return sum(self._storages.values())

    def watch(self) -> torch.autograd.graph.saved_tensors_hooks:
        def see(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            # Gathered parameters come and go, and their memory is another's afterwards.
            held = {self._states.local(p).untyped_storage().data_ptr() for p in self._network.parameters()}
            if storage.data_ptr() not in held:
                self._storages[storage.data_ptr()] = storage.nbytes()
            return x

        return torch.autograd.graph.saved_tensors_hooks(see, lambda x: x)
