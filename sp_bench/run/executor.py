"""Execute a plan on one rank: blocks and folds on the calling thread, each lane's transfers on a thread of its own.

The waits between them are the plan's (Dataflow), so that a transfer starts as soon as its operands and its buffer
are there, however far the blocks are, and the other way round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_bench.kernels import BlockKernel
from sp_bench.plan import (
    BLOCKS,
    FIELDS,
    AllToAll,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    Field,
    Fold,
    Join,
    Mask,
    Part,
    Pass,
    Plan,
    Problem,
    Stage,
    Transfer,
    by_heads,
    dataflow,
    part_sent,
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
            lane: [(index, op) for index, op in plan if isinstance(op, Transfer) and op.lane == lane]
            for lane in plan.lanes
        }
        self._lane_ids = {lane: number for number, lane in enumerate(self._lanes)}
        self._threads = ThreadPoolExecutor(len(self._lanes), "sp_bench-lane") if self._lanes else None
        self._slots, self._staging = buffers.of(plan, self._flow)
        self._start({})

    def __call__(self, inputs: Mapping[Chunk, Tensors]) -> dict[Chunk, Tensors]:
        """Run the plan on what it starts with; returns what it ends with, partials as accumulators.

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
        outputs = {chunk: self._tensors(chunk) for chunk in self._plan.ends_with}
        self._start({})
        return outputs

    def close(self) -> None:
        """End the lanes' threads."""
        if self._threads:
            self._threads.shutdown()

    def _start(self, inputs: Mapping[Chunk, Tensors]) -> None:
        self._held = dict(inputs)
        self._parts: dict[Chunk, Part] = {}
        self._partials = Partials(self._problem, self._device)
        self._progress = Progress((BLOCKS, *self._plan.lanes))
        if inputs:
            self.spent = Spent()

    # Lanes

    def _run_lane(self, lane: str) -> None:
        try:
            with torch.no_grad():  # a thread of its own doesn't know the caller's grad mode
                for index, op in self._lanes[lane]:
                    self._progress.wait(self._flow.waits[index])
                    self._transfer(index, op)
                    self._progress.end(lane, index)
        except BaseException as error:
            self._progress.fail(error)
            raise

    def _transfer(self, index: int, op: Transfer) -> None:
        assert op.send is not None
        assert op.recv is not None
        slot, part = self._flow.slots.get(index), Part.WHOLE
        buffers = self._slots[slot] if slot else self._new(op.recv)
        if isinstance(op, AllToAll):
            self._held[op.recv] = self._all_to_all(op, buffers)
        else:
            part = part_sent(op, self._problem, int(op.source(self._rank)))
            self._held[op.recv] = self._pass(op, self._first_rows(buffers, op.recv, part))
        self._parts[op.recv] = part
        if op.send not in self._plan.kept:
            self._partials.drop(op.send)

    def _pass(self, op: Pass, into: Tensors) -> Tensors:
        assert op.send is not None
        source, target = int(op.source(self._rank)), int(op.target(self._rank))
        outgoing = self._outgoing(op)
        if target == self._rank:
            for buffer, tensor in zip(into, outgoing, strict=True):
                buffer.copy_(tensor)
            return into
        works = self._transport.receive(self._lane_ids[op.lane], source, into)
        works += self._transport.send(self._lane_ids[op.lane], target, outgoing, self._counted_as(op))
        for work in works:
            work.wait()
        return into

    def _all_to_all(self, op: AllToAll, into: Tensors) -> Tensors:
        """Exchange one piece with each member: its heads of this rank's tokens for this rank's heads of its tokens."""
        sent, received = (self._staging[Stage(op.lane, op.send.tensor, use)] for use in ("send", "recv"))
        own, lane, works = int(op.group.position(self._rank)), self._lane_ids[op.lane], []
        held = self._tensors(op.send)[: len(into)]
        for field, pieces, tensor in zip(by_heads(op), sent, held, strict=True):
            for member, piece in enumerate(pieces):
                if member != own:
                    piece.copy_(self._piece(op, field, tensor, member, of_tokens=not op.to_heads))
        members = [(int(op.group.member(self._rank, shift)), shift) for shift in range(1, op.group.size)]
        for rank, _ in members:
            works += self._transport.receive(lane, rank, [x[int(op.group.position(rank))] for x in received])
        for rank, _ in members:
            pieces = [x[int(op.group.position(rank))] for x in sent]
            works += self._transport.send(lane, rank, pieces, self._counted_as(op))
        for work in works:
            work.wait()
        for field, pieces, source, tensor in zip(by_heads(op), received, held, into, strict=True):
            if not op.to_heads:
                tensor.zero_()
            for member, theirs in enumerate(pieces):
                # The rank's own piece doesn't travel, and is spared the rounding of the wire.
                piece = theirs if member != own else self._piece(op, field, source, own, of_tokens=not op.to_heads)
                place = self._piece(op, field, tensor, member, of_tokens=op.to_heads)
                # What several ranks computed with one key head is added up.
                place.copy_(piece) if op.to_heads else place.add_(piece)
        return into

    def _piece(self, op: AllToAll, field: Field, tensor: Tensor, member: int, *, of_tokens: bool) -> Tensor:
        """A member's tokens of a chunk by heads, or a member's heads of a chunk by tokens."""
        if of_tokens:
            tokens = self._problem.local_seqlen
            return tensor[:, member * tokens : (member + 1) * tokens]
        heads, first = self._problem.field_heads(field), member * tensor.shape[2] // op.group.size
        return tensor[:, :, first : first + heads]

    def _new(self, chunk: Chunk) -> Tensors:
        """Tensors for a chunk that outlives the plan."""
        kinds = ((self._problem.field_shape(f), self._problem.field_dtype(f, wire=False)) for f in FIELDS[chunk.tensor])
        return tuple(torch.empty(shape, dtype=getattr(torch, dtype), device=self._device) for shape, dtype in kinds)

    def _counted_as(self, op: Transfer) -> list[tuple[str, str, str]]:
        return [(op.lane, op.carries, field.name) for field in FIELDS[op.carries]]

    def _outgoing(self, op: Pass) -> Tensors:
        """What a rank sends, in its wire form: the chunk itself, or rows of it or a cast of it, in a staging buffer."""
        assert op.send is not None
        chunk, part = op.send, part_sent(op, self._problem, self._rank)
        held, rows = self._tensors(chunk), self._among(chunk, part.slice(self._problem.block_tokens))
        staged = self._staging.get(Stage(op.lane, chunk.tensor, "pass"))
        if staged is None or (part is self._part(chunk) and not self._problem.needs_cast(chunk.tensor)):
            return held
        staged = self._first_rows(staged, chunk, part)
        for wire, tensor in zip(staged, held, strict=True):
            wire.copy_(tensor[:, rows] if tensor.ndim == 4 else tensor[:, :, rows])
        return staged

    def _first_rows(self, buffers: Tensors, chunk: Chunk, part: Part) -> Tensors:
        """As much of a chunk's buffers as a part of it takes, contiguous."""
        if part is Part.WHOLE:
            return buffers
        shapes = [self._problem.field_shape(field, part) for field in FIELDS[chunk.tensor]]
        return tuple(x.view(-1)[: math.prod(s)].view(s) for x, s in zip(buffers, shapes, strict=True))

    def _tensors(self, chunk: Chunk) -> Tensors:
        return self._held[chunk] if chunk in self._held else self._partials.get(chunk)

    def _part(self, chunk: Chunk) -> Part:
        """Which rows of a chunk are there."""
        return self._parts.get(chunk, Part.WHOLE)

    def _among(self, chunk: Chunk, rows: slice) -> slice:
        """Rows of a chunk, counted among those that are there."""
        first = self._part(chunk).slice(self._problem.block_tokens).start
        return slice(rows.start - first, rows.stop - first)

    # Blocks and folds

    def _run_blocks(self) -> None:
        for index, op in self._plan:
            if isinstance(op, Transfer):
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
                    rows = self._part(op.part).slice(self._problem.block_tokens)
                    self._partials.add(op.into, rows, self._held[op.part])
                case Bundle():
                    self._bundle(op)
                case Join():
                    pass  # its waits were all there is to it
            self._progress.end(BLOCKS, index)
            self.spent.waits_s += ready - started
            self.spent.blocks_s += time.perf_counter() - ready

    def _attend(self, op: Attend) -> None:
        (q,), (k, v) = self._held[op.q], self._held[op.kv]
        for rows, columns, mask in self._windows(op.q, op.kv):
            there = self._among(op.q, rows)
            out, lse = self._kernel.forward(q[:, there], k[:, columns], v[:, columns], mask)
            self._partials.add_output(op.o, rows, out, lse)

    def _attend_backward(self, op: AttendBackward) -> None:
        (q, out, dout, lse), (k, v) = self._held[op.odoq], self._held[op.kv]
        for rows, columns, mask in self._windows(op.odoq, op.kv):
            there = self._among(op.odoq, rows)
            dq, dk, dv = self._kernel.backward(
                dout[:, there], q[:, there], k[:, columns], v[:, columns], out[:, there], lse[:, :, there], mask
            )
            self._partials.add_gradients(op.dq, rows, (dq,))
            self._partials.add_gradients(op.dkv, columns, (dk, dv))

    def _bundle(self, op: Bundle) -> None:
        fields = [(f.name, x) for part in op.parts for f, x in zip(FIELDS[part.tensor], self._held[part], strict=True)]
        self._held[op.into] = tuple(dict(fields)[field.name] for field in FIELDS[op.into.tensor])

    def _windows(self, q: Chunk, kv: Chunk) -> list[tuple[slice, slice, Mask]]:
        """The block's regions as slices of both chunks, narrowed so that each mask is FULL or CAUSAL and none empty."""
        windows, tokens = [], self._problem.block_tokens
        for region in self._problem.regions(int(q.owner(self._rank)), int(kv.owner(self._rank))):
            rows, columns = window(region.mask, region.q.slice(tokens), region.kv.slice(tokens))
            if rows.start < rows.stop and columns.start < columns.stop:
                windows.append((rows, columns, Mask.FULL if region.mask is Mask.FULL else Mask.CAUSAL))
        return windows
