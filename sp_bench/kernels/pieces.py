"""Pieces: regions of a block that one call of a kernel computes, gathered one behind the other.

A block of packed documents falls into many small regions, and a call for each would leave a device idle. Kernels for
variable lengths take pieces of any sizes at once; others take pieces of one size, as a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sp_bench.plan.region_table import KINDS, RegionTable, stacks, table_of
from sp_bench.plan.regions import Region, RegionKind

SMALL = 16
"""Regions of at most so many queries and keys are worth a copy into a batch; a kernel is busy with larger ones."""
_SHAPE = (len(KINDS), SMALL + 1, SMALL + 1)
"""Kinds and sizes of small regions."""


@dataclass(frozen=True)
class Pieces:
    """Regions of one kind, FULL or CAUSAL, with copies of rows that two have in common. UPPER ones are gathered
    backwards.
    """

    regions: RegionTable
    device: torch.device
    _cumulative: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The starts of queries and of keys, by the size of the batch."""

    @property
    def causal(self) -> bool:
        """Whether queries of a piece see only keys up to their own index, as gathered."""
        return self._kind is not RegionKind.FULL

    @cached_property
    def queries(self) -> Tensor | range:
        """The gathered queries in their chunk: indices, (queries,) int64, or the run that they are."""
        _, start, stop, *_ = self.regions.numbers
        return self._gathered(start, stop)

    @cached_property
    def keys(self) -> Tensor | range:
        """The gathered keys in their chunk, as `queries` has those."""
        *_, start, stop = self.regions.numbers
        return self._gathered(start, stop)

    @cached_property
    def q_lengths(self) -> tuple[int, ...]:
        """The queries of each piece."""
        return tuple(self.regions.q_tokens.tolist())

    @cached_property
    def kv_lengths(self) -> tuple[int, ...]:
        """The keys of each piece."""
        return tuple(self.regions.kv_tokens.tolist())

    def cumulative(self, batch: int) -> tuple[Tensor, Tensor]:
        """The starts of each piece's queries and keys, and the last end: int32, batch entries one by one.

        Made once: a copy to a GPU makes the caller wait for it, and can't be captured.
        """
        if batch not in self._cumulative:
            lengths = self.regions.q_tokens, self.regions.kv_tokens
            ends = (np.append(0, np.tile(each, batch).cumsum()).astype(np.int32) for each in lengths)
            queries, keys = (torch.from_numpy(each).to(self.device) for each in ends)
            self._cumulative[batch] = queries, keys
        return self._cumulative[batch]

    @property
    def _kind(self) -> RegionKind:
        return KINDS[int(self.regions.kind[0])]

    def _gathered(self, start: np.ndarray, stop: np.ndarray) -> Tensor | range:
        tokens = stop - start
        into = np.arange(int(tokens.sum())) - np.repeat(np.cumsum(tokens) - tokens, tokens)
        if self._kind is RegionKind.UPPER:
            return torch.from_numpy(np.repeat(stop - 1, tokens) - into).to(self.device)
        if (start[1:] == stop[:-1]).all():
            return range(int(start[0]), int(stop[-1]))
        return torch.from_numpy(np.repeat(start, tokens) + into).to(self.device)


def calls(
    regions: Iterable[Region], device: torch.device, *, varlen: bool, shared: bool = False
) -> list[Region | Pieces]:
    """The kernel calls of a block: several regions as one where that pays, without STRICT ones.

    `varlen` says that the kernel takes pieces of different sizes, `shared` that those may have rows in common, of which
    each gets a copy, if their results are added.
    """
    table = table_of(regions).plain
    alike = table.kind
    if not varlen:
        of_size = np.ravel_multi_index((table.kind, table.q_tokens, table.kv_tokens), _SHAPE, mode="clip")
        small = np.maximum(table.q_tokens, table.kv_tokens) <= SMALL
        alike = np.where(small, of_size, of_size.max(initial=0) + 1 + np.arange(len(table)))
    stacked = stacks(table, alike, shared=shared and varlen)
    return [Pieces(stack, device) if len(stack) > 1 else stack[0] for stack in stacked]
