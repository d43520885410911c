"""Execute a plan on one rank: blocks and folds on one stream, each lane's transfers on a stream of its own.

streams.py decides which thread or queue runs a stream and how streams wait for each other. execution.py and lanes.py
define what each operation does; an Execution has the state of one call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import Enum

import torch
from torch.autograd import profiler as autograd_profiler

from sp_bench.kernels import BlockKernel
from sp_bench.lower import lower
from sp_bench.plan.ops import Chunk, Op, Plan, Transfer
from sp_bench.plan.problem import Problem
from sp_bench.run.annotations import annotation
from sp_bench.run.buffers import Buffers
from sp_bench.run.devices import Device
from sp_bench.run.execution import Execution, Marks, Spent, Work
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.lanes import Lanes
from sp_bench.run.partials import Tensors
from sp_bench.run.streams import DeviceStreams, Perform, Streams, ThreadStreams
from sp_bench.run.transport import Transport


class Action(Enum):
    """Which operations of a plan an execution performs."""

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
    ) -> None:
        """`queues` is the stream interface of an asynchronous device; None on a CPU."""
        lowering = lower(plan, problem, transport.kind)
        self._plan, self._transport = plan, transport
        self._streams: Streams = DeviceStreams(plan, lowering, queues) if queues else ThreadStreams(plan, lowering)
        self._lanes = Lanes(plan, lowering, problem, rank, transport, buffers, self._streams, device)
        self._work = Work(plan, problem, rank, lowering, kernel, buffers, device, self._streams.clock)
        self._last_marks = Marks(self._streams.clock)
        """Those of the last execution."""

    def __call__(
        self,
        inputs: Mapping[Chunk, Tensors],
        action: Action = Action.EVERYTHING,
        live: LiveBytes | None = None,
        results: Mapping[Chunk, Tensors] | None = None,
    ) -> dict[Chunk, Tensors]:
        """Run the plan on its input chunks and return its output chunks; partials keep the accumulation dtype.

        Transfers that end with a chunk of `results` write it there.

        On a GPU the results are ready on the caller's stream, not yet on the host. `live` records the memory held
        after each block. Raises what a transfer raises (RuntimeError from torch.distributed if a peer fails or times
        out).
        """
        self._transport.check()
        execution = Execution(self._work, inputs, live)
        self._last_marks = execution.marks
        self._lanes.given_results = results or {}
        started = time.perf_counter()
        try:
            if action is Action.COMPUTE:
                self._run_without_lanes(execution)
            else:
                self._run(execution, compute=action is Action.EVERYTHING)
            return execution.outputs()
        finally:
            execution.marks.caller_s = time.perf_counter() - started
            execution.close()
            self._lanes.given_results = {}

    @property
    def spent(self) -> Spent:
        """Time breakdown of the last execution. On a GPU, synchronize first."""
        return self._last_marks.spent()

    def reading(self) -> Callable[[], Spent]:
        """What tells the time breakdown of the last execution, even after the next one. Synchronize on a GPU first."""
        return self._last_marks.spent

    def close(self) -> None:
        """Shut down the streams and let go of the buffers, at once: no cycle of references keeps them."""
        self._streams.close()
        self._lanes.close()
        del self._work

    # Streams

    def _run(self, execution: Execution, *, compute: bool) -> None:
        """Run transfers concurrently with blocks; without `compute`, skip the blocks but keep their waits."""

        def perform(index: int, op: Op) -> None:
            if isinstance(op, Transfer):
                self._lanes.transfer(index, op, execution.holdings)
            else:
                execution.perform(index, op, compute=compute)

        try:
            self._lanes.begin(execution.holdings, compute=compute)
            self._streams.run(self._annotated(perform), self._lanes.prepost)
        except BaseException as error:
            self._transport.give_up(repr(error))
            self._streams.abandon(execution.holdings)
            raise
        execution.end("waits_s")

    def _annotated(self, perform: Perform) -> Perform:
        """`perform`, in a range that names the operation if torch's profiler runs; else as it is."""
        if not autograd_profiler._is_profiler_enabled:
            return perform

        def annotated(index: int, op: Op) -> None:
            with autograd_profiler.record_function(annotation(self._plan.phase, index)):
                perform(index, op)

        return annotated

    def _run_without_lanes(self, execution: Execution) -> None:
        """Run all operations but the transfers on the caller's stream, in plan order, which satisfies every wait."""
        with self._streams.execution():
            for index, op in self._plan:
                if isinstance(op, Transfer):
                    self._lanes.pretend(index, op, execution.holdings)
                else:
                    execution.do(op)
                    execution.release(index)
        execution.end("blocks_s")
