"""A step of workload=attention on one rank, and its correctness gate.

q and dout are (B, S / n, H, D), k and v (B, S / n, kv_heads, D).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.peers.engine import PeerEngine
from sp_bench.plan.caches import Caches
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Plan
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import KV
from sp_bench.run.buffers import Arena
from sp_bench.run.caches import in_pages
from sp_bench.run.engine import Engine, kernel_for
from sp_bench.run.executor import Action, Spent
from sp_bench.run.graphs import GraphedEngine
from sp_bench.run.groups import gathered, world
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.latents import Latents
from sp_bench.run.sms import share
from sp_bench.run.transport import AloneTransport
from sp_bench.workload.base import SINKS, PlannedAttention, RankContext, Spec, Step
from sp_bench.workload.exact_rows import Inputs, SunkRows, errors_of_rows
from sp_bench.workload.exactness import NAMES
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.sampled_rows import Sample, rows_for, sampled


class AttentionStep(Step):
    """Random inputs, and the engine of the timed phases."""

    def __init__(self, spec: Spec, context: RankContext) -> None:
        """Make the inputs and the engine, and execute a plan's forward that is not timed. All ranks must call it."""
        problem, rank = spec.problem, context.rank if spec.alone is None else spec.alone
        self._q, self._k, self._v, self._dout = random_inputs(problem, rank, spec.seed, context.device)
        self._given_q = given_queries(problem, rank, spec.seed, self._q)
        self._given_kv = in_pages(problem, rank, self._k, self._v)
        self._spec, self._context = spec, context
        self._sample: Sample | None = None
        self._kept: dict[str, Tensor] = {}
        self._results: dict[str, tuple[Tensor, ...]] = {}
        self._phases = spec.workload.phases
        self._sinks = sinks_of(spec, problem, context.device)
        self._sent: Counter[tuple[str, ...]] = Counter()
        self._forward_each_time = bool(spec.peer) and "forward" not in spec.workload.phases
        if spec.peer:
            self._engine = make_engine(spec, spec.problem, context)
            return
        if "forward" not in spec.workload.phases:
            # It has its own engine, so that its buffers are gone before the backward's memory is measured.
            forward = make_engine(spec, problem, context)
            self._saved = forward_of(forward, (self._given_q, *self._given_kv), sinks=self._sinks)[1]
            forward.close()
        plans = {phase: spec.plans[phase] for phase in spec.workload.phases}
        self._engine = make_engine(spec, problem, context, plans)

    @property
    def engine(self) -> Engine | GraphedEngine | PeerEngine:
        return self._engine

    @property
    def sent_bytes(self) -> Counter[tuple[str, ...]]:
        """Bytes sent so far, including untimed executions, and to sum the gradient of sinks."""
        return super().sent_bytes + self._sent

    def untimed(self) -> None:
        """Run a peer's forward before a timed backward: autograd frees its graph with each backward."""
        if self._forward_each_time:
            self.run("forward", Action.EVERYTHING)

    def capture(self) -> None:
        """Capture the timed phases, if they are replayed as graphs, without what executing them has left in memory."""
        if not isinstance(self._engine, GraphedEngine):
            return
        self._results.clear()
        if "forward" in self._phases:
            self._saved = {}
        for phase in self._phases:
            self.run(phase, Action.EVERYTHING)

    def run(self, phase: str, action: Action, live: LiveBytes | None = None) -> None:
        """Execute a phase. Only Action.EVERYTHING keeps results, and the tensors that the backward needs."""
        if phase == "forward":
            inputs = self._given_q, *self._given_kv
            out, saved = forward_of(self._engine, inputs, action, live, self._sinks)
            results = (out,)
            if action is Action.EVERYTHING:
                self._saved = saved
        else:
            results = self._engine.backward(self._dout, self._saved, action, live)
            if self._sinks is not None and action is not Action.COMPUTE and self._spec.problem.n > 1:
                dist.all_reduce(results[3])
                self._sent.update(self._spec.workload.sent_otherwise(phase, self._spec.problem))
        if action is Action.EVERYTHING:
            self._results[phase] = results

    def parts(self, phase: str) -> Mapping[str, float]:
        """Seconds of the last execution of a phase by part; empty for a peer, and for the replay of a graph.

        On a GPU that doesn't mark parts, only the caller's: marks are events beside each block.
        """
        spent = self._engine.spent(phase)
        if spent is None:
            return {}
        known = summed([spent])
        return known if marks_parts(self._spec, self._context.device) else {"caller": known["caller"]}

    def finite(self) -> bool:
        return all(bool(x.isfinite().all()) for results in self._results.values() for x in results)

    def keep(self) -> None:
        if self._sample is None:
            spec, context = self._spec, self._context
            self._sample = sampled(spec.problem, context.rank, spec.seed)
        by_phase = (("out",), ("dq", "dk", "dv"))
        named = {
            name: x
            for phase, names in zip(PHASES, by_phase, strict=True)
            for name, x in zip(names, self._results.get(phase, ()), strict=False)
        }
        self._kept = self._sample.of(named)

    def errors(self) -> GateErrors:
        """Errors of the rows that were kept last."""
        if self._sample is None:
            return GateErrors()
        self._results.clear()  # their memory is needed
        self._saved = {}
        inputs = self._q, self._k, self._v, self._dout
        sunk = None if self._sinks is None else SunkRows(self._sinks)
        spec, kept, sample = self._spec, self._kept, self._sample
        latents = Latents.random(spec.problem, spec.seed, torch.device("cpu"), backward=False)
        return errors_of_rows(spec.problem, self._context, inputs, kept, sample, sunk, latents=latents)


