"""The calls that compute the windows of a block, forward and backward, and fold their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from sp_bench.kernels import BlockKernel
from sp_bench.kernels.contract import Gradients, Kind
from sp_bench.kernels.pieces import Pieces
from sp_bench.kernels.pieces import calls as kernel_calls
from sp_bench.plan.ops import Chunk
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import Region, Regions
from sp_bench.run.execution import FOLDS, KERNELS, REST, WAITS, Execution, Perform
from sp_bench.run.holdings import Holdings
from sp_bench.run.latents import Expanding
from sp_bench.run.makings import Together, is_one_making
from sp_bench.run.partials import Rows, Sum, Sums, Tensors, tokens_of

Take = Callable[[Holdings, Tensors], Tensors]
"""Takes rows out of the tensors of a chunk."""
AddGradients = Callable[[int, Tensors], None]
"""Adds (dk, dv) of some key rows, by their number."""
Backward = Callable[..., None]
"""Computes and adds gradients, given an execution; (k, v) if they are no chunk's, what adds (dk, dv), and its sums."""


class Window(NamedTuple):
    """The rows of a block that one kernel call computes."""

    q: Rows
    kv: Rows
    kind: Kind
    """The kind of its region, never STRICT."""

    @classmethod
    def of(cls, call: Region | Pieces) -> Window:
        """The window of a kernel call."""
        return cls(call.queries, call.keys, call) if isinstance(call, Pieces) else cls(call.q, call.kv, call.kind)


def windows_of(
    regions: Regions, problem: Problem, kernel: BlockKernel, device: torch.device, *, shared: bool = False
) -> list[Window]:
    """The kernel calls of a block's regions. `shared`: several regions may see the same keys."""
    of_kernel = kernel_calls(regions, device, varlen=kernel.takes_varlen(problem.head_dim), shared=shared)
    return [*map(Window.of, of_kernel)]


class Queries(NamedTuple):
    """Rows of queries that are no chunk's, and the sum that what is made of some of them is added to."""

    make: Callable[[Holdings], Tensors]
    into: Callable[[Rows], Sum]


