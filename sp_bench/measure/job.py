"""The job of every rank that measures points: check each on a small problem, then time all in turn."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch.distributed as dist

from sp_bench.machine import at_most_all_cores, boot_id, busy_s
from sp_bench.measure.devices import device_here, device_versions, start_here, transport_here
from sp_bench.measure.gpu_watch import gpu_watch
from sp_bench.measure.memory import MemoryWatch
from sp_bench.measure.pool import report
from sp_bench.measure.result import RankResult
from sp_bench.measure.samples import (
    ALL_PHASES,
    COMMUNICATION_ONLY,
    COMPUTE_ONLY,
    CORE_WINDOW,
    CORES,
    START,
    STEP,
    Row,
    Samples,
)
from sp_bench.run.devices import clock_of
from sp_bench.run.executor import Action
from sp_bench.run.groups import owned_by, release
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.home import home
from sp_bench.workload import GateErrors, RankContext, Spec

PART_OF = {Action.EVERYTHING: STEP, Action.COMPUTE: COMPUTE_ONLY, Action.COMMUNICATION: COMMUNICATION_ONLY}


def measure(specs: list[Spec], iters: int, warmup: int) -> list[RankResult]:
    """Measure all points in turn, iteration by iteration, so that drift of the machine affects all of them alike.

    Runs on every rank of the default group. Each iteration has its own order of points, the same on all ranks: no point
    always comes first, or after the same other point. A point that fails the correctness gate is not timed. Before each
    piece of work the index of its point is reported, so that a failure can be attributed to it. The groups of a point
    end with it.
    """
    gates, timed = [], {}
    for index, spec in enumerate(specs):
        with owned_by(index):
            gates.append(_gate(index, spec))
    for index, (spec, gate) in enumerate(zip(specs, gates, strict=True)):
        if not gate.wrong(spec.problem.dtype):
            with owned_by(index):
                timed[index] = TimedPoint(index, spec)
    for iteration in range(warmup + iters):
        for index in random.Random(iteration).sample(list(timed), len(timed)):
            report(index)
            with owned_by(index):
                timed[index].iterate(None if iteration < warmup else iteration - warmup)
    results = []
    for index, gate in enumerate(gates):
        with owned_by(index):
            results.append(timed.pop(index).result(gate) if index in timed else RankResult(gate=gate))
        release(index)
    return results


def _gate(index: int, spec: Spec) -> GateErrors:
    if not spec.verify:
        return GateErrors()
    report(index)
    context = _context(index, spec)
    context.alive()
    return spec.workload.gate(spec, context)


def _context(index: int, spec: Spec) -> RankContext:
    """The context of this rank before the point at `index` is timed, which reports it as alive.

    On a GPU it may be connecting: each plan that is executed for the first time opens NCCL's connections.
    """
    rank, device = dist.get_rank() if dist.is_initialized() else 0, device_here()
    transport = partial(transport_here, options=spec.transport)
    alive = partial(report, index, step=False, connecting=device.type == "cuda")
    return RankContext(rank, device, transport, alive, cuda_graph=spec.transport.cuda_graph)


class TimedPoint:
    """A point that is ready to be timed on this rank, and its samples so far."""

    def __init__(self, index: int, spec: Spec) -> None:
        """Prepare the point's step, and execute it once, untimed, to measure its memory: of graphs, as it is captured.

        That also opens exactly the connections between ranks that the plans use, and loads the kernels. Nothing else
        may run meanwhile.
        """
        context = _context(index, spec)
        self._rank = context.rank if spec.alone is None else spec.alone
        self._phases, self._verify = spec.workload.phases, spec.verify
        self._actions = tuple(Action) if spec.parts else (Action.EVERYTHING,)
        self._on_cpu = context.device.type == "cpu"
        self._clock, memory = clock_of(context.device), MemoryWatch(context.device)
        self._start, self._watch = start_here(self._clock), gpu_watch(context.device)
        self._rows: list[Row] = []
        self._link_sent_bytes: list[int] = []
        self._sent_bytes: dict[str, Counter[tuple[str, ...]]] = {}
        context.alive()
        self._step = spec.workload.prepare(spec, context)
        self._step.untimed()
        context.alive()
        memory.forget_peak()
        live = LiveBytes()
        self._execute(Action.EVERYTHING, None, live)
        if context.cuda_graph:  # replays use the memory of their captures
            memory.forget_peak()
            self._step.capture()
        outside_bytes = self._step.engine.transport.outside_bytes
        self._memory = replace(memory.peak(live.peak, outside_bytes), kinds=self._step.memory())
        if context.cuda_graph:
            for action in self._actions[1:]:  # no capture is timed
                self._execute(action, None)

    def iterate(self, iteration: int | None) -> None:
        """Run one iteration of the step and its parts, and sample it unless it is None. Ranks start phases together."""
        for action in self._actions:
            self._step.untimed()
            _barrier()
            link_before, began_s, busy_before_s = home().link_bytes(), perf_counter(), self._busy_s()
            self._execute(action, iteration)
            _barrier()  # all ranks have received, so no transfer is under way any more
            window_s, busy_after_s, link_after = perf_counter() - began_s, self._busy_s(), home().link_bytes()
            if iteration is None:
                continue
            if busy_before_s is not None and busy_after_s is not None:
                busy = at_most_all_cores(busy_after_s - busy_before_s, window_s)
                self._add(iteration, ALL_PHASES, CORES[PART_OF[action]], busy)
                if action is Action.EVERYTHING:
                    self._add(iteration, ALL_PHASES, CORE_WINDOW, window_s)
            if action is Action.EVERYTHING and self._verify:
                self._step.keep()
            if action is Action.EVERYTHING and link_before and link_after:
                self._link_sent_bytes.append(link_after[0] - link_before[0])

    def _busy_s(self) -> float | None:
        return busy_s() if self._on_cpu else None

    def result(self, gate: GateErrors) -> RankResult:
        """This rank's result of the point. Closes the step."""
        engine = self._step.engine
        result = RankResult(
            gate=gate,
            samples=Samples.of(self._rows),
            memory=self._memory,
            sent_bytes=self._sent_bytes,
            link_sent_bytes=tuple(self._link_sent_bytes),
            finite=self._step.finite(),
            losses=tuple(self._step.losses),
            kernel=engine.kernel_name,
            notes=self._step.notes,
            communicators=engine.transport.communicators,
            lane_ctas=engine.shares.lane_ctas if engine.shares else None,
            sm_margin=engine.shares.margin if engine.shares else None,
            gpu=self._watch.taken() if self._watch else None,
            device=device_versions(),
            machine=boot_id(),
        )
        if self._verify:
            result = replace(result, timed=self._step.errors())
        self._step.close()
        return result

    def _execute(self, action: Action, iteration: int | None, live: LiveBytes | None = None) -> None:
        """Run each timed phase once. All ranks begin it together, with idle devices."""
        for phase in self._phases:
            self._clock.synchronize()
            sent_before = Counter(self._step.sent_bytes)
            start = self._start.together()
            self._step.run(phase, action, live)
            end = self._clock.mark()
            if self._watch and action is Action.EVERYTHING and iteration is not None:
                self._watch.sample()
            self._clock.synchronize()
            if iteration is not None:
                self._keep(iteration, phase, action, start, end)
            if action is Action.EVERYTHING:
                self._sent_bytes[phase] = Counter(self._step.sent_bytes) - sent_before

    def _keep(self, iteration: int, phase: str, action: Action, start: Any, end: Any) -> None:
        """Add the samples of a phase between two marks that the device has reached."""
        began_s = self._clock.machine_s(start)
        seconds = self._clock.seconds(start, end)
        self._add(iteration, phase, PART_OF[action], seconds, float("nan") if began_s is None else began_s)
        if action is Action.EVERYTHING:
            if (waited_s := self._start.waited_s(start)) is not None:
                self._add(iteration, phase, START, waited_s)
            for part, spent_s in self._step.parts(phase).items():
                self._add(iteration, phase, part, spent_s)

    def _add(self, iteration: int, phase: str, part: str, seconds: float, began_s: float = float("nan")) -> None:
        self._rows.append(Row(self._rank, iteration, phase, part, seconds, began_s))


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
