"""Tensors a rank holds while it executes a plan: input chunks, received chunks and the partials it accumulates."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sp_bench.plan.ops import Chunk
from sp_bench.plan.problem import Problem
from sp_bench.run.partials import Partials, Rows, Tensors


class Holdings:
    """Tensors by chunk. Lanes write received chunks, blocks and lanes read them; the plan's waits order both."""

    def __init__(
        self,
        inputs: Mapping[Chunk, Tensors],
        problem: Problem,
        rank: int,
        device: torch.device,
        unsummed: Container[Chunk] = (),
    ) -> None:
        """`unsummed`: partials with a single contribution, which are kept in the compute dtype."""
        self.partials = Partials(problem, rank, device, unsummed)
        self._held = dict(inputs)
        self._first_rows: dict[Chunk, int] = {}
        self._parts: dict[Chunk, Sequence[tuple[Tensor, Tensors]]] = {}

    def put(self, chunk: Chunk, tensors: Tensors, first_row: int = 0) -> None:
        """Store a chunk, or those of its rows that start at `first_row`."""
        self._held[chunk], self._first_rows[chunk] = tensors, first_row

    def put_rows(self, chunk: Chunk, parts: Sequence[tuple[Tensor, Tensors]]) -> None:
        """Store what has come of a partial as (rows, tensors); parts may have rows in common, and one some twice."""
        self._parts[chunk] = parts

    def parts(self, chunk: Chunk) -> Sequence[tuple[Rows, Tensors]]:
        """Return what has come of a partial as (rows, tensors); nothing if no block was folded into it."""
        if chunk in self._parts:
            return self._parts[chunk]
        return [(self.rows(chunk), self.received(chunk))] if self.holds(chunk) else []

    def holds(self, chunk: Chunk) -> bool:
        """Whether a chunk is an input or was received or bundled."""
        return chunk in self._held

    def drop(self, chunk: Chunk) -> None:
        """Forget a received chunk: in this execution the rank doesn't receive it."""
        self._held.pop(chunk, None)

    def received(self, chunk: Chunk) -> Tensors:
        """Return the tensors of an input, received or bundled chunk."""
        return self._held[chunk]

    def packed(self, chunk: Chunk) -> Tensors:
        """Return any chunk, partials included, as contiguous tensors."""
        return self._held[chunk] if chunk in self._held else self.partials.packed(chunk)

    def to_send(self, chunk: Chunk) -> Tensors:
        """Return any chunk as contiguous tensors that a lane may read."""
        return self._held[chunk] if chunk in self._held else self.partials.to_send(chunk)

    def rows(self, chunk: Chunk) -> range:
        """Return the rows of a received chunk that are held, as indices into the whole chunk."""
        first = self._first_rows.get(chunk, 0)
        return range(first, first + self._held[chunk][0].shape[1])

    def among(self, chunk: Chunk, rows: Rows) -> Rows:
        """Convert row indices of the whole chunk to indices into the held rows."""
        if not isinstance(rows, range):
            return rows  # of a pack, whose chunks travel whole
        first = self._first_rows.get(chunk, 0)
        return range(rows.start - first, rows.stop - first)

    def tensors(self) -> list[Tensor]:
        """Return all tensors held now. Safe while other threads add to them."""
        chunks = [*list(self._held.values()), *self.partials.tensors()]
        return [tensor for tensors in chunks for tensor in tensors]


class LiveBytes:
    """Peak bytes of the tensors seen together. Tensors that share storage count once."""

    def __init__(self) -> None:
        self.peak = 0
        self.always: list[Tensor] = []
        """Tensors counted at every `see`."""

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Update the peak with the tensors alive now."""
        storages = (tensor.untyped_storage() for tensor in (*self.always, *tensors))
        self.peak = max(self.peak, sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
