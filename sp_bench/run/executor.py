"""Execute a plan on one rank: blocks and folds on one stream, each lane's transfers on a stream of its own.

A plan is compiled once: each operation becomes a call whose kernel windows, buffers, peers and groups are worked out
(blocks.py, lanes.py). An execution performs these calls in order; an Execution has the tensors and times of one.
streams.py decides which thread or queue performs a stream's calls, and how streams wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from enum import Enum

import torch
from torch.autograd import profiler as autograd_profiler

from sp_bench.kernels import BlockKernel
from sp_bench.lower import lower
from sp_bench.plan.cast_rows import find_regions
from sp_bench.plan.ops import Chunk, Op, Plan, Transfer
from sp_bench.plan.problem import Problem
from sp_bench.run.annotations import annotation
from sp_bench.run.blocks import Blocks, Perform, nothing_seen
from sp_bench.run.buffers import Buffers
from sp_bench.run.device_streams import DeviceStreams
from sp_bench.run.devices import Device
from sp_bench.run.execution import WAITS, Execution, Marks, Sinks, Spent
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.lanes import Lanes
from sp_bench.run.latents import Latents
from sp_bench.run.partials import Sums, Tensors
from sp_bench.run.streams import Streams, ThreadStreams
from sp_bench.run.transport import Transport


class Action(Enum):
    """The operations of a plan that an execution performs."""

    EVERYTHING = "everything"
    COMPUTE = "compute_only"
    """Blocks and folds only, on data received by an earlier execution. The results are meaningless."""
    COMMUNICATION = "communication_only"
    """Transfers only, with their casts and packing, of arbitrary data. The results are meaningless."""


class Executor:
    """One rank's execution of one plan."""

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        rank: int,
        transport: Transport,
        kernel: BlockKernel,
        buffers: Buffers,
        device: torch.device,
        queues: Device | None = None,
        *,
        timed: bool = False,
        latents: Latents | None = None,
    ) -> None:
        """`queues` is the stream interface of an asynchronous device; None on a CPU.

        `timed` marks the times of kernels, folds and waits by events of a device; on a CPU they are always known.
        """
        lowering = lower(plan, problem, transport.kind)
        find_regions(plan, problem, rank)
        self._plan, self._transport, self._device, self._buffers = plan, transport, device, buffers
        self._on_host, self._timed = queues is None, timed or queues is None
        self._streams: Streams = DeviceStreams(plan, lowering, queues) if queues else ThreadStreams(plan, lowering)
        self._sums = Sums(problem, rank, device, lowering.unsummed, lowering.together)
        self._lanes = Lanes(plan, lowering, problem, rank, transport, buffers, self._streams, device)
        self._blocks = Blocks(plan, problem, rank, kernel, self._sums, device, latents, timed=self._timed)
        self._programs: dict[Action, list[Perform]] = {}
        self._last_marks = Marks(self._streams.clock)
        """Those of the last execution."""

    def __call__(
        self,
        inputs: Mapping[Chunk, Tensors],
        action: Action = Action.EVERYTHING,
        live: LiveBytes | None = None,
        results: Mapping[Chunk, Tensors] | None = None,
        sinks: Sinks | None = None,
        held: Tensors = (),
    ) -> dict[Chunk, Tensors]:
        """Run the plan on its input chunks and return its output chunks; partials keep the accumulation dtype.

        Transfers that end with a chunk of `results` write it there. Each row's softmax has `sinks`, too, and the scores
        of `held`, keys and values (B, T, kv_heads, D) that all ranks hold.

        On a GPU the results are ready on the caller's stream, not yet on the host. `live` records the memory held
        after each block. Raises what a transfer raises (RuntimeError from torch.distributed if a peer fails or times
        out).
        """
        self._transport.check()
        program = self._program(action)
        how = {"timed": self._timed, "on_host": self._on_host, "live": live, "sinks": sinks, "held": held}
        execution = Execution(inputs, self._sums, self._buffers, self._streams.clock, **how)
        self._last_marks = execution.marks
        self._lanes.given_results, self._blocks.see = results or {}, execution.see
        started = time.perf_counter()
        try:
            # Where streams are switched torch makes their device the current one.
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                if action is Action.COMPUTE:
                    with self._streams.execution():
                        for call in program:  # in plan order, which satisfies every wait
                            call(execution)
                else:
                    self._run(program, execution, compute=action is Action.EVERYTHING)
            return {chunk: execution.holdings.packed(chunk) for chunk in self._plan.ends_with}
        finally:
            execution.marks.caller_s = time.perf_counter() - started
            execution.close()
            self._lanes.given_results, self._blocks.see = {}, nothing_seen

    def reading(self) -> Callable[[], Spent]:
        """A function that tells the execution's breakdown, even after the next one. Synchronize on a GPU first."""
        return self._last_marks.spent

    def close(self) -> None:
        """Shut down the streams and let go of the buffers, at once: no cycle of references keeps them."""
        self._streams.close()
        self._programs.clear()
        self._lanes.close()
        del self._blocks

    def _program(self, action: Action) -> list[Perform]:
        """The calls that an action performs, one for each operation of the plan; compiled at its first execution."""
        if action not in self._programs:
            self._programs[action] = [self._compiled(action, index, op) for index, op in self._plan]
        return self._programs[action]

    def _compiled(self, action: Action, index: int, op: Op) -> Perform:
        if not isinstance(op, Transfer):
            return self._blocks.call(index, op, compute=action is not Action.COMMUNICATION)
        return self._lanes.pretended(index, op) if action is Action.COMPUTE else self._lanes.call(index)

    def _run(self, program: Sequence[Perform], execution: Execution, *, compute: bool) -> None:
        """Perform transfers concurrently with blocks; `compute` says whether there are any."""
        if autograd_profiler._is_profiler_enabled:
            program = [_annotated(annotation(self._plan.phase, i), call) for i, call in enumerate(program)]
        try:
            self._lanes.begin(execution.holdings, compute=compute)
            self._streams.run(program, execution, self._lanes.prepost)
        except BaseException as error:
            if not self._streams.capturing:  # else nothing was sent
                self._transport.give_up(repr(error))
                self._streams.abandon(execution.holdings)
            raise
        execution.lap(WAITS)


def _annotated(name: str, call: Perform) -> Perform:
    """The call, in a range of torch's profiler that names its operation."""

    def annotated(execution: Execution) -> None:
        with autograd_profiler.record_function(name):
            call(execution)

    return annotated