class Windows:
    """Makes the calls that compute windows of blocks on one rank."""

    def __init__(
        self,
        problem: Problem,
        sums: Sums,
        device: torch.device,
        kernel_of: Callable[[Chunk], BlockKernel | Expanding],
        *,
        timed: bool,
    ) -> None:
        """`kernel_of` is the kernel of blocks of some queries. Without `timed` no laps of executions are marked."""
        self._problem, self._sums, self._device, self._kernel_of, self._timed = problem, sums, device, kernel_of, timed

    def _with_keys(
        self, queries: Chunk, windows: Sequence[Window], take: Callable[[Rows], Take | None]
    ) -> tuple[BlockKernel | Expanding, list[Take | None], Together | None, Take | None]:
        """(the kernel of a block's calls, what takes each call's keys; where these are made of latents, and some of
        them for several calls, how they are made together, and what takes the latents).
        """
        kernel, calls = self._kernel_of(queries), [(window.kv, window.kind) for window in windows]
        if not isinstance(kernel, Expanding) or not calls or is_one_making(calls):
            return kernel, [take(rows) for rows, _ in calls], None, None
        together = Together(kernel, calls, self._device, getattr(torch, self._problem.accumulate_dtype))
        takes: list[Take | None] = [_made(together.take(call)) for call in range(len(calls))]
        return together.kernel, takes, together, take(together.rows) or as_they_are

    def forward(
        self,
        q_chunk: Chunk,
        o: Chunk,
        windows: Sequence[Window],
        take: Callable[[Rows], Take | None],
        keys: Chunk | Callable[[Holdings], Tensors],
        more: Perform | None = None,
        queries: Queries | None = None,
    ) -> Perform:
        """A call that computes and folds O of windows, and then does `more`. `keys` is the chunk of keys and values, or
        makes them, and `take` takes rows out of them. `queries` are those of other chunks in the place of q_chunk's.
        """
        kernel, takes, together, latents = self._with_keys(q_chunk, windows, take)
        bound = [
            (*self._sides(q_chunk, o, w.q, queries), take_kv, kernel.forward_of(*self._call_of(w)))
            for w, take_kv in zip(windows, takes, strict=True)
        ]
        timed = self._timed
        kv, make = (keys, _nothing_made) if isinstance(keys, Chunk) else (None, keys)

        def forward(run: Execution) -> None:
            if timed:
                run.lap(WAITS)
            held = run.holdings
            of_q = held.chunks[q_chunk] if queries is None else queries.make(held)
            of_kv = make(held) if kv is None else held.chunks[kv]
            if together and latents:
                c, _ = latents(held, of_kv)
                run.lap(REST)
                of_kv = together.made(c)
                run.lap(KERNELS)
                run.see(c, *of_kv)
                del c
            for take_q, into, take_kv, compute in bound:
                (q,) = take_q(held, of_q) if take_q else of_q
                k, v = take_kv(held, of_kv) if take_kv else of_kv
                if timed:
                    run.lap(REST)
                out, lse = compute(q, k, v)
                if timed:
                    run.lap(KERNELS)
                if run.live is not None:
                    run.see(*of_q, *of_kv, *((k, v) if together else ()), out, lse)
                held.partials.add_output(into, out, lse)
                if timed:
                    run.lap(FOLDS)
            if more:
                more(run)

        return forward

    def _sides(self, q_chunk: Chunk, into: Chunk, rows: Rows, queries: Queries | None) -> tuple[Take | None, Sum]:
        """(what takes a call's rows of queries, the sum that its result is added to)."""
        if queries is not None:
            return rows_of(rows), queries.into(rows)
        return self._take_queries(q_chunk, rows), self._sums.at(into, rows)

    def backward(
        self,
        q_chunk: Chunk,
        dq_chunk: Chunk,
        windows: Sequence[Window],
        take: Callable[[Rows], Take | None],
        kv: Chunk | None = None,
        dkv: Chunk | None = None,
        queries: Queries | None = None,
    ) -> tuple[Backward, list[Rows]]:
        """A function that computes and adds dQ of windows, and the key rows of the gradients that it has. It is given
        the execution alone if keys and their gradients are the chunks `kv` and `dkv`, else also keys and values, and
        what adds one of these gradients, (dk, dv), by number.
        """
        kernel, takes, together, latents = self._with_keys(q_chunk, windows, take)
        of_keys: list[Rows] = [together.rows] if together else [window.kv for window in windows]
        into_keys = [self._sums.at(dkv, rows) for rows in of_keys] if dkv is not None else []
        bound = [
            (number, *self._sides(q_chunk, dq_chunk, w.q, queries), take_kv, kernel.gradients_of(*self._call_of(w)))
            for number, (w, take_kv) in enumerate(zip(windows, takes, strict=True))
        ]
        if not (together and latents):
            return self._each_backward(bound, q_chunk, queries, kv, into_keys), of_keys
        of_made = self._each_backward(bound, q_chunk, queries, None, into_keys, made=True)
        return _by_latents(of_made, together, latents, kv, into_keys), of_keys

    def _each_backward(
        self,
        bound: Sequence[tuple[int, Take | None, Sum, Take | None, Gradients]],
        q_chunk: Chunk,
        queries: Queries | None,
        kv: Chunk | None,
        into_keys: Sequence[Sum],
        *,
        made: bool = False,
    ) -> Backward:
        """A function that computes and adds the gradients of all calls. `made`: keys are, of latents."""
        timed = self._timed

        def each_backward(
            run: Execution, of_kv: Tensors = (), add: AddGradients | None = None, sums: Tensors = ()
        ) -> None:
            held = run.holdings
            if kv is not None:
                if timed:
                    run.lap(WAITS)
                of_kv = held.chunks[kv]
            of_q = held.chunks[q_chunk] if queries is None else queries.make(held)
            for number, take_q, into, take_kv, compute in bound:
                q, out, dout, lse = take_q(held, of_q) if take_q else of_q
                k, v = take_kv(held, of_kv) if take_kv else of_kv
                if timed:
                    run.lap(REST)
                dq, dk, dv = compute(dout, q, k, v, out, lse)
                if timed:
                    run.lap(KERNELS)
                if run.live is not None:
                    run.see(*of_q, *of_kv, *sums, *((k, v) if made else ()), dq, dk, dv)
                if add is None:
                    held.partials.add_block_gradients(dq, into, (dk, dv), into_keys[number])
                else:
                    held.partials.add_gradients(into, (dq,))
                    add(number, (dk, dv))
                if timed:
                    run.lap(FOLDS)

        return each_backward

    def _call_of(self, window: Window) -> tuple[Kind, int, int, tuple[int, int]]:
        """All that tells apart a window's kernel call from others (BlockKernel.forward_of)."""
        return window.kind, len(window.q), len(window.kv), (self._problem.head_dim, self._problem.value_dim)

    def take(self, chunk: Chunk, rows: Rows) -> Take | None:
        """A function that takes rows out of the tensors of a chunk; None if they are all of them."""
        if self._sums.at(chunk, rows).whole:
            return None

        def take(held: Holdings, tensors: Tensors) -> Tensors:
            places = held.among(chunk, rows)
            return tuple([tokens_of(x, places) for x in tensors])

        return take

    def _take_queries(self, chunk: Chunk, rows: Rows) -> Take | None:
        """`take` of a chunk of queries, of which most blocks read the same rows: these are cut once."""
        take = self.take(chunk, rows)
        if take is None or not isinstance(rows, range):
            return take
        run = rows.start, rows.stop

        def take_once(held: Holdings, tensors: Tensors) -> Tensors:
            known = held.cuts.setdefault(chunk, {})
            if run not in known:
                known[run] = take(held, tensors)
            return known[run]

        return take_once


