"""One execution of a plan on one rank: the tensors that it holds, what blocks and folds do with them, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from sp_bench.kernels import BlockKernel
from sp_bench.kernels.pieces import Pieces, calls
from sp_bench.kernels.row_sums import projection, row_sums
from sp_bench.lower import Lowering
from sp_bench.plan.casts import keys_of
from sp_bench.plan.dataflow import row_sums_released
from sp_bench.plan.ops import Attend, AttendBackward, Bundle, Chunk, Fold, Fused, Gathered, Op, Place, Plan, RowSums
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import RegionKind, Regions
from sp_bench.plan.union import Pieces as UnionPieces
from sp_bench.plan.union import kernel_calls
from sp_bench.run.buffers import Buffers
from sp_bench.run.devices import Clock
from sp_bench.run.fused import cut, end_to_end, operands
from sp_bench.run.holdings import Holdings, LiveBytes
from sp_bench.run.partials import Rows, Tensors, tokens_of

Windows = list[tuple[Rows, Rows, RegionKind | Pieces]]
"""Kernel calls as (q rows, kv rows, kind or pieces); a kind is never STRICT."""


class KeyRows(NamedTuple):
    """The key rows of a Gathered block."""

    order: torch.Tensor
    """Place by position -> place as they lie, member by member: (keys,)."""
    places: torch.Tensor
    """The inverse."""
    counts: list[int]
    """How many rows each key chunk has."""


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
class Marks:
    """(start, end) marks by field of Spent. On a GPU, synchronize before reading them."""

    clock: Clock
    pairs: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)
    caller_s: float = 0.0

    def add(self, name: str, start: Any, end: Any) -> None:
        self.pairs.setdefault(name, []).append((start, end))

    def spent(self) -> Spent:
        sums = {name: sum(self.clock.seconds(start, end) for start, end in pairs) for name, pairs in self.pairs.items()}
        return Spent(**sums, caller_s=self.caller_s)


class Work:
    """What all executions of a plan on a rank have in common: its kernel, its kernel calls and its clock."""

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        rank: int,
        lowering: Lowering,
        kernel: BlockKernel,
        buffers: Buffers,
        device: torch.device,
        clock: Clock,
    ) -> None:
        self.plan, self.problem, self.rank, self.device = plan, problem, rank, device
        self.unsummed, self.kernel, self.buffers, self.clock = lowering.unsummed, kernel, buffers, clock
        self.mark = clock.mark
        self.windows: Callable[[Place, Place], Windows] = cache(self._find_windows)
        self.gathered = cache(self._find_gathered)
        self.calls = cache(lambda op: kernel_calls(op, problem, rank))
        self.released = row_sums_released(plan)
        self.sum_dtype = getattr(torch, problem.accumulate_dtype)

    def _find_windows(self, q: Place, kv: Place) -> Windows:
        """Return the kernel calls of a block."""
        blocks = self.problem.blocks
        regions = blocks.regions_of(blocks.of(int(q.owner(self.rank)), int(kv.owner(self.rank))))
        if self.problem.mask.sends_unseen:
            return [(region.q, region.kv, region.kind) for region in (region.plain for region in regions)]
        return self._calls(regions)

    def _find_gathered(self, op: Gathered) -> tuple[KeyRows, Windows]:
        """Return the keys of a Gathered block and its kernel calls, with keys by their position."""
        keys = keys_of(op, self.problem, self.rank)
        order, places = (torch.from_numpy(x).to(self.device) for x in (keys.order, keys.order.argsort()))
        return KeyRows(order, places, list(keys.counts)), self._calls(keys.regions, shared=True)

    def _calls(self, regions: Regions, *, shared: bool = False) -> Windows:
        varlen = self.kernel.takes_varlen(self.problem.head_dim)
        found = calls(regions, self.device, varlen=varlen, shared=shared)
        return [(c.queries, c.keys, c) if isinstance(c, Pieces) else (c.q, c.kv, c.kind) for c in found]


class Execution:
    """One execution: its holdings, its marks, and the memory seen on the way."""

    def __init__(self, work: Work, inputs: Mapping[Chunk, Tensors], live: LiveBytes | None = None) -> None:
        """`live` records the memory held after each block."""
        self._work, self._live = work, live
        self.holdings = Holdings(inputs, work.problem, work.rank, work.device, work.unsummed)
        self.marks = Marks(work.clock)
        self._last_mark = work.mark()

    def outputs(self) -> dict[Chunk, Tensors]:
        """The chunks that the plan ends with."""
        return {chunk: self.holdings.packed(chunk) for chunk in self._work.plan.ends_with}

    def perform(self, index: int, op: Op, *, compute: bool) -> None:
        """Perform a block, fold or bundle, and mark its time and the wait before it; without `compute`, only those."""
        ready = self._work.mark()
        if compute or isinstance(op, Bundle):
            self.do(op)
        self.release(index)
        self.marks.add("waits_s", self._last_mark, ready)
        self._last_mark = self._work.mark()
        self.marks.add("blocks_s", ready, self._last_mark)

    def end(self, name: str) -> None:
        """Mark what has passed since the last block as time of this kind (a field of Spent)."""
        self.marks.add(name, self._last_mark, self._work.mark())

    def close(self) -> None:
        """Let go of all tensors, as the traceback of an error may keep the execution."""
        self.holdings = Holdings({}, self._work.problem, self._work.rank, self._work.device)

    def do(self, op: Op) -> None:
        """Perform a block, fold or bundle. A Join does nothing: it only waits."""
        match op:
            case Attend():
                self._attend(op)
            case AttendBackward():
                self._attend_backward(op)
            case Gathered():
                self._gathered(op)
            case Fused():
                self._fused(op)
            case Fold():
                started, held = self._work.mark(), self.holdings
                for rows, part in held.parts(op.part):
                    held.partials.add(op.into, rows, part)
                self.marks.add("folds_s", started, self._work.mark())
            case RowSums():
                started = self._work.mark()
                self._row_sums(op)
                self.marks.add("folds_s", started, self._work.mark())
            case Bundle():
                self._bundle(op)

    def _attend(self, op: Attend) -> None:
        windows = self._work.windows(op.q.place, op.kv.place)
        if windows:  # else the chunks may not have been sent
            self._forward(op.q, op.o, self.holdings.received(op.kv), windows)

    def _attend_backward(self, op: AttendBackward) -> None:
        windows = self._work.windows(op.odoq.place, op.kv.place)
        if windows:
            add = partial(self.holdings.partials.add_gradients, op.dkv)
            self._backward(op.odoq, op.dq, self.holdings.received(op.kv), windows, add)

    def _forward(self, q_chunk: Chunk, o: Chunk, keys: Tensors, windows: Windows) -> None:
        held, (q,), (k, v) = self.holdings, self.holdings.received(q_chunk), keys
        for rows, columns, kind in windows:
            there, started = held.among(q_chunk, rows), self._work.mark()
            inputs = tokens_of(q, there), tokens_of(k, columns), tokens_of(v, columns)
            if isinstance(kind, Pieces):
                out, lse = self._work.kernel.forward_pieces(*inputs, kind)
            else:
                out, lse = self._work.kernel.forward(*inputs, kind)
            ended = self._work.mark()
            self._see(out, lse)
            held.partials.add_output(o, rows, out, lse)
            self.marks.add("kernels_s", started, ended)
            self.marks.add("folds_s", ended, self._work.mark())

    def _backward(
        self, odoq: Chunk, dq_chunk: Chunk, keys: Tensors, windows: Windows, add: Callable[[Rows, Tensors], None]
    ) -> None:
        """`add` adds (dk, dv) of some keys to their sum."""
        held, (q, out, dout, lse), (k, v) = self.holdings, self.holdings.received(odoq), keys
        for rows, columns, kind in windows:
            there, started = held.among(odoq, rows), self._work.mark()
            my_dout, my_q, my_out, my_lse = (tokens_of(x, there) for x in (dout, q, out, lse))
            inputs = my_dout, my_q, tokens_of(k, columns), tokens_of(v, columns), my_out, my_lse
            if isinstance(kind, Pieces):
                dq, dk, dv = self._work.kernel.backward_pieces(*inputs, kind)
            else:
                dq, dk, dv = self._work.kernel.backward(*inputs, kind)
            ended = self._work.mark()
            self._see(dq, dk, dv)
            held.partials.add_gradients(dq_chunk, rows, (dq,))
            add(columns, (dk, dv))
            self.marks.add("kernels_s", started, ended)
            self.marks.add("folds_s", ended, self._work.mark())

    def _gathered(self, op: Gathered) -> None:
        keys, windows = self._work.gathered(op)
        if not windows:
            return
        own, (query,) = op.keys[0].index == 0, op.queries
        parts = zip(*(self.holdings.received(chunk) for chunk in op.keys), strict=True)
        kv = tuple(x if own else x.index_select(1, keys.order) for x in map(end_to_end, parts))
        if op.forward:
            self._forward(query, op.blocks[0].writes[0], kv, windows)
            return
        dq, *dkv = op.writes
        if own:
            self._backward(query, dq, kv, windows, partial(self.holdings.partials.add_gradients, dkv[0]))
            return
        sums = tuple(torch.zeros_like(x, dtype=self._work.sum_dtype) for x in kv)

        def add(columns: Rows, gradients: Tensors) -> None:
            for into, x in zip(sums, gradients, strict=True):
                if isinstance(columns, range):
                    tokens_of(into, columns).add_(x)
                else:
                    into.index_add_(1, columns, x.to(into.dtype))

        self._backward(query, dq, kv, windows, add)
        by_member = zip(*(x.index_select(1, keys.places).split(keys.counts, dim=1) for x in sums), strict=True)
        for chunk, part in zip(dkv, by_member, strict=True):
            self.holdings.partials.put_rows(chunk, part)

    def _fused(self, op: Fused) -> None:
        held, into = self.holdings, {chunk: block.writes for block in op.blocks for chunk in block.reads}
        for call in self._work.calls(op):
            queries, (k, v) = operands(held, op.queries, call.q), operands(held, op.keys, call.kv)
            started = self._work.mark()
            if op.forward:
                results = self._work.kernel.forward(queries[0], k, v, call.kind)
                sides: list[tuple[int, tuple[Chunk, ...], UnionPieces, Tensors]] = [(0, op.queries, call.q, results)]
            else:
                q, out, dout, lse = queries
                results = self._work.kernel.backward(dout, q, k, v, out, lse, call.kind)
                sides = [(0, op.queries, call.q, results[:1]), (1, op.keys, call.kv, results[1:])]
            ended = self._work.mark()
            self._see(*queries, k, v, *results)
            for side, chunks, pieces, of_side in sides:
                parts = zip(*(cut(x, pieces) for x in of_side), strict=True)
                for (number, rows), part in zip(pieces, parts, strict=True):
                    held.partials.add_part(into[chunks[number]][side], rows, part, alone=len(pieces) == 1)
            self.marks.add("kernels_s", started, ended)
            self.marks.add("folds_s", ended, self._work.mark())

    def _bundle(self, op: Bundle) -> None:
        held = self.holdings
        parts = [(part.tensor.fields, held.received(part)) for part in op.parts]
        by_name = {field.name: x for fields, tensors in parts for field, x in zip(fields, tensors, strict=True)}
        held.put(op.into, tuple(by_name[field.name] for field in op.into.tensor.fields))

    def _row_sums(self, op: RowSums) -> None:
        held, (part,) = self.holdings, op.parts
        if not held.holds(part):  # no block here needs it
            return
        fields = zip(part.tensor.fields, held.received(part), strict=True)
        by_name = {field.name: x for field, x in fields}
        if "out" in by_name:
            by_name["delta"] = row_sums(by_name["out"], by_name["dout"])
        else:
            by_name["out"] = projection(by_name["dout"], by_name["delta"])
        held.put(op.into, tuple(by_name[field.name] for field in op.into.tensor.fields))

    def release(self, index: int) -> None:
        """Forget the chunks that operation `index`, a block, reads last."""
        for chunk in self._work.released.get(index, ()):
            self.holdings.drop(chunk)

    def _see(self, *results: torch.Tensor) -> None:
        """Record the memory held now, if live bytes are being tracked."""
        if self._live is not None:
            self._live.see([*self.holdings.tensors(), *self._work.buffers.tensors(), *results])
