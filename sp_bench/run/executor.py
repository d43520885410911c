"""Execute a plan on one rank: blocks and folds on one stream, each lane's transfers on a stream of its own.

streams.py decides which thread or queue runs a stream and how streams wait for each other. This file and lanes.py
define what each operation does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler

from sp_bench.kernels import BlockKernel
from sp_bench.kernels.pieces import Pieces, calls
from sp_bench.kernels.row_sums import projection, row_sums
from sp_bench.lower import lower
from sp_bench.plan.dataflow import row_sums_released
from sp_bench.plan.ops import Attend, AttendBackward, Bundle, Chunk, Fold, Fused, Op, Place, Plan, RowSums, Transfer
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import RegionKind
from sp_bench.plan.union import Pieces as UnionPieces
from sp_bench.plan.union import kernel_calls
from sp_bench.run.annotations import annotation
from sp_bench.run.buffers import Buffers
from sp_bench.run.devices import Clock, Device
from sp_bench.run.fused import cut, operands
from sp_bench.run.holdings import Holdings, LiveBytes
from sp_bench.run.lanes import Lanes
from sp_bench.run.partials import Rows, Tensors, tokens_of
from sp_bench.run.streams import DeviceStreams, Perform, Streams, ThreadStreams
from sp_bench.run.transport import Transport


class Action(Enum):
    """Which operations of a plan an execution performs."""

    EVERYTHING = "everything"
    COMPUTE = "compute_only"
    """Blocks and folds only, on data received by an earlier execution. The results are meaningless."""
    COMMUNICATION = "communication_only"
    """Transfers only, with their casts and packing, of arbitrary data. The results are meaningless."""


@dataclass
class Spent:
    """Time breakdown of one execution, in seconds on the compute stream (that of the blocks)."""

    kernels_s: float = 0.0
    """Time in block kernels."""
    folds_s: float = 0.0
    """Time in folds of block results and of partials that peers sent."""
    blocks_s: float = 0.0
    """Time in blocks and folds, launch overhead included."""
    waits_s: float = 0.0
    """Time waiting for transfers and, on a GPU, for the caller to queue the next operation."""
    caller_s: float = 0.0
    """Time of the calling thread: on a GPU the time to queue all work, on a CPU the whole execution."""


@dataclass
class _Marks:
    """(start, end) marks by field of Spent. On a GPU, synchronize before reading them."""

    clock: Clock
    pairs: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)
    caller_s: float = 0.0

    def add(self, name: str, start: Any, end: Any) -> None:
        self.pairs.setdefault(name, []).append((start, end))

    def spent(self) -> Spent:
        sums = {name: sum(self.clock.seconds(start, end) for start, end in pairs) for name, pairs in self.pairs.items()}
        return Spent(**sums, caller_s=self.caller_s)


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
        self._plan, self._problem, self._rank = plan, problem, rank
        self._transport, self._kernel, self._device = transport, kernel, device
        lowering = lower(plan, problem, transport.kind)
        self._streams: Streams = DeviceStreams(plan, lowering, queues) if queues else ThreadStreams(plan, lowering)
        self._lanes = Lanes(plan, lowering, problem, rank, transport, buffers, self._streams, device)
        self._mark = self._streams.clock.mark
        self._buffers, self._windows = buffers, cache(self._find_windows)
        self._calls = cache(lambda op: kernel_calls(op, problem, rank))
        self._unsummed = lowering.unsummed
        self._released = row_sums_released(plan)
        self._live: LiveBytes | None = None
        self._marks = _Marks(self._streams.clock)

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
        self._holdings, self._live = Holdings(inputs, self._problem, self._rank, self._device, self._unsummed), live
        self._marks = _Marks(self._streams.clock)
        self._lanes.given_results = results or {}
        started = time.perf_counter()
        try:
            self._last_mark = self._mark()
            if action is Action.COMPUTE:
                self._run_without_lanes()
            else:
                self._run(compute=action is Action.EVERYTHING)
            return {chunk: self._holdings.packed(chunk) for chunk in self._plan.ends_with}
        finally:
            self._marks.caller_s = time.perf_counter() - started
            self._holdings = Holdings({}, self._problem, self._rank, self._device)
            self._lanes.given_results = {}

    @property
    def spent(self) -> Spent:
        """Time breakdown of the last execution. On a GPU, synchronize first."""
        return self._marks.spent()

    def reading(self) -> Callable[[], Spent]:
        """What tells the time breakdown of the last execution, even after the next one. Synchronize on a GPU first."""
        return self._marks.spent

    def close(self) -> None:
        """Shut down the streams."""
        self._streams.close()

    # Streams

    def _run(self, *, compute: bool) -> None:
        """Run transfers concurrently with blocks; without `compute`, skip the blocks but keep their waits."""

        def perform(index: int, op: Op) -> None:
            if isinstance(op, Transfer):
                self._lanes.transfer(index, op, self._holdings)
                return
            ready = self._mark()
            if compute or isinstance(op, Bundle):
                self._do(op)
            self._release(index)
            self._marks.add("waits_s", self._last_mark, ready)
            self._last_mark = self._mark()
            self._marks.add("blocks_s", ready, self._last_mark)

        try:
            self._lanes.begin()
            self._streams.run(self._annotated(perform), self._lanes.prepost)
        except BaseException as error:
            self._transport.give_up(repr(error))
            self._streams.abandon(self._holdings)
            raise
        self._marks.add("waits_s", self._last_mark, self._mark())

    def _annotated(self, perform: Perform) -> Perform:
        """`perform`, in a range that names the operation if torch's profiler runs; else as it is."""
        if not autograd_profiler._is_profiler_enabled:
            return perform

        def annotated(index: int, op: Op) -> None:
            with autograd_profiler.record_function(annotation(self._plan.phase, index)):
                perform(index, op)

        return annotated

    def _run_without_lanes(self) -> None:
        """Run all operations but the transfers on the caller's stream, in plan order, which satisfies every wait."""
        with self._streams.execution():
            for index, op in self._plan:
                if isinstance(op, Transfer):
                    self._lanes.pretend(index, op, self._holdings)
                else:
                    self._do(op)
                    self._release(index)
        self._marks.add("blocks_s", self._last_mark, self._mark())

    # Blocks and folds

    def _do(self, op: Op) -> None:
        """Perform a block, fold or bundle. A Join does nothing: it only waits."""
        match op:
            case Attend():
                self._attend(op)
            case AttendBackward():
                self._attend_backward(op)
            case Fused():
                self._fused(op)
            case Fold():
                started, held = self._mark(), self._holdings
                if not held.holds(op.part):  # no block was folded into it
                    return
                held.partials.add(op.into, held.rows(op.part), held.received(op.part))
                self._marks.add("folds_s", started, self._mark())
            case RowSums():
                started = self._mark()
                self._row_sums(op)
                self._marks.add("folds_s", started, self._mark())
            case Bundle():
                self._bundle(op)

    def _attend(self, op: Attend) -> None:
        held, windows = self._holdings, self._windows(op.q.place, op.kv.place)
        if not windows:  # then the chunks may not have been sent
            return
        (q,), (k, v) = held.received(op.q), held.received(op.kv)
        for rows, columns, kind in windows:
            there, started = held.among(op.q, rows), self._mark()
            inputs = tokens_of(q, there), tokens_of(k, columns), tokens_of(v, columns)
            if isinstance(kind, Pieces):
                out, lse = self._kernel.forward_pieces(*inputs, kind)
            else:
                out, lse = self._kernel.forward(*inputs, kind)
            ended = self._mark()
            self._see(out, lse)
            held.partials.add_output(op.o, rows, out, lse)
            self._marks.add("kernels_s", started, ended)
            self._marks.add("folds_s", ended, self._mark())

    def _attend_backward(self, op: AttendBackward) -> None:
        held, windows = self._holdings, self._windows(op.odoq.place, op.kv.place)
        if not windows:
            return
        (q, out, dout, lse), (k, v) = held.received(op.odoq), held.received(op.kv)
        for rows, columns, kind in windows:
            there, started = held.among(op.odoq, rows), self._mark()
            my_dout, my_q, my_out, my_lse = (tokens_of(x, there) for x in (dout, q, out, lse))
            inputs = my_dout, my_q, tokens_of(k, columns), tokens_of(v, columns), my_out, my_lse
            if isinstance(kind, Pieces):
                dq, dk, dv = self._kernel.backward_pieces(*inputs, kind)
            else:
                dq, dk, dv = self._kernel.backward(*inputs, kind)
            ended = self._mark()
            self._see(dq, dk, dv)
            held.partials.add_gradients(op.dq, rows, (dq,))
            held.partials.add_gradients(op.dkv, columns, (dk, dv))
            self._marks.add("kernels_s", started, ended)
            self._marks.add("folds_s", ended, self._mark())

    def _fused(self, op: Fused) -> None:
        held, into = self._holdings, {chunk: block.writes for block in op.blocks for chunk in block.reads}
        for call in self._calls(op):
            queries, (k, v) = operands(held, op.queries, call.q), operands(held, op.keys, call.kv)
            started = self._mark()
            if op.forward:
                results = self._kernel.forward(queries[0], k, v, call.kind)
                sides: list[tuple[int, tuple[Chunk, ...], UnionPieces, Tensors]] = [(0, op.queries, call.q, results)]
            else:
                q, out, dout, lse = queries
                results = self._kernel.backward(dout, q, k, v, out, lse, call.kind)
                sides = [(0, op.queries, call.q, results[:1]), (1, op.keys, call.kv, results[1:])]
            ended = self._mark()
            self._see(*queries, k, v, *results)
            for side, chunks, pieces, of_side in sides:
                parts = zip(*(cut(x, pieces) for x in of_side), strict=True)
                for (number, rows), part in zip(pieces, parts, strict=True):
                    held.partials.add_part(into[chunks[number]][side], rows, part, alone=len(pieces) == 1)
            self._marks.add("kernels_s", started, ended)
            self._marks.add("folds_s", ended, self._mark())

    def _bundle(self, op: Bundle) -> None:
        held = self._holdings
        parts = [(part.tensor.fields, held.received(part)) for part in op.parts]
        by_name = {field.name: x for fields, tensors in parts for field, x in zip(fields, tensors, strict=True)}
        held.put(op.into, tuple(by_name[field.name] for field in op.into.tensor.fields))

    def _row_sums(self, op: RowSums) -> None:
        held, (part,) = self._holdings, op.parts
        if not held.holds(part):  # no block here needs it
            return
        fields = zip(part.tensor.fields, held.received(part), strict=True)
        by_name = {field.name: x for field, x in fields}
        if "out" in by_name:
            by_name["delta"] = row_sums(by_name["out"], by_name["dout"])
        else:
            by_name["out"] = projection(by_name["dout"], by_name["delta"])
        held.put(op.into, tuple(by_name[field.name] for field in op.into.tensor.fields))

    def _release(self, index: int) -> None:
        """Forget the chunks that operation `index`, a block, reads last."""
        for chunk in self._released.get(index, ()):
            self._holdings.drop(chunk)

    def _see(self, *results: torch.Tensor) -> None:
        """Record the memory held now, if live bytes are being tracked."""
        if self._live is not None:
            self._live.see([*self._holdings.tensors(), *self._buffers.tensors(), *results])

    def _find_windows(self, q: Place, kv: Place) -> list[tuple[Rows, Rows, RegionKind | Pieces]]:
        """Return a block's kernel calls as (q rows, kv rows, kind or pieces); a kind is never STRICT."""
        blocks = self._problem.blocks
        regions = blocks.regions_of(blocks.of(int(q.owner(self._rank)), int(kv.owner(self._rank))))
        if self._problem.mask.sends_unseen:
            return [(region.q, region.kv, region.kind) for region in (region.plain for region in regions)]
        found = calls(regions, self._device, varlen=self._kernel.takes_varlen(self._problem.head_dim))
        return [(c.queries, c.keys, c) if isinstance(c, Pieces) else (c.q, c.kv, c.kind) for c in found]
