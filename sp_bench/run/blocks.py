"""The calls of blocks, folds and bundles: what they read, compute and accumulate, worked out once for a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from sp_bench.kernels import BlockKernel
from sp_bench.kernels.row_sums import projection, row_sums
from sp_bench.plan.dataflow import row_sums_released
from sp_bench.plan.ops import Attend, AttendBackward, Bundle, Chunk, Fold, Fused, Gathered, Op, Place, Plan, RowSums
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import RegionKind
from sp_bench.plan.tensors import ODOQ
from sp_bench.plan.union import Pieces as UnionPieces
from sp_bench.plan.union import kernel_calls
from sp_bench.run.caches import attend_caches
from sp_bench.run.execution import FOLDS, KERNELS, REST, WAITS, Execution, Perform
from sp_bench.run.fused import cut, operands
from sp_bench.run.gathered_blocks import GatheredBlocks
from sp_bench.run.holdings import Holdings
from sp_bench.run.latents import Expanding, Latents
from sp_bench.run.partials import Sum, Sums, Tensors
from sp_bench.run.slices import one_slice
from sp_bench.run.windows import Window, Windows, as_they_are, windows_of


class Blocks:
    """Makes the calls of a plan's blocks, folds and bundles on one rank."""

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        rank: int,
        kernel: BlockKernel,
        sums: Sums,
        device: torch.device,
        latents: Latents | None = None,
        *,
        timed: bool = True,
    ) -> None:
        """With `latents`, chunks of keys are those that a block makes its keys and values of. Without `timed` no laps
        of executions are marked.
        """
        self._problem, self._rank, self._kernel, self._sums, self._device = problem, rank, kernel, sums, device
        self._latents, self._timed = latents, timed
        self.see: Callable[..., None] = nothing_seen
        """Told the tensors that a block holds that makes keys of latents: `see` of the execution that runs."""
        self._windows: Callable[[Place, Place], list[Window]] = cache(self._find_windows)
        self._computing = Windows(problem, sums, device, self._kernel_of, timed=timed)
        self._of_gathered = GatheredBlocks(problem, rank, kernel, sums, device, self._computing, self._once)
        self._released = row_sums_released(plan)

    def call(self, index: int, op: Op, *, compute: bool) -> Perform:
        """The call of operation `index`; without `compute` it only waits, as a Join does, but for bundles."""
        do = self._bound(op) if compute or isinstance(op, Bundle) else None
        released = self._released.get(index)
        if not released:
            return do or _nothing

        def do_and_release(run: Execution) -> None:
            if do is not None:
                do(run)
            for chunk in released:
                run.holdings.drop(chunk)

        return do_and_release

    def _kernel_of(self, queries: Chunk) -> BlockKernel | Expanding:
        """The kernel of blocks of these queries, given what their chunks of keys have."""
        if self._latents is None:
            return self._kernel
        heads = self._heads(queries)(torch.arange(self._problem.padded_heads))
        return Expanding(self._kernel, self._latents, heads, lambda *tensors: self.see(*tensors))

    def _bound(self, op: Op) -> Perform | None:
        match op:
            case Attend():
                return self._attend(op)
            case AttendBackward():
                return self._attend_backward(op)
            case Gathered():
                return self._of_gathered.call(op)
            case Fused():
                return self._fused(op)
            case Fold():
                return self._fold(op)
            case RowSums():
                return self._row_sums(op)
            case Bundle():
                return self._bundle(op)
        return None

    def _of_caches(self, *blocks: Attend | AttendBackward) -> Perform:
        return attend_caches(blocks, self._problem, self._rank, self._kernel, self._sums, self._device)

    def _attend(self, op: Attend) -> Perform | None:
        if self._problem.decodes:
            return self._of_caches(op)
        windows = self._windows(op.q.place, op.kv.place)
        if not windows:
            return None  # the chunks may not have been sent
        return self._computing.forward(op.q, op.o, windows, partial(self._computing.take, op.kv), op.kv, self._once(op))

    def _attend_backward(self, op: AttendBackward) -> Perform | None:
        windows = self._windows(op.odoq.place, op.kv.place)
        if not windows:
            return None
        backward, _ = self._computing.backward(
            op.odoq, op.dq, windows, partial(self._computing.take, op.kv), op.kv, op.dkv
        )
        return backward

    def _fused(self, op: Fused) -> Perform | None:
        if self._problem.decodes:
            return self._of_caches(*op.blocks)
        calls_of_rank = kernel_calls(op, self._problem, self._rank)
        into = {chunk: block.writes for block in op.blocks for chunk in block.reads}

        def sums(side: int, chunks: Sequence[Chunk], pieces: UnionPieces) -> list[Sum]:
            return [self._sums.at(into[chunks[number]][side], rows) for number, rows in pieces]

        bound = [
            (call, sums(0, op.queries, call.q), [] if op.forward else sums(1, op.keys, call.kv))
            for call in calls_of_rank
        ]
        more, kernel = self._once(*op.blocks), self._kernel_of(op.queries[0])

        def fused(run: Execution) -> None:
            run.lap(WAITS)
            held = run.holdings
            for call, of_queries, of_keys in bound:
                queries, (k, v) = operands(held, op.queries, call.q), operands(held, op.keys, call.kv)
                run.lap(REST)
                if op.forward:
                    results = kernel.forward(queries[0], k, v, call.kind)
                    sides = [(call.q, of_queries, results)]
                else:
                    q, out, dout, lse = queries
                    results = kernel.gradients(dout, q, k, v, out, lse, call.kind)
                    sides = [(call.q, of_queries, results[:1]), (call.kv, of_keys, results[1:])]
                run.lap(KERNELS)
                run.see(*queries, k, v, *results)
                for pieces, totals, of_side in sides:
                    _fold_parts(held, pieces, totals, of_side)
                run.lap(FOLDS)
            if more:
                more(run)

        return fused if bound else None

    def _once(self, *blocks: Attend | AttendBackward) -> Perform | None:
        """A call for queries that meet their own keys here, so once for each: it adds sinks, and keys that all ranks
        hold, to their outputs. None if no queries do.
        """
        degree, rank = self._problem.layout.head_parallel, self._rank
        own = [
            block
            for block in blocks
            if isinstance(block, Attend)
            and int(block.q.place.owner(rank)) // degree == int(block.kv.place.owner(rank)) // degree
        ]
        into = [(self._sums.of(block.o), self._heads(block.o)) for block in own]
        of_held = [self._held(block) for block in own] if self._problem.mask.held else []

        def once(run: Execution) -> None:
            for attend in of_held:
                attend(run)
            if run.sinks is None:
                return
            for total, heads in into:
                run.holdings.partials.add_sinks(total, heads(run.sinks.scores))
            run.lap(FOLDS)

        return once if into else None

    def _held(self, block: Attend) -> Perform:
        """A call that folds the attention of a block's queries to the keys that all ranks hold into their output."""
        problem, kernel, total = self._problem, self._kernel, self._sums.of(block.o)
        take, sharing = (
            self._computing.take(block.q, total.rows) or as_they_are,
            problem.padded_heads // problem.padded_kv_heads,
        )
        heads = self._heads(block.o)(torch.arange(problem.padded_heads))
        key_heads = slice(int(heads.min()) // sharing, int(heads.max()) // sharing + 1)

        def attend(run: Execution) -> None:
            (q,) = take(run.holdings, run.holdings.chunks[block.q])
            k, v = (x[:, :, key_heads].contiguous() for x in run.held)
            run.lap(REST)
            out, lse = kernel.forward(q, k, v, RegionKind.FULL)
            run.lap(KERNELS)
            run.see(out, lse)
            run.holdings.partials.add_output(total, out, lse)
            run.lap(FOLDS)

        return attend

    def _heads(self, chunk: Chunk) -> Callable[[Tensor], Tensor]:
        """A function that takes the heads of a chunk of queries out of a tensor (H,) of all heads: a view."""
        problem, tensor = self._problem, chunk.tensor
        heads = problem.field_heads(tensor.fields[0])
        first = int(chunk.owner(self._rank)) % problem.layout.head_parallel * heads if tensor.is_by_heads else 0

        def of(x_H: Tensor) -> Tensor:
            return one_slice(x_H[None, :, None], problem, tensor, chunk.heads)[0, first : first + heads, 0]

        return of

    def _fold(self, op: Fold) -> Perform:
        part, into, sums, timed = op.part, op.into, self._sums, self._timed
        total, tokens = sums.of(into), sums.of(into).shapes[0][1]

        def fold(run: Execution) -> None:
            held = run.holdings
            if whole := held.whole(part, tokens):
                if timed:
                    run.lap(WAITS)
                held.partials.add(total, whole)
                if timed:
                    run.lap(FOLDS)
            elif parts := held.parts(part):
                run.lap(WAITS)
                for rows, tensors in parts:
                    some = sums.of(into, rows) if isinstance(rows, range) else sums.at(into, rows)
                    held.partials.add(some, tensors)
                run.lap(FOLDS)

        return fold

    def _bundle(self, op: Bundle) -> Perform:
        complete = op.into.tensor is ODOQ.by_heads and not op.into.index
        heads = self._heads(op.into) if complete else None

        def bundle(run: Execution) -> None:
            made = _by_name(run.holdings, op)
            run.holdings.put(op.into, made)
            if heads and run.sinks is not None:
                run.lap(WAITS)
                _, out, dout, lse = made
                heads(run.sinks.gradient).add_(of_sinks(heads(run.sinks.scores), out, dout, lse))
                run.lap(FOLDS)

        return bundle

    def _row_sums(self, op: RowSums) -> Perform:
        (part,) = op.parts

        def sums(run: Execution) -> None:
            held = run.holdings
            if not held.holds(part):  # no block here needs it
                return
            run.lap(WAITS)
            by_name = dict(zip((f.name for f in part.tensor.fields), held.chunks[part], strict=True))
            if "out" in by_name:
                by_name["delta"] = row_sums(by_name["out"], by_name["dout"])
            else:
                by_name["out"] = projection(by_name["dout"], by_name["delta"])
            held.put(op.into, tuple(by_name[field.name] for field in op.into.tensor.fields))
            run.lap(FOLDS)

        return sums

    def _find_windows(self, q: Place, kv: Place) -> list[Window]:
        """The kernel calls of a block."""
        blocks = self._problem.blocks
        regions = blocks.regions_of(blocks.of(int(q.owner(self._rank)), int(kv.owner(self._rank))))
        if not self._problem.mask.in_pieces:
            return [Window(region.q, region.kv, region.kind) for region in (region.plain for region in regions)]
        return windows_of(regions, self._problem, self._kernel, self._device)


def of_sinks(sinks_H: Tensor, out: Tensor, dout: Tensor, lse_BHS: Tensor) -> Tensor:
    """The gradient of sinks by some rows, (H,): each row's probability of its sink times how its value, 0, differs
    from O.
    """
    p_BHS = torch.exp(sinks_H[:, None] - lse_BHS)
    return -(p_BHS * row_sums(out, dout)).sum((0, 2)).to(sinks_H.dtype)


def nothing_seen(*tensors: Tensor) -> None:
    """Record nothing (Execution.see)."""


def _nothing(run: Execution) -> None:
    """Do nothing: it only waits."""


def _fold_parts(held: Holdings, pieces: UnionPieces, totals: Sequence[Sum], results: Tensors) -> None:
    """Fold the parts of a kernel call's results into the accumulators of their chunks."""
    held.partials.add_parts(totals, list(zip(*(cut(x, pieces) for x in results), strict=True)))


def _by_name(held: Holdings, op: Bundle) -> Tensors:
    """The fields of what a bundle makes, from those of its parts."""
    parts = [(part.tensor.fields, held.chunks[part]) for part in op.parts]
    by_name = {field.name: x for fields, tensors in parts for field, x in zip(fields, tensors, strict=True)}
    return tuple(by_name[field.name] for field in op.into.tensor.fields)