def _by_latents(
    of_made: Backward, together: Together, latents: Take, kv: Chunk | None, into_keys: Sequence[Sum]
) -> Backward:
    """A function that makes keys of latents, computes their gradients, and adds those of the latents."""

    def by_latents(run: Execution, of_kv: Tensors = (), add: AddGradients | None = None, sums: Tensors = ()) -> None:
        held = run.holdings
        if kv is not None:
            run.lap(WAITS)
            of_kv = held.chunks[kv]
        c, none = latents(held, of_kv)
        run.lap(REST)
        made = together.made(c)
        into = together.sums(made)
        run.lap(KERNELS)
        of_made(run, made, partial(together.add, into), (*sums, *into))
        dc = together.gradients(c, into)
        run.lap(KERNELS)
        run.see(c, *made, *sums, *into, dc)
        (add or partial(_add, run, into_keys))(0, (dc, none))
        run.lap(FOLDS)

    return by_latents


def _nothing_made(held: Holdings) -> Tensors:
    raise AssertionError("keys are a chunk")


def _add(run: Execution, into: Sequence[Sum], number: int, gradients: Tensors) -> None:
    """Add the gradients of some key rows to those of their chunk."""
    run.holdings.partials.add_gradients(into[number], gradients)


def _made(take: Callable[[Tensors], Tensors]) -> Take:
    """A function that takes rows out of what was made."""
    return lambda held, tensors: take(tensors)


def rows_of(rows: Rows) -> Take:
    """A function that takes rows out of tensors that are no chunk's."""
    return lambda held, tensors: tuple([tokens_of(x, rows) for x in tensors])


def as_they_are(held: Holdings, tensors: Tensors) -> Tensors:
    """All rows (Take)."""
    return tensors
