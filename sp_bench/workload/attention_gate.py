"""The correctness gate of workload=attention."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.run.caches import in_pages
from sp_bench.run.latents import Latents
from sp_bench.workload.attention_step import forward_of, given_queries, make_engine, random_inputs, sinks_of
from sp_bench.workload.base import RankContext, Spec
from sp_bench.workload.exact_rows import SunkRows, errors_of_rows
from sp_bench.workload.exactness import NAMES
from sp_bench.workload.gate import GateErrors
from sp_bench.workload.sampled_rows import rows_for

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
