"""What every rank does to measure points: prove them right on a small problem, then time them in turn."""

from __future__ import annotations

import math
import resource
import time
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.kernels import KERNELS
from sp_bench.measure.pool import report
from sp_bench.measure.spec import Measured, Spec
from sp_bench.plan import Mask, Problem
from sp_bench.run.attention import Engine
from sp_bench.run.sharding import shard, unshard

GATE_TOKENS = 32
"""Tokens of a rank in the correctness gate."""
NAMES = ("out", "dq", "dk", "dv")


def measure(specs: list[Spec], iters: int, warmup: int) -> list[Measured]:
    """Measure all points in turn, iteration by iteration, so that drift of the machine meets all of them alike.

    Runs on every rank of the default group. A point that fails the gate is not timed.
    """
    results = [Measured() for _ in specs]
    for spec, result in zip(specs, results, strict=True):
        if spec.verify:
            result.errors = _gate(spec)
            report("gate")
    timed = [
        (_Bench(spec), result) for spec, result in zip(specs, results, strict=True) if result.passes(spec.problem.dtype)
    ]
    for iteration in range(warmup + iters):
        for bench, result in timed:
            bench.step(None if iteration < warmup else result)
            report("step")
    for bench, _ in timed:
        bench.engine.close()
    return results


class _Bench:
    """A point ready to be timed: inputs made, engine built."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        problem = spec.problem
        generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + _rank())
        self.q, self.dout = (_random(problem, problem.heads, generator) for _ in range(2))
        self.k, self.v = (_random(problem, problem.kv_heads, generator) for _ in range(2))
        self.engine = Engine(spec.method, problem, None, spec.kernel, spec.costs, torch.device("cpu"))

    def step(self, result: Measured | None) -> None:
        """One iteration, all ranks starting together; recorded in `result` if given."""
        sent = self.engine.transport.sent_bytes
        sent.clear()
        _barrier()
        start = time.perf_counter()
        out, lse = self.engine.forward(self.q, self.k, self.v)
        middle = end = time.perf_counter()
        by_phase = {"forward": Counter(sent)}
        if self.spec.backward:
            self.engine.backward(self.dout, self.q, self.k, self.v, out, lse)
            end = time.perf_counter()
            by_phase["backward"] = Counter({key: size - by_phase["forward"][key] for key, size in sent.items()})
        if result is None:
            return
        spent = [self.engine.spent(phase) for phase in by_phase]
        result.forward_s.append(middle - start)
        result.backward_s.append(end - middle)
        result.step_s.append(end - start)
        result.blocks_s.append(sum(s.blocks_s for s in spent))
        result.waits_s.append(sum(s.waits_s for s in spent))
        result.sent_bytes = {phase: +counts for phase, counts in by_phase.items()}
        result.kernel = self.engine.kernel.name
        result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _random(problem: Problem, heads: int, generator: torch.Generator) -> Tensor:
    shape = (problem.batch, problem.local_seqlen, heads, problem.head_dim)
    return torch.randn(shape, generator=generator).to(getattr(torch, problem.dtype))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _gate(spec: Spec) -> dict[str, float]:
    """Relative L2 errors against fp64 of a problem scaled down in its sequence only, on every rank."""
    problem = spec.problem
    tokens = min(GATE_TOKENS, problem.local_seqlen)
    small = replace(problem, seqlen=tokens * problem.n)
    generator = torch.Generator().manual_seed(spec.seed)
    dtype = getattr(torch, problem.dtype)
    q, k, v, dout = (
        torch.randn((small.batch, small.seqlen, heads, small.head_dim), generator=generator).to(dtype)
        for heads in (small.heads, small.kv_heads, small.kv_heads, small.heads)
    )
    my_q, my_k, my_v, my_dout = (shard(x, small.layout, _rank(), small.n) for x in (q, k, v, dout))
    engine = Engine(spec.method, small, None, spec.kernel, spec.costs, torch.device("cpu"))
    out, lse = engine.forward(my_q, my_k, my_v)
    found = [out]
    if spec.backward:
        found += engine.backward(my_dout, my_q, my_k, my_v, out, lse)
    engine.close()
    full = [unshard(x, small.layout, None, small.n) for x in found]
    errors = torch.zeros(len(full), dtype=torch.float64)
    if _rank() == 0:
        wanted = _exact(q, k, v, dout, small.causal)[: len(full)]
        errors = torch.stack([_relative(x, y) for x, y in zip(full, wanted, strict=True)])
    if dist.is_initialized():
        dist.broadcast(errors, 0)
    return dict(zip(NAMES, errors.tolist(), strict=False))


def _exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) in fp64."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    kernel, mask = KERNELS["reference"](), Mask.CAUSAL if causal else Mask.FULL
    out, lse = kernel.forward(q, k, v, mask)
    return (out, *kernel.backward(dout, q, k, v, out, lse, mask))


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    error = (found.double() - wanted).norm() / wanted.norm()
    return torch.where(error.isfinite(), error, math.inf)
