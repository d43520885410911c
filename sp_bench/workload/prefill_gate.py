"""The correctness gate of workload=prefill: some chunks over a cache that grows, against fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sp_bench.plan.documents import Packed
from sp_bench.workload.attention_gate import GATE_TOKENS
from sp_bench.workload.attention_step import make_engines, sinks_of
from sp_bench.workload.base import PlannedAttention, RankContext, Spec
from sp_bench.workload.gate import GateErrors, worst_of
from sp_bench.workload.prefill_step import Cached, watched
from sp_bench.workload.sampled_rows import rows_for


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
