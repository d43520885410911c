"""Execute a plan on one rank: blocks and folds on the calling thread, each lane's transfers on a thread of its own.

The waits between them are the plan's (Dataflow), so that a transfer starts as soon as its operands and its buffer
are there, however far the blocks are, and the other way round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch

from sp_bench.kernels import BlockKernel
from sp_bench.plan import (
    BLOCKS,
    FIELDS,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    Fold,
    Mask,
    Op,
    Place,
    Plan,
    Problem,
    Transfer,
    dataflow,
    window,
)
from sp_bench.run.buffers import Buffers
from sp_bench.run.holdings import Holdings, LiveBytes
from sp_bench.run.lanes import Lanes
from sp_bench.run.partials import Tensors
from sp_bench.run.streams import Progress, lane_threads
from sp_bench.run.transport import GlooTransport


class Does(Enum):
    """How much of a plan an execution does."""

    EVERYTHING = "everything"
    COMPUTE = "compute_only"
    """Its blocks and folds, on what an earlier execution received. The results mean nothing."""
    COMMUNICATION = "communication_only"
    """Its transfers, with their casts and packing, of whatever is there. The results mean nothing."""


@dataclass
class Spent:
    """Where one execution's time went, in seconds of the calling thread."""

    kernels_s: float = 0.0
    """In block kernels."""
    folds_s: float = 0.0
    """In folds, of a block's result and of what peers sent."""
    blocks_s: float = 0.0
    """In blocks and folds, with what it takes to start them."""
    waits_s: float = 0.0
    """Waiting for transfers."""


