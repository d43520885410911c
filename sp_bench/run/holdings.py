"""Tensors a rank holds while it executes a plan: input chunks, received chunks and the partials it accumulates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from sp_bench.plan.ops import Chunk
from sp_bench.run.partials import Partials, Rows, Sums, Tensors


class Holdings:
    """Tensors by chunk. Lanes write received chunks, blocks and lanes read them; the plan's waits order both."""

    def __init__(self, inputs: Mapping[Chunk, Tensors], sums: Sums) -> None:
        self.partials = Partials(sums)
        self.chunks = dict(inputs)
        """Inputs, and what was received or bundled."""
        self.cuts: dict[Chunk, dict[tuple[int, int], Tensors]] = {}
        """Runs of rows of chunks that several blocks read, by (start, stop)."""
        self._first_rows: dict[Chunk, int] = {}
        self._parts: dict[Chunk, Sequence[tuple[Tensor, Tensors]]] = {}

    def put(self, chunk: Chunk, tensors: Tensors, first_row: int = 0) -> None:
        """Store a chunk, or those of its rows that start at `first_row`."""
        self.chunks[chunk] = tensors
        if self.cuts:
            self.cuts.pop(chunk, None)
        if first_row or chunk in self._first_rows:
            self._first_rows[chunk] = first_row

    def put_rows(self, chunk: Chunk, parts: Sequence[tuple[Tensor, Tensors]]) -> None:
        """Store what has come of a partial as (rows, tensors); parts may have rows in common, and one some twice."""
        self._parts[chunk] = parts

    def whole(self, chunk: Chunk, tokens: int) -> Tensors | None:
        """Return a received chunk, if all of its tokens have come as one."""
        fields = None if chunk in self._parts else self.chunks.get(chunk)
        return fields if fields and fields[0].shape[1] == tokens else None

    def parts(self, chunk: Chunk) -> Sequence[tuple[Rows, Tensors]]:
        """Return what has come of a partial as (rows, tensors); nothing if no block was folded into it."""
        if chunk in self._parts:
            return self._parts[chunk]
        return [(self.rows(chunk), self.chunks[chunk])] if self.holds(chunk) else []

    def holds(self, chunk: Chunk) -> bool:
        """Whether a chunk is an input or was received or bundled."""
        return chunk in self.chunks

    def drop(self, chunk: Chunk) -> None:
        """Forget a received chunk: in this execution the rank doesn't receive it."""
        self.chunks.pop(chunk, None)
        self.cuts.pop(chunk, None)

    def packed(self, chunk: Chunk) -> Tensors:
        """Return any chunk, partials included, as contiguous tensors."""
        return self.chunks[chunk] if chunk in self.chunks else self.partials.packed(chunk)

    def to_send(self, chunk: Chunk) -> Tensors:
        """Return any chunk as contiguous tensors that a lane may read."""
        return self.chunks[chunk] if chunk in self.chunks else self.partials.to_send(chunk)

    def rows(self, chunk: Chunk) -> range:
        """Return the rows of a received chunk that are held, as indices into the whole chunk."""
        first = self._first_rows.get(chunk, 0)
        return range(first, first + self.chunks[chunk][0].shape[1])

    def among(self, chunk: Chunk, rows: Rows) -> Rows:
        """Convert row indices of the whole chunk to indices into the held rows."""
        first = self._first_rows.get(chunk, 0)
        if not first or not isinstance(rows, range):
            return rows
        return range(rows.start - first, rows.stop - first)

    def tensors(self) -> list[Tensor]:
        """Return all tensors held now. Safe while other threads add to them."""
        chunks = [*list(self.chunks.values()), *self.partials.tensors()]
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
