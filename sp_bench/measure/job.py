"""What every rank does to measure points: prove them right on a small problem, then time them in turn."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.kernels import KERNELS
from sp_bench.machine import boot_id, busy_s
from sp_bench.measure.devices import described, device_here, transport_here
from sp_bench.measure.exactness import NAMES, relative_error, squared_norms
from sp_bench.measure.memory import MemoryWatch
from sp_bench.measure.pool import report
from sp_bench.measure.spec import Measured, Spec
from sp_bench.peers.engine import PeerEngine
from sp_bench.plan import PHASES, Mask, Problem
from sp_bench.run.attention import Engine
from sp_bench.run.devices import clock_of
from sp_bench.run.executor import Does
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.home import home
from sp_bench.run.sharding import shard, unshard
from sp_bench.run.transport import AloneTransport

GATE_TOKENS = 32
"""Tokens of a rank in the correctness gate."""


def measure(specs: list[Spec], iters: int, warmup: int) -> list[Measured]:
    """Measure all points in turn, iteration by iteration, so that drift of the machine meets all of them alike.

    Each iteration has its own order, the same on all ranks: none always comes first, or after the same other one.
    Runs on every rank of the default group. A point that fails the gate is not timed. Before each piece of work the
    index of its point is reported, so that a failure can be put down to it.
    """
    results = [Measured() for _ in specs]
    for index, (spec, result) in enumerate(zip(specs, results, strict=True)):
        if spec.verify and spec.alone is None:
            report(index)
            _gate(index, spec, result)
    timed = []
    for index, (spec, result) in enumerate(zip(specs, results, strict=True)):
        if not result.wrong(spec.problem.dtype):
            report(index, step=False)
            bench = _Bench(spec)
            report(index, step=False)
            bench.watch_memory(result)
            timed.append((index, bench, result))
    for iteration in range(warmup + iters):
        for index, bench, result in random.Random(iteration).sample(timed, len(timed)):
            report(index)
            bench.step(None if iteration < warmup else result)
    for _, bench, result in timed:
        result.finite = bench.finite()
        result.kernel, result.device, result.machine = bench.engine.kernel_name, described(), boot_id()
        bench.engine.close()
    return results


class _Timed(NamedTuple):
    """A phase of an iteration."""

    seconds: float
    began_s: float | None
    """By the clock of the machine; None where the device has one of its own."""


NOT_DONE = _Timed(0.0, None)


class _Bench:
    """A point ready to be timed: inputs made, engine built."""

    def __init__(self, spec: Spec) -> None:
        problem, device = spec.problem, device_here()
        self.clock, self.memory = clock_of(device), MemoryWatch(device)
        self.busy_s = busy_s if device.type == "cpu" else lambda: None
        generator = torch.Generator(device).manual_seed(spec.seed * 1_000_003 + (spec.alone or _rank()))
        self.q, self.dout = (_random(problem, problem.heads, generator) for _ in range(2))
        self.k, self.v = (_random(problem, problem.kv_heads, generator) for _ in range(2))
        self.engine = _engine(spec, problem)
        self.phases = spec.phases
        self.does = tuple(Does) if spec.parts else (Does.EVERYTHING,)
        self.last: list[Tensor] = []

    def watch_memory(self, result: Measured) -> None:
        """One step, untimed, that finds out how much memory the point takes. Nothing else may run meanwhile.

        It also opens the connections between ranks, all that the plans use and no other, and loads the kernels.
        """
        live = LiveBytes()
        self._execute(Does.EVERYTHING, live)
        result.live_bytes = live.peak
        self.memory.tell(result)

    def step(self, result: Measured | None) -> None:
        """One iteration, recorded in `result` if given. All ranks start each of its phases together."""
        for does in self.does:
            self.engine.transport.sent_bytes.clear()
            _barrier()
            before, busy_before_s = home().link_bytes(), self.busy_s()
            phases, by_phase = self._execute(does)
            _barrier()  # all have received, so that nothing is on its way any more
            after, busy_after_s = home().link_bytes(), self.busy_s()
            if result is None:
                continue
            if busy_before_s is not None and busy_after_s is not None:
                _core_s(result, does).append(busy_after_s - busy_before_s)
            part = "" if does is Does.EVERYTHING else f"{does.value}_"
            for phase in PHASES:
                _keep(result, f"{part}{phase}_s", phases.get(phase, NOT_DONE))
            if does is Does.EVERYTHING:
                if before and after:
                    result.interface_sent_bytes.append(after[0] - before[0])
                spent = [self.engine.spent(phase) for phase in phases]
                result.blocks_s.append(sum(s.blocks_s for s in spent))
                result.waits_s.append(sum(s.waits_s for s in spent))
                result.kernels_s.append(sum(s.kernels_s for s in spent))
                result.folds_s.append(sum(s.folds_s for s in spent))
                result.caller_s.append(sum(s.caller_s for s in spent))
                result.sent_bytes = by_phase

    def _execute(self, does: Does, live: LiveBytes | None = None) -> tuple[dict[str, _Timed], dict[str, Counter]]:
        """Time and bytes sent of each phase. Only an execution of everything leaves results behind."""
        sent, phases = self.engine.transport.sent_bytes, {}
        start = self._together()
        out, saved = self.engine.forward(self.q, self.k, self.v, does, live)
        phases["forward"] = self._since(start)
        by_phase = {"forward": Counter(sent)}
        found = [out]
        if "backward" in self.phases:
            if does is not Does.EVERYTHING:
                saved = self.saved
            start = self._together()
            found += self.engine.backward(self.dout, saved, does, live)
            phases["backward"] = self._since(start)
            by_phase["backward"] = Counter(sent) - by_phase["forward"]
        if does is Does.EVERYTHING:
            self.last, self.saved = found, saved
        return phases, by_phase

    def _together(self) -> Any:
        """A mark that all ranks set together, with nothing left to do on their devices."""
        self.clock.synchronize()
        _barrier()
        return self.clock.mark()

    def _since(self, start: Any) -> _Timed:
        """What the device has worked since a mark; returns when it has."""
        end = self.clock.mark()
        self.clock.synchronize()
        return _Timed(self.clock.seconds(start, end), self.clock.machine_s(start))

    def finite(self) -> bool:
        """Whether the results of the last step are."""
        return all(bool(x.isfinite().all()) for x in self.last)


def _keep(result: Measured, name: str, timed: _Timed) -> None:
    """Add a time of one iteration, and when it began."""
    getattr(result, name).append(timed.seconds)
    if timed.began_s is not None:
        result.began_s.setdefault(name, []).append(timed.began_s)


def _core_s(result: Measured, does: Does) -> list[float]:
    return {
        Does.EVERYTHING: result.core_s,
        Does.COMPUTE: result.compute_only_core_s,
        Does.COMMUNICATION: result.communication_only_core_s,
    }[does]


def _engine(spec: Spec, problem: Problem) -> Engine | PeerEngine:
    """What executes a point, or a smaller problem of the same kind."""
    if spec.peer:
        return PeerEngine(spec.peer, problem, spec.phases)
    rank, transport = _rank(), None
    if spec.alone is not None:
        rank, transport = spec.alone, AloneTransport()
    elif problem.n > 1:
        transport = transport_here(spec.plans)
    return Engine(spec.plans, problem, spec.kernel, device_here(), rank=rank, transport=transport)


def _random(problem: Problem, heads: int, generator: torch.Generator) -> Tensor:
    shape = (problem.batch, problem.local_seqlen, heads, problem.head_dim)
    dtype, device = getattr(torch, problem.dtype), generator.device
    if device.type == "cpu":
        return torch.randn(shape, generator=generator).to(dtype)
    # A cast would take memory, which is watched there.
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _gate(index: int, spec: Spec, result: Measured) -> None:
    """Errors against fp64 of the same plans on a problem scaled down in its sequence only, into every rank's result.

    Everything runs twice with the same buffers, and the second run is judged. Each rank computes the exact results of
    some of the key heads, one query head after the other: those of all would take one rank minutes where ranks are
    many. `index` is what the point is reported as.
    """
    small = replace(spec.problem, seqlen=min(GATE_TOKENS, spec.problem.local_seqlen) * spec.problem.n)
    generator = torch.Generator().manual_seed(spec.seed)
    dtype = getattr(torch, small.dtype)
    q, k, v, dout = (
        torch.randn((small.batch, small.seqlen, heads, small.head_dim), generator=generator).to(dtype)
        for heads in (small.heads, small.kv_heads, small.kv_heads, small.heads)
    )
    my_q, my_k, my_v, my_dout = (shard(x, small.layout, _rank(), small.n).to(device_here()) for x in (q, k, v, dout))
    engine = _engine(spec, small)
    found: list[Tensor] = []
    for _ in range(2):
        report(index, step=False)
        out, saved = engine.forward(my_q, my_k, my_v)
        found = [out]
        if "backward" in spec.phases:
            report(index, step=False)
            found += engine.backward(my_dout, saved)
    engine.close()
    full = [unshard(x.cpu(), small.layout, None, small.n) for x in found]
    squares, sharing = torch.zeros(2, len(full), small.heads, dtype=torch.float64), small.heads // small.kv_heads

    def compare(tensor: int, head: int, wanted: Tensor) -> None:
        if tensor < len(full):
            squares[:, tensor, head] = squared_norms(full[tensor][:, :, head], wanted.squeeze(2).cpu())

    for kv_head in range(_rank(), small.kv_heads, small.n):
        of_keys: list[Tensor] = []
        for head in range(kv_head * sharing, (kv_head + 1) * sharing):
            report(index, step=False)
            inputs = ((q, head), (k, kv_head), (v, kv_head), (dout, head))
            out, dq, *dkv = _exact(*(x[:, :, i : i + 1].to(device_here()) for x, i in inputs), causal=small.causal)
            compare(0, head, out)
            compare(1, head, dq)
            of_keys = [x + y for x, y in zip(of_keys, dkv, strict=True)] if of_keys else dkv
        for tensor, wanted in enumerate(of_keys, start=2):
            compare(tensor, kv_head, wanted)
    if dist.is_initialized():
        dist.all_reduce(squares)
    for i, (name, x) in enumerate(zip(NAMES, full, strict=False)):
        of_heads = squares[:, i, : x.shape[2]]
        result.errors[name] = float(relative_error(of_heads.sum(1), x.numel()))
        result.worst_head_errors[name] = float(relative_error(of_heads, x.numel() // x.shape[2]).max())


def _exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) in fp64."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    kernel, mask = KERNELS["reference"](), Mask.CAUSAL if causal else Mask.FULL
    out, lse = kernel.forward(q, k, v, mask)
    return (out, *kernel.backward(dout, q, k, v, out, lse, mask))