class Executor:
    """One rank's execution of one plan."""

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        rank: int,
        transport: GlooTransport,
        kernel: BlockKernel,
        buffers: Buffers,
        device: torch.device,
    ) -> None:
        self._plan, self._problem, self._rank = plan, problem, rank
        self._transport, self._kernel, self._device = transport, kernel, device
        self._flow = dataflow(plan)
        self._lanes = Lanes(plan, self._flow, problem, rank, transport, buffers, device)
        self._by_lane = {
            lane: [(index, op) for index, op in plan if isinstance(op, Transfer) and op.lane == lane]
            for lane in plan.lanes
        }
        self._threads = lane_threads(len(plan.lanes)) if plan.lanes else None
        self._buffers, self._windows = buffers, cache(self._find_windows)
        self._live: LiveBytes | None = None
        self.spent = Spent()

    def __call__(
        self, inputs: Mapping[Chunk, Tensors], does: Does = Does.EVERYTHING, live: LiveBytes | None = None
    ) -> dict[Chunk, Tensors]:
        """Run the plan on what it starts with; returns what it ends with, partials as accumulators.

        `live` is shown what the rank holds after each block. Raises what a transfer raises (RuntimeError from
        torch.distributed when a peer is gone or late).
        """
        self._transport.check()
        self._holdings, self._live, self.spent = Holdings(inputs, self._problem, self._device), live, Spent()
        try:
            if does is Does.COMPUTE:
                self._run_without_lanes()
            else:
                self._run(compute=does is Does.EVERYTHING)
            return {chunk: self._holdings.get(chunk) for chunk in self._plan.ends_with}
        finally:
            self._holdings = Holdings({}, self._problem, self._device)

    def close(self) -> None:
        """End the lanes' threads."""
        if self._threads:
            self._threads.shutdown()

    # Streams

    def _run(self, *, compute: bool) -> None:
        """Lanes beside blocks, or beside nothing where these are only waited for."""
        self._progress = Progress((BLOCKS, *self._plan.lanes))
        lanes = [self._threads.submit(self._run_lane, lane) for lane in self._by_lane] if self._threads else []
        try:
            self._run_blocks(compute=compute)
            started = time.perf_counter()
            for lane in lanes:
                lane.result()
        except BaseException as error:
            self._progress.fail(error)
            assert self._progress.cause is not None
            self._transport.give_up(repr(self._progress.cause))
            raise self._progress.cause from None
        self.spent.waits_s += time.perf_counter() - started

    def _run_lane(self, lane: str) -> None:
        try:
            with torch.no_grad():  # a thread of its own doesn't know the caller's grad mode
                for index, op in self._by_lane[lane]:
                    self._progress.wait(self._flow.waits[index])
                    self._lanes.transfer(index, op, self._holdings)
                    self._progress.end(lane, index)
        except BaseException as error:
            self._progress.fail(error)
            raise

    def _run_blocks(self, *, compute: bool) -> None:
        for index, op in self._plan:
            if isinstance(op, Transfer):
                continue
            started = time.perf_counter()
            self._progress.wait(self._flow.waits[index])
            ready = time.perf_counter()
            if compute or isinstance(op, Bundle):
                self._do(op)
            self._progress.end(BLOCKS, index)
            self.spent.waits_s += ready - started
            self.spent.blocks_s += time.perf_counter() - ready

    def _run_without_lanes(self) -> None:
        """Operations in the order of the plan, which is one of those that the waits allow."""
        started = time.perf_counter()
        for index, op in self._plan:
            if isinstance(op, Transfer):
                self._lanes.pretend(index, op, self._holdings)
            else:
                self._do(op)
        self.spent.blocks_s = time.perf_counter() - started

    # Blocks and folds

    def _do(self, op: Op) -> None:
        """A block or a fold. There is nothing to do in a Join: its waits were all there is to it."""
        match op:
            case Attend():
                self._attend(op)
            case AttendBackward():
                self._attend_backward(op)
            case Fold():
                started, held = time.perf_counter(), self._holdings
                held.partials.add(op.into, held.rows(op.part), held.received(op.part))
                self.spent.folds_s += time.perf_counter() - started
            case Bundle():
                self._bundle(op)

    def _attend(self, op: Attend) -> None:
        held = self._holdings
        (q,), (k, v) = held.received(op.q), held.received(op.kv)
        for rows, columns, mask in self._windows(op.q.place, op.kv.place):
            there, started = held.among(op.q, rows), time.perf_counter()
            out, lse = self._kernel.forward(q[:, there], k[:, columns], v[:, columns], mask)
            ended = time.perf_counter()
            self._see(out, lse)
            held.partials.add_output(op.o, rows, out, lse)
            self.spent.kernels_s += ended - started
            self.spent.folds_s += time.perf_counter() - ended

    def _attend_backward(self, op: AttendBackward) -> None:
        held = self._holdings
        (q, out, dout, lse), (k, v) = held.received(op.odoq), held.received(op.kv)
        for rows, columns, mask in self._windows(op.odoq.place, op.kv.place):
            there, started = held.among(op.odoq, rows), time.perf_counter()
            dq, dk, dv = self._kernel.backward(
                dout[:, there], q[:, there], k[:, columns], v[:, columns], out[:, there], lse[:, :, there], mask
            )
            ended = time.perf_counter()
            self._see(dq, dk, dv)
            held.partials.add_gradients(op.dq, rows, (dq,))
            held.partials.add_gradients(op.dkv, columns, (dk, dv))
            self.spent.kernels_s += ended - started
            self.spent.folds_s += time.perf_counter() - ended

    def _bundle(self, op: Bundle) -> None:
        held = self._holdings
        parts = [(FIELDS[part.tensor], held.received(part)) for part in op.parts]
        by_name = {field.name: x for fields, tensors in parts for field, x in zip(fields, tensors, strict=True)}
        held.put(op.into, tuple(by_name[field.name] for field in FIELDS[op.into.tensor]))

    def _see(self, *results: torch.Tensor) -> None:
        """Show the memory that is taken at this moment, to whom it may concern."""
        if self._live is not None:
            self._live.see([*self._holdings.tensors(), *self._buffers.tensors(), *results])

    def _find_windows(self, q: Place, kv: Place) -> list[tuple[slice, slice, Mask]]:
        """A block's regions as slices of both chunks, narrowed so that each mask is FULL or CAUSAL and none empty."""
        windows, tokens = [], self._problem.block_tokens
        for region in self._problem.regions(int(q.owner(self._rank)), int(kv.owner(self._rank))):
            rows, columns = window(region.mask, region.q.slice(tokens), region.kv.slice(tokens))
            if rows.start < rows.stop and columns.start < columns.stop:
                windows.append((rows, columns, Mask.FULL if region.mask is Mask.FULL else Mask.CAUSAL))
        return windows
