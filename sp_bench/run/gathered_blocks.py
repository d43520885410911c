"""The calls of blocks whose keys, or queries, come from several ranks and are put together by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sp_bench.kernels import BlockKernel
from sp_bench.kernels.fold import in_dtype
from sp_bench.kernels.row_sums import projection
from sp_bench.plan.cast_rows import keys_of
from sp_bench.plan.casts import Keys
from sp_bench.plan.ops import Chunk, Gathered
from sp_bench.plan.problem import Problem
from sp_bench.run.execution import FOLDS, WAITS, Execution, Perform
from sp_bench.run.fused import end_to_end
from sp_bench.run.holdings import Holdings
from sp_bench.run.partials import Sums, Tensors, add_rows, token_dim
from sp_bench.run.windows import Queries, Window, Windows, rows_of, windows_of


class GatheredBlocks:
    """Makes the calls of a plan's gathered blocks on one rank."""

    def __init__(
        self,
        problem: Problem,
        rank: int,
        kernel: BlockKernel,
        sums: Sums,
        device: torch.device,
        computing: Windows,
        once: Callable[..., Perform | None],
    ) -> None:
        """`once` makes what is called once for the queries of some blocks, behind them."""
        self._problem, self._rank, self._kernel, self._sums, self._device = problem, rank, kernel, sums, device
        self._computing, self._once = computing, once

    def call(self, op: Gathered) -> Perform | None:
        """The call of an operation; None if the rank has no block of it."""
        keys = keys_of(op, self._problem, self._rank)
        windows = windows_of(keys.regions, self._problem, self._kernel, self._device, shared=True)
        if op.pairs == "queries":
            return self._with_queries(op, keys, windows) if windows else None
        if not op.forward:
            # Rows for neighbours get their gradients here.
            return self._backward(op, keys, windows) if windows or any(keys.counts) else None
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

    def _backward(self, op: Gathered, keys: Keys, windows: Sequence[Window]) -> Perform:
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

    def _with_queries(self, op: Gathered, rows: Keys, windows: Sequence[Window]) -> Perform:
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