def summed(several: Iterable[Spent]) -> dict[str, float]:
    """The seconds of executions together by part, named as in measure.samples.INSIDE."""
    seconds: dict[str, float] = {}
    for spent in several:
        for name, part_s in asdict(spent).items():
            part = name.removesuffix("_s")
            seconds[part] = seconds.get(part, 0.0) + part_s
    return seconds


def marks_parts(spec: Spec, device: torch.device) -> bool:
    """Whether the times of kernels, folds and waits are marked: always on a CPU, and on a GPU if they are asked for, or
    a rank alone is executed for them.
    """
    return device.type == "cpu" or spec.parts or spec.alone is not None


def make_engine(
    spec: Spec, problem: Problem, context: RankContext, plans: Mapping[str, Plan] | None = None, *, timed: bool = False
) -> Engine | GraphedEngine | PeerEngine:
    """The engine of the point's plans (or of `plans`), or of its peer, on `problem`. All ranks must call it.

    `timed` has a GPU mark the times of kernels, folds and waits whether or not the point asks for its parts.
    """
    if spec.peer:
        return PeerEngine(spec.peer, problem, spec.executed, context.device)
    (engine,) = make_engines(spec, [PlannedAttention(problem, plans or spec.plans)], context, timed=timed)
    adds = problem.latent_dim or sinks_of(spec, problem, context.device) is not None
    if not context.cuda_graph or not engine.queues or adds:
        return engine
    return GraphedEngine(engine, engine.queues, _all_can if context.cuda_graph == "auto" else None)


def make_engines(
    spec: Spec, chunks: Sequence[PlannedAttention], context: RankContext, *, timed: bool = False
) -> list[Engine]:
    """An engine for each of the attentions, which run one after another. All ranks must call it.

    They have one transport. Several use the same memory for their buffers in turn, if the transport doesn't make it.
    """
    problem, device = chunks[0].problem, context.device
    plans = {f"{phase} {i}": plan for i, chunk in enumerate(chunks) for phase, plan in chunk.plans.items()}
    kernel = kernel_for(problem, spec.kernel, device.type)
    shares = share(kernel, plans, device, spec.sm_margin)
    rank, transport = context.rank, None
    if spec.alone is not None:
        rank, transport = spec.alone, AloneTransport()
    elif problem.n > 1:
        transport = context.transport(plans, shares.lane_ctas if shares else None)
    most = max((chunk.problem for chunk in chunks), key=lambda each: each.padded_heads)
    latents = Latents.random(most, spec.seed, device, backward=any("backward" in chunk.plans for chunk in chunks))
    marked, arena = timed or marks_parts(spec, device), Arena(device) if len(chunks) > 1 else None
    return [
        Engine(
            chunk.plans,
            chunk.problem,
            kernel,
            device,
            rank=rank,
            transport=transport,
            shares=shares,
            arena=arena,
            timed=marked,
            latents=latents,
        )
        for chunk in chunks
    ]


def _all_can(here: bool) -> bool:
    """Whether all ranks can what this one says that it can."""
    return all(gathered(here, world())) if dist.is_initialized() else here


def random_inputs(problem: Problem, rank: int, seed: int, device: torch.device) -> Inputs:
    """A rank's q, k, v and dout, which `seed` decides."""
    generator = _generator(seed, rank, device)
    tokens = [int(side.tokens(rank)) for side in (problem.queries, problem.keys)]
    widths = problem.head_dim, problem.value_dim
    q, dout = (random_tensor(problem, tokens[0], problem.heads, width, generator) for width in widths)
    k, v = (random_tensor(problem, tokens[1], problem.kv_heads, problem.width(field), generator) for field in KV.fields)
    return q, k, v, dout


