"""Partial outputs and gradients that a rank accumulates while it executes a plan."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

import torch
from torch import Tensor

from sp_bench.kernels import fold_
from sp_bench.kernels.contract import empty_output
from sp_bench.kernels.fold import in_dtype
from sp_bench.plan.ops import Chunk
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Tensor as ChunkTensor

Tensors = tuple[Tensor, ...]
"""The fields of one chunk, in the order of its tensor's fields."""
Rows = range | Tensor
"""Tokens of a chunk: a run of them, or (tokens,) indices, no two alike."""


class Partials:
    """Accumulators by chunk, in fp32 (fp64 for fp64 problems). `unsummed` chunks stay in the compute dtype.

    The first block result of a chunk becomes its accumulator, without a copy if shape and dtype allow.
    """

    def __init__(self, problem: Problem, rank: int, device: torch.device, unsummed: Container[Chunk] = ()) -> None:
        self._problem, self._rank, self._device, self._unsummed = problem, rank, device, unsummed
        self._held: dict[Chunk, Tensors] = {}
        self._neutral: dict[tuple[ChunkTensor, torch.dtype, int], Tensors] = {}

    def expect_untouched(self, chunks: Iterable[Chunk]) -> None:
        """Make the neutral elements that will be sent for these chunks: one for all that are alike."""
        for chunk in chunks:
            if (key := self._alike(chunk)) not in self._neutral:
                self._neutral[key] = self._new(chunk)

    def add_output(self, chunk: Chunk, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Fold (out_BSHD, lse_BHS) of the chunk's tokens `rows` into its accumulator."""
        if chunk not in self._held and isinstance(rows, range):
            self._held[chunk] = self._begun(chunk, rows, (out, lse))
            return
        into_out, into_lse = self._sum(chunk)
        here_out, here_lse = tokens_of(into_out, rows), tokens_of(into_lse, rows)
        fold_(here_out, here_lse, out, lse)
        if not isinstance(rows, range):  # these were copies
            into_out.index_copy_(1, rows, here_out)
            into_lse.index_copy_(2, rows, here_lse)

    def add_gradients(self, chunk: Chunk, rows: Rows, gradients: Tensors) -> None:
        """Add gradients_BSHD of the chunk's tokens `rows` to its accumulator."""
        if chunk not in self._held and isinstance(rows, range):
            self._held[chunk] = self._begun(chunk, rows, gradients)
            return
        for into, gradient in zip(self._sum(chunk), gradients, strict=True):
            if isinstance(rows, range):
                tokens_of(into, rows).add_(gradient)
            else:
                into.index_add_(1, rows, gradient.to(into.dtype))

    def _begun(self, chunk: Chunk, rows: range, part: Tensors) -> Tensors:
        """A chunk's accumulator after its first result, which has its tokens `rows`: all else is neutral."""
        tokens, dtype = self._tokens(chunk), self._dtype(chunk)
        if len(rows) == tokens:
            return tuple(x if x.ndim == 3 else in_dtype(x, dtype).contiguous() for x in part)
        begun = []
        for x in part:
            dim, neutral, held = (2, -math.inf, x.dtype) if x.ndim == 3 else (1, 0.0, dtype)
            shape = (*x.shape[:dim], tokens, *x.shape[dim + 1 :])
            into = torch.empty(shape, dtype=held, device=self._device)
            into.narrow(dim, rows.start, len(rows)).copy_(x)
            for other in (range(rows.start), range(rows.stop, tokens)):
                if other:
                    into.narrow(dim, other.start, len(other)).fill_(neutral)
            begun.append(into)
        return tuple(begun)

    def add_part(self, chunk: Chunk, rows: range, part: Tensors, *, alone: bool) -> None:
        """Fold what one kernel call has of a chunk's tokens `rows`; unless `alone`, it is cut out of a larger result.

        A part of a larger one can't become the accumulator, as it would keep all of it alive.
        """
        if not alone and chunk not in self._held and len(rows) == self._tokens(chunk):
            uncast = (x.ndim == 3 or x.dtype == self._dtype(chunk) for x in part)
            part = tuple(
                x.clone(memory_format=torch.contiguous_format) if as_is else x
                for x, as_is in zip(part, uncast, strict=True)
            )
        if _is_output(chunk):
            self.add_output(chunk, rows, *part)
        else:
            self.add_gradients(chunk, rows, part)

    def put_rows(self, chunk: Chunk, part: Tensors) -> None:
        """Keep the whole gradient of rows of which others have the rest (plan.casts)."""
        self._held[chunk] = tuple(in_dtype(x, self._dtype(chunk)) for x in part)

    def get_rows(self, chunk: Chunk) -> Tensors:
        """Return what `put_rows` has kept; nothing if blocks were left out."""
        return self._held.get(chunk, ())

    def add(self, chunk: Chunk, rows: Rows, part: Tensors) -> None:
        """Fold a peer's partial of the chunk's tokens `rows` into the accumulator."""
        # It lies in a receive buffer, so unlike a block's result it can't become the accumulator.
        if not _is_output(chunk):
            self._sum(chunk)
            self.add_gradients(chunk, rows, part)
        else:
            out, lse = self._sum(chunk)
            fold_(tokens_of(out, rows), tokens_of(lse, rows), *part)

    def get(self, chunk: Chunk) -> Tensors:
        """Return the accumulator; the neutral element if no block has written to it."""
        if chunk not in self._held:
            self._held[chunk] = self._new(chunk)
        return self._held[chunk]

    def packed(self, chunk: Chunk) -> Tensors:
        """Return the accumulator as contiguous tensors: a kernel's lse may have any strides."""
        self._held[chunk] = tuple(tensor.contiguous() for tensor in self.get(chunk))
        return self._held[chunk]

    def to_send(self, chunk: Chunk) -> Tensors:
        """Return the contiguous accumulator, or the neutral element if no block has written to the chunk.

        Nothing is allocated for a chunk that was expected to be untouched, or whose results are contiguous.
        """
        if chunk not in self._held:
            return self._neutral[self._alike(chunk)]
        here = self._device.type == "cpu" or all(x.is_contiguous() for x in self._held[chunk])
        assert here, f"{chunk} isn't contiguous, and on a GPU a lane can't allocate"
        return self.packed(chunk)

    def tensors(self) -> list[Tensors]:
        """Return all accumulators. Safe while other threads drop some."""
        return [*self._held.values(), *self._neutral.values()]

    def drop(self, chunk: Chunk) -> Tensors | None:
        """Remove the accumulator, which was sent on, and return it; None if there was none."""
        return self._held.pop(chunk, None)

    def _sum(self, chunk: Chunk) -> Tensors:
        """Return the accumulator for an addition; asserts that the chunk is not `unsummed`."""
        assert chunk not in self._unsummed, f"{chunk} is no sum: it may be held in a dtype too narrow for one"
        return self.get(chunk)

    def _new(self, chunk: Chunk) -> Tensors:
        """The neutral element of a chunk: no keys seen, or no gradient."""
        tokens, dtype = self._tokens(chunk), self._dtype(chunk)
        shapes = [self._problem.field_shape(field, tokens) for field in chunk.tensor.fields]
        if _is_output(chunk):
            return empty_output(torch.empty(shapes[0], dtype=dtype, device=self._device))
        return tuple(torch.zeros(shape, dtype=dtype, device=self._device) for shape in shapes)

    def _alike(self, chunk: Chunk) -> tuple[ChunkTensor, torch.dtype, int]:
        return chunk.tensor, self._dtype(chunk), self._tokens(chunk)

    def _tokens(self, chunk: Chunk) -> int:
        """Return the number of tokens in the chunk on this rank."""
        return self._problem.field_tokens(chunk.tensor.fields[0], int(chunk.owner(self._rank)))

    def _dtype(self, chunk: Chunk) -> torch.dtype:
        return getattr(torch, self._problem.dtype if chunk in self._unsummed else self._problem.accumulate_dtype)


def tokens_of(x: Tensor, rows: Rows) -> Tensor:
    """Return tokens `rows` of x_BSHD or x_BHS: a copy of indices, a view of a run.

    It is x itself if the run is all of it, since even a view costs time per block.
    """
    dim = 1 if x.ndim == 4 else 2
    if not isinstance(rows, range):
        return x.index_select(dim, rows)
    return x if len(rows) == x.shape[dim] else x.narrow(dim, rows.start, len(rows))


def _is_output(chunk: Chunk) -> bool:
    return chunk.tensor.is_output


def as_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View the first elements of a contiguous buffer as a tensor of `shape`, which must fit."""
    return x if x.shape == shape else x.view(-1)[: math.prod(shape)].view(shape)
