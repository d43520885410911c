"""What a rank holds while it executes a plan: chunks it started with or received, and the partials it accumulates."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor

from sp_bench.plan.ops import Chunk
from sp_bench.plan.problem import Problem
from sp_bench.run.partials import Partials, Tensors


class Holdings:
    """Tensors by chunk. Lanes put down what they received, and blocks and lanes read it, in the order of the waits."""

    def __init__(
        self,
        inputs: Mapping[Chunk, Tensors],
        problem: Problem,
        rank: int,
        device: torch.device,
        unsummed: Container[Chunk] = (),
    ) -> None:
        """`unsummed` are the partials that nothing is added to."""
        self.partials = Partials(problem, rank, device, unsummed)
        self._held = dict(inputs)
        self._first_rows: dict[Chunk, int] = {}

    def put(self, chunk: Chunk, tensors: Tensors, first_row: int = 0) -> None:
        """Hold a chunk, or the rows of it from `first_row` on, as many as there are."""
        self._held[chunk], self._first_rows[chunk] = tensors, first_row

    def received(self, chunk: Chunk) -> Tensors:
        """A chunk that was an input, received or bundled."""
        return self._held[chunk]

    def packed(self, chunk: Chunk) -> Tensors:
        """A chunk of either kind, in contiguous tensors."""
        return self._held[chunk] if chunk in self._held else self.partials.packed(chunk)

    def is_packed(self, chunk: Chunk) -> bool:
        """Whether `packed` would find it, rather than make it."""
        return chunk in self._held or self.partials.is_packed(chunk)

    def rows(self, chunk: Chunk) -> range:
        """Which rows of a received chunk are there, counted from the first of the chunk."""
        first = self._first_rows.get(chunk, 0)
        return range(first, first + self._held[chunk][0].shape[1])

    def among(self, chunk: Chunk, rows: range) -> range:
        """Rows of a chunk, counted among those that are there."""
        first = self._first_rows.get(chunk, 0)
        return range(rows.start - first, rows.stop - first)

    def tensors(self) -> list[Tensor]:
        """All that is held at this moment. Other threads may add to it meanwhile."""
        chunks = [*list(self._held.values()), *self.partials.tensors()]
        return [tensor for tensors in chunks for tensor in tensors]


class LiveBytes:
    """The most memory that tensors seen together take; those that share memory count once."""

    def __init__(self) -> None:
        self.peak = 0
        self.always: list[Tensor] = []
        """What is there all the time, seen or not."""

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Count what is there now."""
        storages = (tensor.untyped_storage() for tensor in (*self.always, *tensors))
        self.peak = max(self.peak, sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
