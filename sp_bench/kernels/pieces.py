"""Pieces: regions of a block that one call of a kernel computes, gathered one behind the other.

A block of packed documents falls into many small regions, and a call for each would leave a device idle. Kernels for
variable lengths take pieces of any sizes at once; others take pieces of one size, as a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from sp_bench.plan.regions import Region, RegionKind, stacks

SMALL = 16
"""Regions of at most so many queries and keys are worth a copy into a batch; a kernel is busy with larger ones."""


@dataclass(frozen=True)
class Pieces:
    """Regions of one kind, FULL or CAUSAL, with copies of rows that two have in common. UPPER ones are gathered
    backwards.
    """

    regions: tuple[Region, ...]
    device: torch.device
    _cumulative: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The starts of queries and of keys, by the size of the batch."""

    @property
    def causal(self) -> bool:
        """Whether queries of a piece see only keys up to their own index, as gathered."""
        return self.regions[0].kind is not RegionKind.FULL

    @cached_property
    def queries(self) -> Tensor:
        """The indices of the gathered queries in their chunk: (queries,) int64."""
        return self._gathered([region.q for region in self.regions])

    @cached_property
    def keys(self) -> Tensor:
        """The indices of the gathered keys in their chunk: (keys,) int64."""
        return self._gathered([region.kv for region in self.regions])

    @cached_property
    def q_lengths(self) -> tuple[int, ...]:
        """The queries of each piece."""
        return tuple(len(region.q) for region in self.regions)

    @cached_property
    def kv_lengths(self) -> tuple[int, ...]:
        """The keys of each piece."""
        return tuple(len(region.kv) for region in self.regions)

    def cumulative(self, batch: int) -> tuple[Tensor, Tensor]:
        """The starts of each piece's queries and keys, and the last end: int32, batch entries one by one.

        Made once: a copy to a GPU makes the caller wait for it, and can't be captured.
        """
        if batch not in self._cumulative:
            ends = ([0, *accumulate(lengths * batch)] for lengths in (self.q_lengths, self.kv_lengths))
            queries, keys = (torch.tensor(each, dtype=torch.int32, device=self.device) for each in ends)
            self._cumulative[batch] = queries, keys
        return self._cumulative[batch]

    def _gathered(self, runs: Sequence[range]) -> Tensor:
        runs = [run[::-1] for run in runs] if self.regions[0].kind is RegionKind.UPPER else runs
        return torch.tensor([index for run in runs for index in run], device=self.device)


def calls(
    regions: Iterable[Region], device: torch.device, *, varlen: bool, shared: bool = False
) -> list[Region | Pieces]:
    """The kernel calls of a block: several regions as one where that pays, without STRICT ones.

    `varlen` says that the kernel takes pieces of different sizes, `shared` that those may have rows in common, of which
    each gets a copy, if their results are added.
    """

    def alike(region: Region) -> object:
        small = max(len(region.q), len(region.kv)) <= SMALL
        return region.kind if varlen else (region.kind, len(region.q), len(region.kv)) if small else region

    stacked = stacks(regions, alike, shared=shared and varlen)
    return [Pieces(tuple(stack), device) if len(stack) > 1 else stack[0] for stack in stacked]
