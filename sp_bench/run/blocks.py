"""The calls of blocks, folds and bundles: what they read, compute and accumulate, worked out once for a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from sp_bench.kernels import BlockKernel
from sp_bench.kernels.fold import in_dtype
from sp_bench.kernels.pieces import Pieces, calls
from sp_bench.kernels.row_sums import projection, row_sums
from sp_bench.plan.cast_rows import keys_of
from sp_bench.plan.casts import Keys
from sp_bench.plan.dataflow import row_sums_released
from sp_bench.plan.ops import Attend, AttendBackward, Bundle, Chunk, Fold, Fused, Gathered, Op, Place, Plan, RowSums
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import RegionKind, Regions
from sp_bench.plan.tensors import ODOQ
from sp_bench.plan.union import Pieces as UnionPieces
from sp_bench.plan.union import kernel_calls
from sp_bench.run.caches import attend_caches
from sp_bench.run.execution import FOLDS, KERNELS, REST, WAITS, Execution, Perform
from sp_bench.run.fused import cut, end_to_end, operands
from sp_bench.run.holdings import Holdings
from sp_bench.run.latents import Expanding, Latents
from sp_bench.run.partials import Sum, Sums, Tensors, add_rows, token_dim
from sp_bench.run.slices import one_slice
from sp_bench.run.windows import Queries, Window, Windows, as_they_are, rows_of


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
        self._running: Execution | None = None
        """The execution whose blocks make keys of latents now."""
        self._windows: Callable[[Place, Place], list[Window]] = cache(self._find_windows)
        self._computing = Windows(problem, sums, device, self._kernel_of, timed=timed)
        self._released = row_sums_released(plan)

    def call(self, index: int, op: Op, *, compute: bool) -> Perform:
        """The call of operation `index`; without `compute` it only waits, as a Join does, but for bundles."""
        do = self._bound(op) if compute or isinstance(op, Bundle) else None
        if do is not None and self._latents:
            do = self._seen(do)
        released = self._released.get(index)
        if not released:
            return do or _nothing

        def do_and_release(run: Execution) -> None:
            if do is not None:
                do(run)
            for chunk in released:
                run.holdings.drop(chunk)

        return do_and_release

    def _seen(self, do: Perform) -> Perform:
        """The call, of which the keys that blocks make are seen by its execution."""

        def do_and_see(run: Execution) -> None:
            self._running = run
            do(run)
            self._running = None

        return do_and_see

    def _kernel_of(self, queries: Chunk) -> BlockKernel | Expanding:
        """The kernel of blocks of these queries, given what their chunks of keys have."""
        if self._latents is None:
            return self._kernel
        heads = self._heads(queries)(torch.arange(self._problem.padded_heads))

        def see(*tensors: Tensor) -> None:
            assert self._running is not None, "blocks are called by one"
            self._running.see(*tensors)

        return Expanding(self._kernel, self._latents, heads, see)

    def _bound(self, op: Op) -> Perform | None:
        match op:
            case Attend():
                return self._attend(op)
            case AttendBackward():
                return self._attend_backward(op)
            case Gathered():
                return self._gathered(op)
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

    def _gathered(self, op: Gathered) -> Perform | None:
        keys = keys_of(op, self._problem, self._rank)
        windows = self._calls(keys.regions, shared=True)
        if op.pairs == "queries":
            return self._gathered_queries(op, keys, windows) if windows else None
        if not op.forward:
            # Rows for neighbours get their gradients here.
            return self._gathered_backward(op, keys, windows) if windows or any(keys.counts) else None
        if not windows:
            return None
        by_position, into = self._by_position(op.keys, keys), {block.q: block.writes[0] for block in op.blocks}
        compute, more = self._computing.forward, self._once(*op.blocks)
        if len(into) == 1:
            ((query, o),) = into.items()
            return compute(query, o, windows, rows_of, by_position, more)
        made = list[Tensors]()  # the keys, once for all slices of heads
        slices = [compute(query, o, windows, rows_of, lambda held: made[0]) for query, o in into.items()]

        def gathered(run: Execution) -> None:
            run.lap(WAITS)
            made.append(by_position(run.holdings))
            for forward in slices:
                forward(run)
            made.clear()
            if more:
                more(run)

        return gathered

    def _by_position(self, chunks: Sequence[Chunk], rows: Keys) -> Callable[[Holdings], Tensors]:
        """A function that puts rows of chunks end to end in the order of their positions; the rank's own are."""
        order = torch.from_numpy(rows.order).to(self._device) if chunks[0].index else None

        def by_position(held: Holdings) -> Tensors:
            parts = zip(*(held.chunks[chunk] for chunk in chunks), strict=True)
            together = map(end_to_end, parts)
            return tuple(x if order is None else x.index_select(token_dim(x), order) for x in together)

        return by_position

    def _gathered_backward(self, op: Gathered, keys: Keys, windows: Sequence[Window]) -> Perform:
        by_position, into_of = self._by_position(op.keys, keys), {block.q: block.writes[0] for block in op.blocks}
        dkv = [chunk for chunk in op.writes if chunk.tensor.of_keys]
        each = [self._computing.backward(q, dq, windows, rows_of) for q, dq in into_of.items()]
        rows = each[0][1]

        def of_all(run: Execution, kv: Tensors, add: Callable[[int, Tensors], None], sums: Tensors = ()) -> None:
            for backward, _ in each:
                backward(run, kv, add, sums)

        if not op.keys[0].index:
            into = [self._sums.at(dkv[0], some) for some in rows]

            def own(run: Execution) -> None:
                run.lap(WAITS)
                add = run.holdings.partials.add_gradients
                of_all(run, by_position(run.holdings), lambda result, part: add(into[result], part))

            return own
        # Place as they lie, member by member -> place by position.
        places, counts = torch.from_numpy(keys.order.argsort()).to(self._device), list(keys.counts)
        dtype = getattr(torch, self._problem.accumulate_dtype)

        def row_gradients(run: Execution, kv: Tensors) -> list[torch.Tensor]:
            sums = tuple(torch.zeros_like(x, dtype=dtype) for x in kv)
            of_all(run, kv, lambda result, part: add_rows(sums, rows[result], part), sums)
            return [*sums]

        def gathered_backward(run: Execution) -> None:
            run.lap(WAITS)
            held = run.holdings
            sums, kept = row_gradients(run, by_position(held)), self._sums.of(dkv[0]).dtype
            # Each is freed before the next one is placed.
            placed = [in_dtype(sums.pop(0).index_select(1, places), kept) for _ in range(len(sums))]
            for chunk, part in zip(dkv, zip(*(x.split(counts, dim=1) for x in placed), strict=True), strict=True):
                held.partials.put_rows(chunk, part)
            run.lap(FOLDS)

        return gathered_backward

    def _gathered_queries(self, op: Gathered, rows: Keys, windows: Sequence[Window]) -> Perform:
        """A call of blocks of queries that travelled with the rank's own keys."""
        places = torch.from_numpy(rows.order.argsort()).to(self._device)
        counts, total, (kv,) = list(rows.counts), rows.order.size, op.keys
        all_parts = zip(op.queries, op.blocks, counts, strict=True)
        came = [(q, block.writes[0], count) for q, block, count in all_parts if count]
        query, made = came[0][:2]
        by_position = self._by_position([q for q, _, _ in came], rows)
        everything = self._sums.of_rows(made, range(total), total)

        def with_o(held: Holdings) -> Tensors:
            q, dout, lse, delta = by_position(held)
            return q, projection(dout, delta), dout, lse

        def put_back(held: Holdings) -> None:
            partial = held.partials.drop(made)
            assert partial is not None, "it was started"
            laid = (x.index_select(token_dim(x), places) for x in partial)
            parts = zip(*(x.split([count for _, _, count in came], dim=token_dim(x)) for x in laid), strict=True)
            for (_, chunk, _), part in zip(came, parts, strict=True):
                held.partials.put_rows(chunk, part)

        queries = Queries(by_position if op.forward else with_o, lambda some: self._sums.of_rows(made, some, total))
        if op.forward:
            compute = self._computing.forward(query, made, windows, rows_of, kv, queries=queries)
        else:
            (dkv,) = {chunk for chunk in op.writes if chunk.tensor.of_keys}
            compute, _ = self._computing.backward(query, made, windows, rows_of, kv, dkv, queries)

        def gathered(run: Execution) -> None:
            run.lap(WAITS)
            run.holdings.partials.start(everything)
            compute(run)
            put_back(run.holdings)
            run.lap(FOLDS)

        return gathered

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
        return self._calls(regions)

    def _calls(self, regions: Regions, *, shared: bool = False) -> list[Window]:
        varlen = self._kernel.takes_varlen(self._problem.head_dim)
        kernel_calls_of = calls(regions, self._device, varlen=varlen, shared=shared)
        return [
            Window(c.queries, c.keys, c) if isinstance(c, Pieces) else Window(c.q, c.kv, c.kind)
            for c in kernel_calls_of
        ]


def of_sinks(sinks_H: Tensor, out: Tensor, dout: Tensor, lse_BHS: Tensor) -> Tensor:
    """The gradient of sinks by some rows, (H,): each row's probability of its sink times how its value, 0, differs
    from O.
    """
    p_BHS = torch.exp(sinks_H[:, None] - lse_BHS)
    return -(p_BHS * row_sums(out, dout)).sum((0, 2)).to(sinks_H.dtype)


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
