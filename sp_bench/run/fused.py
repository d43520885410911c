"""The tensors of fused blocks: operands end to end, results cut into those of their chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sp_bench.plan.ops import Chunk
from sp_bench.plan.union import Pieces
from sp_bench.run.holdings import Holdings
from sp_bench.run.partials import Tensors, tokens_of


def operands(held: Holdings, chunks: Sequence[Chunk], pieces: Pieces) -> Tensors:
    """The fields of pieces of received chunks, each end to end: (B, S, H, D), or (B, H, S) of statistics."""
    fields = []
    for number, rows in pieces:
        places = held.among(chunks[number], rows)
        fields.append([tokens_of(x, places) for x in held.chunks[chunks[number]]])
    return tuple(end_to_end(of_field) for of_field in zip(*fields, strict=True))


def end_to_end(parts: Sequence[Tensor]) -> Tensor:
    """Tensors concatenated along their tokens: a view where they lie so in memory already, else a copy."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.ndim == 4 and first.shape[0] == 1 and all(_follows(*pair) for pair in pairwise(parts)):
        tokens = sum(x.shape[1] for x in parts)
        return first.as_strided((1, tokens, *first.shape[2:]), first.stride())
    return torch.cat(tuple(parts), dim=1 if first.ndim == 4 else 2)


def cut(result: Tensor, pieces: Pieces) -> Iterator[Tensor]:
    """The parts of a result that belong to the pieces that it was computed from: views."""
    first = 0
    for piece in pieces:
        yield tokens_of(result, range(first, first + len(piece.rows)))
        first += len(piece.rows)


def _follows(one: Tensor, other: Tensor) -> bool:
    """Whether the tokens of `other`, with one batch entry, lie right behind those of `one`."""
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.stride()[1:] == other.stride()[1:]
        and one.storage_offset() + one.shape[1] * one.stride(1) == other.storage_offset()
    )
