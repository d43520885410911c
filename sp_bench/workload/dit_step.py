"""A denoising step on one rank, with the times of its attention and its memory by kind, and its correctness gate."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL, Joint
from sp_bench.plan.problem import Problem
from sp_bench.run.devices import clock_of
from sp_bench.run.engine import Engine
from sp_bench.run.executor import Action
from sp_bench.run.holdings import LiveBytes
from sp_bench.workload.attention_step import make_engine, summed
from sp_bench.workload.base import RankContext, Spec, Step
from sp_bench.workload.denoiser import Denoiser
from sp_bench.workload.exact_rows import Inputs, errors_of_rows
from sp_bench.workload.exactness import relative_error, squared_norms
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.sampled_rows import sampled
from sp_bench.workload.train_gate import COMPOUNDED, ExactAttention, gate_tokens
from sp_bench.workload.train_step import MarkedEngine, Watched
from sp_bench.workload.transformer import Layer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sp_bench.workload.dit import Denoise


class DenoiseStep(Step):
    """A denoiser, and the engine that computes the attention of all its layers."""

    def __init__(self, workload: Denoise, spec: Spec, context: RankContext) -> None:
        """Make model and engine. All ranks must call it."""
        self._workload, self._spec, self._context, self._clock = workload, spec, context, clock_of(context.device)
        self._denoiser = Denoiser(workload.model, spec.problem, spec.seed, context.rank, context.device)
        engine = make_engine(spec, spec.problem, context, timed=True)
        assert isinstance(engine, Engine)
        self._attention = MarkedEngine(engine, self._clock)
        self._number = 0
        self._latent = self._denoiser.latent(0)
        self._predicted: Tensor | None = None
        self._activation_bytes = self._residual_bytes = self._attention_bytes = 0

    @property
    def engine(self) -> Engine:
        return self._attention.engine

    def untimed(self) -> None:
        self._latent = self._denoiser.latent(self._number)
        self._number += 1

    def run(self, phase: str, action: Action, live: LiveBytes | None = None) -> None:
        """Execute the step, or only its blocks with all else that computes, or only the transfers of its attentions."""
        of_attention = LiveBytes() if live else None
        self._attention.begin(action, of_attention)
        if action is Action.COMMUNICATION:
            given = self._arbitrary()
            for _ in range(self._workload.model.layers):
                self._attention.forward(*given)
            return
        with self._measured() if live else ExitStack():
            predicted = self._denoiser.predicted(self._latent, self._attend)
        if action is Action.EVERYTHING:
            self._predicted = predicted
        if live and of_attention:
            self._attention_bytes = max(self._attention_bytes, of_attention.peak)
            held = self.memory()
            # What a feed-forward holds is gone when the next attention begins, but for the residual stream.
            of_layer = max(held["activations"], self._residual_bytes + held["attention"])
            live.peak = held["parameters"] + of_layer

    def parts(self, phase: str) -> Mapping[str, float]:
        """Seconds of the last execution by part: the attention as a whole, and its own parts."""
        attention_s = sum(self._clock.seconds(*pair) for pair in self._attention.marks)
        return {"attention": attention_s} | summed(reading() for reading in self._attention.readings)

    def memory(self) -> Mapping[str, int]:
        """Bytes by kind; activations and the attention's own are those of the execution that was measured."""
        parameters = sum(parameter.nbytes for parameter in self._denoiser.network.parameters())
        return {"parameters": parameters, "activations": self._activation_bytes, "attention": self._attention_bytes}

    def finite(self) -> bool:
        return self._predicted is None or bool(self._predicted.isfinite().all())

    def errors(self) -> GateErrors:
        """Errors of sampled rows of the last layer's attention, in one more execution of the timed step."""
        self._attention.watched = watched = Watched()
        self.run("forward", Action.EVERYTHING)
        self._attention.watched = None
        q, k, v, *held, out = watched.of_queries
        problem = whole_attention(self._spec.problem)
        if held:
            k, v = (with_share(*pair, self._context.rank, problem) for pair in zip((k, v), held, strict=True))
        sample = sampled(problem, self._context.rank, self._spec.seed)
        inputs: Inputs = q, k, v, q  # of dout no row is looked at
        return errors_of_rows(problem, self._context, inputs, sample.of({"out": out}), sample)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, held: tuple[Tensor, ...]) -> Tensor:
        return self._attention.forward(q, k, v, held)[0]

    def _arbitrary(self) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """q, k, v and held keys and values of the rank's shape."""
        problem, rank, model = self._spec.problem, self._context.rank, self._workload.model
        dtype, device = getattr(torch, problem.dtype), self._context.device

        def made(tokens: int, heads: int) -> Tensor:
            return torch.zeros(problem.batch, int(tokens), heads, problem.head_dim, dtype=dtype, device=device)

        k = made(problem.keys.tokens(rank), problem.kv_heads)
        text = made(model.joint_tokens, problem.kv_heads)
        return made(problem.queries.tokens(rank), problem.heads), k, k, (text, text) if model.joint_tokens else ()

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Measure the activations of a feed-forward network: its input and what its matrices read and write."""
        with ExitStack() as hooks:
            for layer in self._denoiser.network.layers:
                assert isinstance(layer, Layer)
                sizes: dict[str, int] = {}

                def input_of(module: Any, given: tuple[Tensor, ...], into: dict[str, int] = sizes) -> None:
                    into["residual"] = self._residual_bytes = given[0].nbytes

                def both_of(module: Any, given: tuple[Tensor, ...], out: Tensor, into: dict[str, int] = sizes) -> None:
                    into["up"] = given[0].nbytes + out.nbytes

                def activated(module: Any, given: tuple[Tensor, ...], into: dict[str, int] = sizes) -> None:
                    self._activation_bytes = max(self._activation_bytes, sum(into.values()) + given[0].nbytes)

                for hook in (
                    layer.register_forward_pre_hook(input_of),
                    layer.up.register_forward_hook(both_of),
                    layer.down.register_forward_pre_hook(activated),
                ):
                    hooks.callback(hook.remove)
            yield


def whole_attention(problem: Problem) -> Problem:
    """The problem with the keys that all ranks hold behind the assigned ones: `with_share` has a rank's part."""
    if not problem.mask.held:
        return problem
    keys = problem.keys.seqlen + problem.mask.held
    whole = replace(problem.in_one_slice, padded=None)
    return replace(whole, kv_seqlen=keys, mask=FULL, layout=LAYOUTS["contiguous"])


