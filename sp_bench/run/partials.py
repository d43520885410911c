"""Partial outputs and gradients that a rank accumulates while it executes a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from sp_bench.kernels import fold as folds
from sp_bench.kernels.contract import empty_output
from sp_bench.kernels.fold import add_, among_zeros, fold_each_, fold_unfused_, in_dtype, packed_in
from sp_bench.plan.ops import Chunk
from sp_bench.plan.problem import Problem

Tensors = tuple[Tensor, ...]
"""The fields of one chunk, in the order of its tensor's fields."""
Rows = range | Tensor
"""Tokens of a chunk: a run of them, or (tokens,) indices, no two alike."""
_Alike = tuple[tuple[tuple[int, ...], ...], torch.dtype, bool]


class Sum(NamedTuple):
    """The accumulator of a chunk, and the tokens of it that a result has."""

    chunk: Chunk
    rows: Rows
    whole: bool
    """Whether they are all tokens of the chunk."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the whole chunk on this rank, one per field."""
    dtype: torch.dtype
    """The dtype of all fields but statistics."""
    summed: bool
    """Whether anything may be added to it."""
    stays: bool = False
    """Whether it may be a part of a kernel's result (lower.staging.read_together)."""
    is_output: bool = False
    """Whether it is folded with its statistics; gradients are added."""
    empty: bool = False
    """Whether there are no such tokens."""
    run: range | None = None
    """`rows` where they are a run of tokens."""
    indices: Tensor | None = None
    """`rows` where they are not."""

    @property
    def alike(self) -> _Alike:
        """Equal for chunks with the same neutral element."""
        return self.shapes, self.dtype, self.is_output


class Sums:
    """The accumulators of a rank, in fp32 (fp64 for fp64 problems). `unsummed` chunks stay in the compute dtype.

    What is known of one is worked out once, not in each execution.
    """

    def __init__(
        self,
        problem: Problem,
        rank: int,
        device: torch.device,
        unsummed: Container[Chunk] = (),
        together: Container[Chunk] = (),
    ) -> None:
        self._problem, self._rank, self._unsummed, self._together = problem, rank, unsummed, together
        self.device = device
        self.fused = folds.fused_on(device) if problem.accumulate_dtype == "float32" else None
        """The module of the kernels that fold on the device; None where torch's operations do."""
        self.of: Callable[..., Sum] = cache(self.at)
        """`at`, for runs of rows."""

    def at(self, chunk: Chunk, rows: Rows | None = None) -> Sum:
        """The accumulator of a chunk, for results of such rows; None: all of them."""
        problem, fields = self._problem, chunk.tensor.fields
        tokens = problem.field_tokens(fields[0], int(chunk.owner(self._rank)))
        rows, summed = range(tokens) if rows is None else rows, chunk not in self._unsummed
        return self._sum(chunk, rows, tokens, problem.accumulate_dtype if summed else problem.dtype, summed=summed)

    def of_rows(self, chunk: Chunk, rows: Rows, tokens: int) -> Sum:
        """A sum of so many rows of several chunks together, held under one of them, for results of some of these."""
        return self._sum(chunk, rows, tokens, self._problem.accumulate_dtype, summed=True)

    def _sum(self, chunk: Chunk, rows: Rows, tokens: int, dtype: str, *, summed: bool) -> Sum:
        """The sum of so many tokens for results of some `rows` of them."""
        shapes = tuple(self._problem.field_shape(field, tokens) for field in chunk.tensor.fields)
        run, indices = (rows, None) if isinstance(rows, range) else (None, rows)
        whole = run is not None and len(run) == tokens
        stays, is_output = chunk in self._together, chunk.tensor.is_output
        return Sum(
            chunk, rows, whole, shapes, getattr(torch, dtype), summed, stays, is_output, len(rows) == 0, run, indices
        )


