"""A prompt on one rank: chunk after chunk over a cache that grows. q is (B, S / n, H, D) of each chunk.

The cache is (B, S / n, kv_heads, D) for keys and for values, a rank's rows in the order in which they came: what was
cached before, then those of each chunk. A chunk's attention gets the rows so far or, under a window, the last of them.
Rows that chunks leave behind each other ascend by position.

The correctness gate computes some chunks over a cache that grows, against fp64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sp_bench.plan.documents import Packed
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import KV
from sp_bench.run.devices import clock_of
from sp_bench.run.engine import Engine
from sp_bench.run.executor import Action
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.latents import Latents
from sp_bench.workload.attention_step import GATE_TOKENS, make_engines, marks_parts, random_tensor, sinks_of, summed
from sp_bench.workload.base import PlannedAttention, RankContext, Spec, Step
from sp_bench.workload.exact_rows import SunkRows, errors_of_rows
from sp_bench.workload.gate import GateErrors, worst_of
from sp_bench.workload.prefill_costs import chunk_part
from sp_bench.workload.sampled_rows import Sample, rows_for, sampled

COPIED = "with batch above 1 the rows of the cache that a chunk sees are copied before its attention"


class Cached:
    """A rank's random queries, keys and values of each chunk, and its cache."""

    def __init__(self, problems: Sequence[Problem], rank: int, seed: int, device: torch.device) -> None:
        """Draw all, and put what is cached before the first chunk into the cache. The rest of that is zero."""
        self._seed = seed
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + rank)

        def drawn(problem: Problem, tokens: int, heads: int, *widths: int) -> tuple[Tensor, ...]:
            return tuple(random_tensor(problem, tokens, heads, width, generator) for width in widths)

        first, last = problems[0], problems[-1]
        self.problems = tuple(problems)
        tokens = [int(each.queries.tokens(rank)) for each in problems]
        keys = [int(each.keys.tokens(rank)) for each in problems]
        self.starts = [*accumulate(tokens, initial=keys[0] - tokens[0])]
        self.ends = self.starts[1:]
        self.rows = [slice(end - count, end) for end, count in zip(self.ends, keys, strict=True)]
        """The rows of the cache that each chunk's attention gets."""
        assert all(rows.start >= 0 for rows in self.rows), "what a chunk sees, earlier ones have left"
        self.q = [drawn(each, new, each.heads, each.head_dim)[0] for each, new in zip(problems, tokens, strict=True)]
        widths = [last.width(field) for field in KV.fields]
        self.new = [drawn(each, new, each.kv_heads, *widths) for each, new in zip(problems, tokens, strict=True)]
        self.before = drawn(first, self.starts[0], first.kv_heads, *widths)
        self.cache = tuple(x.new_zeros(x.shape[0], self.ends[-1], *x.shape[2:]) for x in self.before)
        for cache, x in zip(self.cache, self.before, strict=True):
            cache[:, : self.starts[0]] = x

    def write(self, index: int) -> None:
        """Put a chunk's keys and values into the cache."""
        for cache, new in zip(self.cache, self.new[index], strict=True):
            cache[:, self.starts[index] : self.ends[index]] = new

    def seen(self, index: int) -> tuple[Tensor, Tensor]:
        """The keys and values that a chunk's attention gets."""
        k, v = (cache[:, self.rows[index]] for cache in self.cache)
        return k, v

    def errors(self, index: int, context: RankContext, out: Tensor, sample: Sample, sinks: Tensor | None) -> GateErrors:
        """Errors of sampled rows of a chunk's output, as `Sample.of` returns them. All ranks must call it.

        They are held against keys and values as they were drawn, whatever is in the cache.
        """
        every = (torch.cat(each, 1) for each in zip(self.before, *self.new[: index + 1], strict=True))
        k, v = (x[:, self.rows[index]] for x in every)
        inputs = self.q[index], k, v, self.q[index]  # of dout no row is looked at
        sunk, problem = None if sinks is None else SunkRows(sinks), self.problems[index]
        latents = Latents.random(problem, self._seed, torch.device("cpu"), backward=False)
        return errors_of_rows(problem, context, inputs, {"out": out}, sample, sunk, latents=latents)