def with_share(assigned: Tensor, held: Tensor, rank: int, problem: Problem) -> Tensor:
    """A rank's keys or values of `whole_attention`: the assigned ones, and as many of the held ones as are left."""
    before = sum(int(problem.keys.tokens(r)) for r in range(rank)) - rank * assigned.shape[1]
    more = int(problem.keys.tokens(rank)) - assigned.shape[1]
    return torch.cat((assigned, held[:, before : before + more]), 1)


class Seen:
    """The outputs of a denoiser's attentions, layer by layer, and how they are computed."""

    def __init__(self, attention: Engine | ExactAttention) -> None:
        self._attention = attention
        self.outs: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, held: tuple[Tensor, ...]) -> Tensor:
        if isinstance(self._attention, Engine):
            out, _ = self._attention.forward(q, k, v, held=held)
        else:
            k, v = (torch.cat(pair, 1) for pair in zip(held, (k, v), strict=True)) if held else (k, v)
            out, _ = self._attention.forward(q, k, v)
        self.outs.append(out)
        return out


def gate(workload: Denoise, spec: Spec, context: RankContext) -> GateErrors:
    """Errors of the point's plans in a narrow model on fewer patches. All ranks must call it.

    They are those of the layer whose attention is off most, and of the patches.
    """
    model = workload.model.small()
    problem = _small(spec.problem, model.joint_tokens, gate_tokens(spec.problem, model.layers, context.device.type))
    denoiser = Denoiser(model, problem, spec.seed, context.rank, context.device)
    engine = make_engine(spec, problem, context)
    assert isinstance(engine, Engine)
    seen = Seen(engine)
    patches = denoiser.predicted(denoiser.latent(0), seen)
    engine.close()
    context.alive()
    exact_patches, exact = _whole(workload, spec, problem, context)
    mine, text = denoiser.places.to(context.device), model.joint_tokens
    rows = torch.cat((torch.arange(text, device=context.device), mine + text))  # text first, which all ranks have
    pairs = [(patches, exact_patches[:, mine])]
    pairs += [(out, exact_out[:, rows]) for out, exact_out in zip(seen.outs, exact, strict=True)]
    squares = torch.stack([squared_norms(*pair) for pair in pairs]).cpu()
    if problem.n > 1:
        dist.all_reduce(squares)
    errors = [float(relative_error(square, pair[0].numel())) for square, pair in zip(squares, pairs, strict=True)]
    # The residual stream hides what an attention adds to patches as long as the weights are random.
    worst = {"out": max(errors[1:])}
    return GateErrors(overall=worst, worst_head={"patches": errors[0]}, factor=COMPOUNDED, seqlen=problem.keys.seqlen)


def _small(problem: Problem, text: int, tokens: int) -> Problem:
    """The problem with so many patches at most, assigned as the point's are, and less text."""
    if not problem.mask.held:
        return problem.scaled(tokens)
    patches = min(tokens, problem.keys.seqlen) // problem.n * problem.n
    return replace(problem, seqlen=patches + problem.n * text, kv_seqlen=patches, mask=Joint(text))


def _whole(workload: Denoise, spec: Spec, problem: Problem, context: RankContext) -> tuple[Tensor, list[Tensor]]:
    """(patches, output of each attention) of the same model on one process, in fp64 and with exact attention."""
    text = problem.mask.held
    alone = replace(
        problem.in_one_slice,
        n=1,
        seqlen=problem.keys.seqlen + text,
        kv_seqlen=problem.keys.seqlen,
        dtype="float64",
        wire_dtype="",
        padded=None,
        layout=LAYOUTS["contiguous"],
    )
    denoiser = Denoiser(workload.model.small(), alone, spec.seed, 0, context.device)
    seen = Seen(ExactAttention(FULL if text else problem.mask, context.rank, problem.n, context.alive))
    return denoiser.predicted(denoiser.latent(0), seen), seen.outs