class Partials:
    """The accumulators of one execution, by chunk.

    The first block result of a chunk becomes its accumulator, without a copy if shape and dtype allow.
    """

    def __init__(self, sums: Sums) -> None:
        self._sums, self._device, self._fused = sums, sums.device, sums.fused
        self._fold = fold_unfused_ if sums.fused is None else sums.fused.fold_fused_
        self._cuts: dict[int, tuple[Tensors, Tensors]] = {}
        """(the accumulator, some rows of it), by the identity of their Sum. On CUDA, where one thread does all."""
        self._held: dict[Chunk, Tensors] = {}
        self._neutral: dict[_Alike, Tensors] = {}

    def expect_untouched(self, chunks: Iterable[Chunk]) -> None:
        """Make the neutral elements that will be sent for these chunks: one for all that are alike."""
        for into in map(self._sums.of, chunks):
            if into.alike not in self._neutral:
                self._neutral[into.alike] = self._new(into)

    def start(self, into: Sum) -> None:
        """Hold the neutral element of a sum."""
        self._held[into.chunk] = self._new(into)

    def add_output(self, into: Sum, out: Tensor, lse: Tensor) -> None:
        """Fold (out_BSHD, lse_BHS) of some tokens of a chunk into its accumulator."""
        total, run, indices = self._held.get(into.chunk), into.run, into.indices
        if total is None and run is not None:
            self._held[into.chunk] = self._begun(into, run, (out, lse))
            return
        assert into.summed, _no_sum(into)
        into_out, into_lse = total or self.get(into.chunk)
        if into.whole:
            self._fold(into_out, into_lse, out, lse)
            return
        here_out, here_lse = self._cut(into, (into_out, into_lse) if total is None else total)
        self._fold(here_out, here_lse, out, lse)
        if indices is not None:  # these were copies
            into_out.index_copy_(1, indices, here_out)
            into_lse.index_copy_(2, indices, here_lse)

    def add_sinks(self, into: Sum, scores: Tensor) -> None:
        """Let every row of a chunk's output see one more key, whose value is 0 and whose scores are these: (H,), or
        (H, rows).

        Source: gpt-oss (OpenAI 2025), whose softmax has a learned score of each head in its denominator.
        """
        out, lse = self.get(into.chunk)
        total = torch.logaddexp(lse, (scores if scores.ndim > 1 else scores[:, None]).to(lse.dtype))
        out.mul_(torch.exp(lse - total).transpose(1, 2).unsqueeze(3))
        lse.copy_(total)

    def add_gradients(self, into: Sum, gradients: Tensors) -> None:
        """Add gradients_BSHD of some tokens of a chunk to its accumulator."""
        total, run, indices = self._held.get(into.chunk), into.run, into.indices
        if total is None and run is not None:
            self._held[into.chunk] = self._begun(into, run, gradients)
            return
        assert into.summed, _no_sum(into)
        total = total or self.get(into.chunk)
        if indices is None:
            add_(total if into.whole else self._cut(into, total), gradients, self._fused)
            return
        for x, gradient in zip(total, gradients, strict=True):
            x.index_add_(1, indices, gradient.to(x.dtype))

    def add_block_gradients(self, dq: Tensor, of_q: Sum, dkv: Tensors, of_kv: Sum) -> None:
        """`add_gradients` of all that a block has: in one kernel on CUDA, casts included, where queries and keys have
        the same shape.
        """
        fused = self._fused
        if fused is None or not (of_q.whole and of_kv.whole) or dq.shape != dkv[0].shape:
            self.add_gradients(of_q, (dq,))
            self.add_gradients(of_kv, dkv)
            return
        totals: Tensors = ()
        parts: Tensors = ()
        added = 0
        for into, gradients in ((of_q, (dq,)), (of_kv, dkv)):
            total = self._held.get(into.chunk)
            if total is not None:
                assert into.summed, _no_sum(into)
                added |= (1 << len(gradients)) - 1 << len(totals)
            elif dq.dtype == into.dtype and _is_packed(gradients, into.dtype):
                self._held[into.chunk] = gradients
                continue
            elif into.dtype != torch.float32:
                self.add_gradients(into, gradients)
                continue
            else:
                packed = torch.contiguous_format
                total = tuple([torch.empty_like(x, dtype=into.dtype, memory_format=packed) for x in gradients])
                self._held[into.chunk] = total
            totals += total
            parts += gradients
        if not totals or fused.sums_fused_(totals, parts, added=added):
            return
        for i, (x, part) in enumerate(zip(totals, parts, strict=True)):  # in memory they lie in different orders
            fused.sums_fused_((x,), (part,), added=added >> i & 1)

    def _begun(self, into: Sum, rows: range, part: Tensors) -> Tensors:
        """A chunk's accumulator after its first result, which has its tokens `rows`: all else is neutral."""
        if into.whole:
            if into.is_output:
                return *packed_in(part[:1], into.dtype, self._fused), *part[1:]
            return packed_in(part, into.dtype, self._fused)
        tokens = into.shapes[0][1]
        if not into.is_output:
            return among_zeros(part, tokens, rows.start, into.dtype, self._fused)
        lse = part[1].new_full((*part[1].shape[:2], tokens), -math.inf)
        lse.narrow(2, rows.start, len(rows)).copy_(part[1])
        return *among_zeros(part[:1], tokens, rows.start, into.dtype, self._fused), lse

    def add_part(self, into: Sum, part: Tensors, *, alone: bool) -> None:
        """Fold what one kernel call has of some tokens of a chunk; unless `alone`, it is cut out of a larger result.

        A part of a larger one can't become the accumulator, as it would keep all of it alive.
        """
        if not alone and into.whole and into.chunk not in self._held:
            uncast = (x.ndim == 3 or x.dtype == into.dtype for x in part)
            part = tuple(
                x.clone(memory_format=torch.contiguous_format) if as_is else x
                for x, as_is in zip(part, uncast, strict=True)
            )
        if into.is_output:
            self.add_output(into, *part)
        else:
            self.add_gradients(into, part)

    def add_parts(self, into: Sequence[Sum], parts: Sequence[Tensors]) -> None:
        """`add_part` of all that one kernel call has of some chunks, with as few operations as possible."""
        # Where all of a result is whole chunks that are read together, they may stay in it.
        if all(total.stays and total.whole for total in into) and _as_held(into[0].dtype, parts):
            self._held.update((total.chunk, part) for total, part in zip(into, parts, strict=True))
            return
        alone, totals, to_fold = len(parts) == 1, [], []
        for total, part in zip(into, parts, strict=True):
            if alone or not total.whole or total.chunk not in self._held:
                self.add_part(total, part, alone=alone)
            else:
                totals.append(self._sum(total))
                to_fold.append(part)
        if not totals:
            return
        if into[0].is_output:
            fold_each_(totals, to_fold, self._fused)
        else:
            add_(tuple(chain(*totals)), tuple(chain(*to_fold)), self._fused)

    def put_rows(self, chunk: Chunk, part: Tensors) -> None:
        """Keep the whole partial of rows of which others have the rest (plan.casts), or add to what is kept of them."""
        if chunk in self._held:
            add_(self._sum(self._sums.of(chunk)), part)
            return
        dtype = self._sums.of(chunk).dtype
        self._held[chunk] = tuple(x if x.ndim == 3 else in_dtype(x, dtype) for x in part)

    def get_rows(self, chunk: Chunk) -> Tensors:
        """Return what `put_rows` has kept; nothing if blocks were left out."""
        return self._held.get(chunk, ())

    def add(self, into: Sum, part: Tensors) -> None:
        """Fold a peer's partial of some tokens of a chunk into its accumulator."""
        # It lies in a receive buffer, so unlike a block's result it can't become the accumulator.
        total = self._sum(into)
        if into.empty:  # no rows have come, but others count on the sum
            return
        if not into.is_output:
            if into.whole:
                add_(total, part, self._fused)
            else:
                self.add_gradients(into, part)
            return
        if into.run is None:
            self.add_output(into, *part)
            return
        out, lse = total if into.whole else self._cut(into, total)
        self._fold(out, lse, *part)

    def get(self, chunk: Chunk) -> Tensors:
        """Return the accumulator; the neutral element if no block has written to it."""
        if chunk not in self._held:
            self._held[chunk] = self._new(self._sums.of(chunk))
        return self._held[chunk]

    def packed(self, chunk: Chunk) -> Tensors:
        """Return the accumulator as contiguous tensors: a kernel's lse may have any strides."""
        self._held[chunk] = tuple([tensor.contiguous() for tensor in self.get(chunk)])
        return self._held[chunk]

    def to_send(self, chunk: Chunk) -> Tensors:
        """Return the contiguous accumulator, or the neutral element if no block has written to the chunk.

        Nothing is allocated for a chunk that was expected to be untouched, or whose results are contiguous.
        """
        held = self._held.get(chunk)
        if held is None:
            return self._neutral[self._sums.of(chunk).alike]
        if all(map(torch.Tensor.is_contiguous, held)):
            return held
        assert self._device.type == "cpu", f"{chunk} isn't contiguous, and on a GPU a lane can't allocate"
        return self.packed(chunk)

    def tensors(self) -> list[Tensors]:
        """Return all accumulators. Safe while other threads drop some."""
        return [*self._held.values(), *self._neutral.values()]

    def drop(self, chunk: Chunk) -> Tensors | None:
        """Remove the accumulator, which was sent on, and return it; None if there was none."""
        dropped = self._held.pop(chunk, None)
        if self._cuts:  # they would keep it
            self._cuts = {key: cut for key, cut in self._cuts.items() if cut[0] is not dropped}
        return dropped

    def _cut(self, into: Sum, total: Tensors) -> Tensors:
        """Some tokens of an accumulator: a view of a run of them, a copy of others."""
        if self._fused is None or into.run is None:
            return tuple([tokens_of(x, into.rows) for x in total])
        known = self._cuts.get(id(into))
        if known is None or known[0] is not total:
            known = self._cuts[id(into)] = total, tuple([tokens_of(x, into.rows) for x in total])
        return known[1]

    def _sum(self, into: Sum) -> Tensors:
        """Return the accumulator for an addition; asserts that it is a sum."""
        assert into.summed, _no_sum(into)
        return self._held.get(into.chunk) or self.get(into.chunk)

    def _new(self, into: Sum) -> Tensors:
        """The neutral element of a chunk: no keys seen, or no gradient."""
        if into.is_output:
            return empty_output(torch.empty(into.shapes[0], dtype=into.dtype, device=self._device))
        return tuple(torch.zeros(shape, dtype=into.dtype, device=self._device) for shape in into.shapes)