def forward_of(
    engine: Engine | GraphedEngine | PeerEngine,
    inputs: tuple[Tensor, Tensor, Tensor],
    action: Action = Action.EVERYTHING,
    live: LiveBytes | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """(out, what the backward needs) of q, k and v, with sinks if there are some, which an Engine alone takes."""
    if sinks is None:
        return engine.forward(*inputs, action, live)
    assert isinstance(engine, Engine), "no peer, and nothing is replayed"
    return engine.forward(*inputs, action, live, sinks)


def sinks_of(spec: Spec, problem: Problem, device: torch.device) -> Tensor | None:
    """The point's sinks, (H,) in the dtype of statistics, the same on all ranks; None if it has none.

    Of a decode step, whose query heads are rows of a key head, those of each key head: (H, query heads of a key head).
    """
    if not getattr(spec.workload, SINKS, False):
        return None
    dtype, generator = getattr(torch, problem.accumulate_dtype), torch.Generator().manual_seed(spec.seed)
    shape = (problem.heads, *((problem.mask.share,) if isinstance(problem.mask, Caches) else ()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def given_queries(problem: Problem, rank: int, seed: int, q: Tensor) -> Tensor:
    """The queries that an engine takes on a rank whose own are q: these or, where all have them, those of all."""
    if not problem.queries_everywhere:
        return q
    counts = [int(problem.queries.tokens(other)) for other in range(problem.n)]
    parts = [
        q
        if other == rank
        else random_tensor(problem, tokens, problem.heads, problem.head_dim, _generator(seed, other, q.device))
        for other, tokens in enumerate(counts)
    ]
    return torch.cat(parts, dim=1)


def _generator(seed: int, rank: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed * 1_000_003 + rank)


def random_tensor(problem: Problem, tokens: int, heads: int, width: int, generator: torch.Generator) -> Tensor:
    """Normal random numbers in the problem's dtype, on the generator's device: (B, tokens, heads, width)."""
    shape = (problem.batch, tokens, heads, width)
    dtype, device = getattr(torch, problem.dtype), generator.device
    if device.type == "cpu":
        return torch.randn(shape, generator=generator).to(dtype)
    # A cast would take memory, and memory is measured on a GPU.
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


GATE_TOKENS = 256
"""The number of tokens on a rank in the gate's problem: several tiles of every kernel."""


def gate(spec: Spec, context: RankContext) -> GateErrors:
    """Errors of the point's plans or peer on its problem with a shorter sequence. All ranks must call it.

    Everything runs twice with the same buffers, and the second results are compared: every row of them or, where that
    would take minutes, a sample.
    """
    problem = spec.problem
    tokens, more = divmod(problem.seqlen, problem.n)  # the small one is as uneven
    unit = spec.peer.document_unit(problem.n) if spec.peer else 1
    small = problem.scaled(min(GATE_TOKENS, tokens) * problem.n + more, unit)
    q, k, v, dout = random_inputs(small, context.rank, spec.seed, context.device)
    asked = given_queries(small, context.rank, spec.seed, q)
    cached = in_pages(small, context.rank, k, v)
    # A function that changes its inputs doesn't change what is right.
    given = [x.clone() for x in (asked, *cached, dout)]
    engine, sinks = make_engine(spec, small, context), sinks_of(spec, small, context.device)
    sunk = None if sinks is None else SunkRows(sinks)
    results: list[Tensor] = []
    for _ in range(2):
        context.alive()
        out, saved = forward_of(engine, (given[0], given[1], given[2]), sinks=sinks)
        results = [out]
        if "backward" in spec.executed:
            context.alive()
            results += [*engine.backward(given[3], saved)]
    engine.close()
    if sunk and len(results) > len(NAMES):
        *_, of_sinks = results
        sunk.found = of_sinks.clone()
        if small.n > 1:
            dist.all_reduce(sunk.found)
    sample = rows_for(small, context.rank, spec.seed, context.device.type)
    rows = sample.of(dict(zip(NAMES, results, strict=False)))
    latents = Latents.random(small, spec.seed, torch.device("cpu"), backward=False)
    errors = errors_of_rows(small, context, (q, k, v, dout), rows, sample, sunk, latents=latents)
    if errors.uncompared:  # nothing is timed that wasn't checked
        raise MemoryError(errors.uncompared)
    return errors
