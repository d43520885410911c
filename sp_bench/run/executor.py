"""Execute a plan on one rank: blocks and folds on the calling thread, each lane's transfers on a thread of its own.

The waits between them are the plan's (Dataflow), so that a transfer starts as soon as its operands and its buffer
are there, however far the blocks are, and the other way round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from sp_bench.kernels import BlockKernel
from sp_bench.plan import (
    BLOCKS,
    FIELDS,
    Attend,
    AttendBackward,
    Chunk,
    Fold,
    Join,
    Mask,
    Pass,
    Plan,
    Problem,
    dataflow,
    window,
)
from sp_bench.run.buffers import Buffers
from sp_bench.run.partials import Partials, Tensors
from sp_bench.run.streams import Progress
from sp_bench.run.transport import GlooTransport


@dataclass
class Spent:
    """Where one execution's time went, in seconds of the calling thread."""

    blocks_s: float = 0.0
    """In blocks and folds."""
    waits_s: float = 0.0
    """Waiting for transfers."""


class Executor:
    """One rank's execution of one plan, with receive and staging buffers that are reused from call to call."""

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
        self._lanes = {
            lane: [(index, op) for index, op in plan if isinstance(op, Pass) and op.lane == lane] for lane in plan.lanes
        }
        self._lane_ids = {lane: number for number, lane in enumerate(self._lanes)}
        self._threads = ThreadPoolExecutor(len(self._lanes), "sp_bench-lane") if self._lanes else None
        self._slots, self._staging = buffers.of(plan, self._flow)
        self._start({})

    def __call__(self, inputs: Mapping[Chunk, Tensors]) -> dict[Chunk, Tensors]:
        """Run the plan on its inputs; returns its outputs, as accumulators.

        Raises what a transfer raises (RuntimeError from torch.distributed when a peer is gone or late).
        """
        self._transport.check()
        self._start(inputs)
        lanes = [self._threads.submit(self._run_lane, lane) for lane in self._lanes] if self._threads else []
        try:
            self._run_blocks()
            started = time.perf_counter()
            for lane in lanes:
                lane.result()
        except BaseException as error:
            self._progress.fail(error)
            assert self._progress.cause is not None
            self._transport.give_up(repr(self._progress.cause))
            raise self._progress.cause from None
        self.spent.waits_s += time.perf_counter() - started
        outputs = {chunk: self._partials.get(chunk) for chunk in self._plan.outputs}
        self._start({})
        return outputs

    def close(self) -> None:
        """End the lanes' threads."""
        if self._threads:
            self._threads.shutdown()

    def _start(self, inputs: Mapping[Chunk, Tensors]) -> None:
        self._held = dict(inputs)
        self._partials = Partials(self._problem, self._device)
        self._progress = Progress((BLOCKS, *self._plan.lanes))
        if inputs:
            self.spent = Spent()

    # Lanes

    def _run_lane(self, lane: str) -> None:
        try:
            for index, op in self._lanes[lane]:
                self._progress.wait(self._flow.waits[index])
                self._transfer(index, op)
                self._progress.end(lane, index)
        except BaseException as error:
            self._progress.fail(error)
            raise

    def _transfer(self, index: int, op: Pass) -> None:
        assert op.send is not None
        assert op.recv is not None
        lane, received = self._lane_ids[op.lane], self._slots[self._flow.slots[index]]
        works = self._transport.receive(lane, int(op.source(self._rank)), received)
        counted_as = [(op.lane, op.send.tensor, field.name) for field in FIELDS[op.send.tensor]]
        works += self._transport.send(lane, int(op.target(self._rank)), self._outgoing(op.lane, op.send), counted_as)
        for work in works:
            work.wait()
        self._held[op.recv] = received
        self._partials.drop(op.send)

    def _outgoing(self, lane: str, chunk: Chunk) -> Tensors:
        """The chunk in its wire form: itself, or cast into the lane's staging buffer."""
        held = self._held[chunk] if chunk in self._held else self._partials.get(chunk)
        staged = self._staging.get((lane, chunk.tensor))
        if staged is None:
            return held
        for wire, tensor in zip(staged, held, strict=True):
            wire.copy_(tensor)
        return staged

    # Blocks and folds

    def _run_blocks(self) -> None:
        for index, op in self._plan:
            if isinstance(op, Pass):
                continue
            started = time.perf_counter()
            self._progress.wait(self._flow.waits[index])
            ready = time.perf_counter()
            match op:
                case Attend():
                    self._attend(op)
                case AttendBackward():
                    self._attend_backward(op)
                case Fold():
                    self._partials.add(op.into, self._held[op.part])
                case Join():
                    pass  # its waits were all there is to it
            self._progress.end(BLOCKS, index)
            self.spent.waits_s += ready - started
            self.spent.blocks_s += time.perf_counter() - ready

    def _attend(self, op: Attend) -> None:
        (q,), (k, v) = self._held[op.q], self._held[op.kv]
        for rows, columns, mask in self._windows(op.q, op.kv):
            out, lse = self._kernel.forward(q[:, rows], k[:, columns], v[:, columns], mask)
            self._partials.add_output(op.o, rows, out, lse)

    def _attend_backward(self, op: AttendBackward) -> None:
        (q, out, dout, lse), (k, v) = self._held[op.odoq], self._held[op.kv]
        for rows, columns, mask in self._windows(op.odoq, op.kv):
            dq, dk, dv = self._kernel.backward(
                dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows], mask
            )
            self._partials.add_gradients(op.dq, rows, (dq,))
            self._partials.add_gradients(op.dkv, columns, (dk, dv))

    def _windows(self, q: Chunk, kv: Chunk) -> list[tuple[slice, slice, Mask]]:
        """The block's regions as slices of both chunks, narrowed so that each mask is FULL or CAUSAL and none empty."""
        windows, tokens = [], self._problem.local_seqlen
        for region in self._problem.regions(int(q.owner(self._rank)), int(kv.owner(self._rank))):
            rows, columns = window(region.mask, region.q.slice(tokens), region.kv.slice(tokens))
            if rows.start < rows.stop and columns.start < columns.stop:
                windows.append((rows, columns, Mask.FULL if region.mask is Mask.FULL else Mask.CAUSAL))
        return windows