def watched(chunks: int) -> list[int]:
    """The chunks whose results are compared: the first, one in the middle, the last."""
    return sorted({0, chunks // 2, chunks - 1})


class PrefillStep(Step):
    """A prompt, timed from the first chunk's beginning to the last one's end."""

    def __init__(self, spec: Spec, context: RankContext) -> None:
        """Make inputs, cache and engines, and execute each chunk. All ranks must call it.

        The last chunks come first: what the engines use in turn then has its size, and none lets go of it later.
        """
        self._spec, self._context, self._clock = spec, context, clock_of(context.device)
        problems = [chunk.problem for chunk in spec.attentions]
        self._prompt = Cached(problems, context.rank, spec.seed, context.device)
        self._engines = make_engines(spec, spec.attentions, context)
        self._sinks = sinks_of(spec, spec.problem, context.device)
        self._samples: dict[int, Sample] = {}
        self._kept: dict[int, Tensor] = {}
        self._out: list[Tensor | None] = [None] * len(problems)
        self._marks: list[Any] = []
        for index in reversed(range(len(problems))):
            context.alive()
            self._chunk(index, Action.EVERYTHING, None)

    @property
    def engine(self) -> Engine:
        """The first chunk's."""
        return self._engines[0]

    @property
    def notes(self) -> tuple[str, ...]:
        return (*super().notes, *([COPIED] if self._spec.problem.batch > 1 else []))

    def run(self, phase: str, action: Action, live: LiveBytes | None = None) -> None:
        """Execute all chunks in order. Only Action.EVERYTHING keeps results."""
        self._marks = [self._clock.mark()]
        for index in range(len(self._engines)):
            out = self._chunk(index, action, live)
            self._marks.append(self._clock.mark())
            if action is Action.EVERYTHING:
                self._out[index] = out

    def _chunk(self, index: int, action: Action, live: LiveBytes | None) -> Tensor:
        prompt = self._prompt
        prompt.write(index)
        return self._engines[index].forward(prompt.q[index], *prompt.seen(index), action, live, self._sinks)[0]

    def parts(self, phase: str) -> Mapping[str, float]:
        """Seconds of the last execution by part, summed over chunks, and of each chunk as a whole.

        On a GPU that doesn't mark parts, of those only the caller's.
        """
        seconds = summed(engine.spent(phase) for engine in self._engines)
        known = seconds if marks_parts(self._spec, self._context.device) else {"caller": seconds["caller"]}
        pairs = enumerate(zip(self._marks, self._marks[1:], strict=False))
        return known | {chunk_part(index): self._clock.seconds(*pair) for index, pair in pairs}

    def finite(self) -> bool:
        return all(bool(out.isfinite().all()) for out in self._out if out is not None)

    def keep(self) -> None:
        for index in watched(len(self._engines)):
            out = self._out[index]
            if out is None:
                continue
            if index not in self._samples:
                problem = self._prompt.problems[index]
                self._samples[index] = sampled(problem, self._context.rank, self._spec.seed + index)
            self._kept[index] = self._samples[index].of({"out": out})["out"]

    def errors(self) -> GateErrors:
        """Errors of the rows that were kept last, of the chunk that is off most."""
        self._out = [None] * len(self._engines)  # their memory is needed
        by_chunk = [
            self._prompt.errors(index, self._context, rows, self._samples[index], self._sinks)
            for index, rows in self._kept.items()
        ]
        tokens = sum(problem.seqlen for problem in self._prompt.problems)
        return worst_of(by_chunk, self._spec.problem.dtype, tokens) if by_chunk else GateErrors()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


def gate(spec: Spec, context: RankContext) -> GateErrors:
    """Errors of the chunk that is off most, on a shorter prompt. All ranks must call it.

    The prompt is computed twice with the same buffers and cache, and the second results are compared.
    """
    chunks = small_chunks(spec.attentions, GATE_TOKENS)
    problems = [chunk.problem for chunk in chunks]
    prompt, engines = Cached(problems, context.rank, spec.seed, context.device), make_engines(spec, chunks, context)
    sinks = sinks_of(spec, problems[0], context.device)
    results = []
    for _ in range(2):
        results.clear()
        for index, engine in enumerate(engines):
            context.alive()
            prompt.write(index)
            results.append(engine.forward(prompt.q[index], *prompt.seen(index), sinks=sinks)[0])
    for engine in engines:
        engine.close()
    errors_of = []
    for index, out in enumerate(results):
        sample = rows_for(problems[index], context.rank, spec.seed, context.device.type)
        errors_of.append(prompt.errors(index, context, sample.of({"out": out})["out"], sample, sinks))
    errors = worst_of(errors_of, spec.problem.dtype, sum(each.seqlen for each in problems))
    if errors.uncompared:  # nothing is timed that wasn't checked
        raise MemoryError(errors.uncompared)
    return errors


def small_chunks(chunks: Sequence[PlannedAttention], tokens: int) -> list[PlannedAttention]:
    """Some of a prompt's chunks as a prompt of their own, of at most so many tokens on a rank each.

    Their plans are those of the point. What was cached before the first is there as well, and shortened alike, and so
    is what a window or the chunks of a mask leave of it.
    """
    attentions: list[PlannedAttention] = []
    first = chunks[0].problem
    assigned = [min(tokens, first.history // first.n) * first.n]
    for index in watched(len(chunks)):
        problem, plans = chunks[index].problem, chunks[index].plans
        each, more = divmod(problem.seqlen, problem.n)
        seqlen, mask = min(tokens, each) * problem.n + more, problem.mask
        if isinstance(mask, Packed):
            mask = mask.scaled(seqlen).after(tuple(assigned))
        small = replace(problem, seqlen=seqlen, kv_seqlen=sum(assigned) + seqlen, mask=mask)
        attentions.append(PlannedAttention(small, plans))
        assigned.append(seqlen)
    return attentions