def _no_sum(into: Sum) -> str:
    return f"{into.chunk} is no sum: it may be held in a dtype too narrow for one"


def _is_packed(tensors: Tensors, dtype: torch.dtype) -> bool:
    """Whether tensors are contiguous and in that dtype."""
    return all([x.dtype == dtype and x.is_contiguous() for x in tensors])  # noqa: C419  # a generator takes longer


def _as_held(dtype: torch.dtype, parts: Iterable[Tensors]) -> bool:
    """Whether parts of a result are contiguous tensors of the dtype that they are held in."""
    return all(x.dtype == dtype and x.is_contiguous() for part in parts for x in part)


def copy(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy and cast all tensors, by one call for those of the same dtypes.

    torch's call for several takes all for what the first is: until 2.11 it wrote statistics in the dtype of outputs
    (github pytorch/pytorch issue 173383).
    """
    if len(into) == 1:
        into[0].copy_(tensors[0])
    elif len(into) == 2 and into[0].dtype == into[1].dtype and tensors[0].dtype == tensors[1].dtype:  # most of all
        torch._foreach_copy_((into[0], into[1]), (tensors[0], tensors[1]))  # pyright: ignore[reportPrivateImportUsage]
    else:
        _copy_by_dtype(into, tensors)


def _copy_by_dtype(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for x, y in zip(into, tensors, strict=True):
        targets, sources = alike.setdefault((x.dtype, y.dtype), ([], []))
        targets.append(x)
        sources.append(y)
    for targets, sources in alike.values():
        if len(targets) == 1:
            targets[0].copy_(sources[0])
        else:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def add_rows(sums: Tensors, rows: Rows, gradients: Tensors) -> None:
    """Add gradients_BSHD of some rows to their sums."""
    for into, x in zip(sums, gradients, strict=True):
        if isinstance(rows, range):
            tokens_of(into, rows).add_(x)
        else:
            into.index_add_(1, rows, x.to(into.dtype))


def token_dim(x: Tensor) -> int:
    """The dimension of the tokens of a field, x_BSHD or x_BHS."""
    return 1 if x.ndim == 4 else 2


def tokens_of(x: Tensor, rows: Rows) -> Tensor:
    """Return tokens `rows` of x_BSHD or x_BHS: a copy of indices, a view of a run.

    It is x itself if the run is all of it, since even a view costs time per block.
    """
    dim = token_dim(x)
    if not isinstance(rows, range):
        return x.index_select(dim, rows)
    return x if len(rows) == x.shape[dim] else x.narrow(dim, rows.start, len(rows))


def as_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View the first elements of a contiguous buffer as a tensor of `shape`, which must fit."""
    return x if x.shape == shape else x.view(-1)[: math.prod(shape)].view(shape)
