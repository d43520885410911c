"""Pieces: regions of a block that one call of a kernel computes, gathered one behind the other.

A block of packed documents falls into many small regions, and a call for each would leave a device idle. Kernels for
variable lengths take pieces of any sizes at once; others take pieces of one size, as a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_bench.plan.region_table import RegionTable, Rows, stacks, table_of
from sp_bench.plan.regions import Region, RegionKind

SMALL = 16
"""Regions of at most so many queries and keys are worth a copy into a batch; a kernel is busy with larger ones."""


class Ends(NamedTuple):
    """Pieces of all entries of a batch, one behind the other, as kernels for variable lengths are told of them."""

    q: Tensor
    kv: Tensor
    """The starts of each piece's queries, and of its keys, and the last end: int32."""
    longest_q: int
    longest_kv: int
    causal: bool

    @property
    def named(self) -> dict[str, Any]:
        """The lengths by the names that FlashAttention has for them."""
        return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), self, strict=False))


@dataclass(frozen=True)
class Pieces:
    """Regions of one kind, FULL or CAUSAL, with copies of rows that two have in common. UPPER ones are gathered
    backwards.
    """

    regions: RegionTable
    device: torch.device
    _ends: dict[int, Ends] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By the size of the batch."""

    @property
    def causal(self) -> bool:
        """Whether queries of a piece see only keys up to their own index, as gathered."""
        return self.regions[0].kind is not RegionKind.FULL

    @cached_property
    def queries(self) -> Tensor | range:
        """The gathered queries in their chunk: indices, (queries,) int64, or the run that they are."""
        return on_device(self.regions.query_rows, self.device)

    @cached_property
    def keys(self) -> Tensor | range:
        """The gathered keys in their chunk, as `queries` has those."""
        return on_device(self.regions.key_rows, self.device)

    @cached_property
    def q_lengths(self) -> tuple[int, ...]:
        """The queries of each piece."""
        return tuple(self.regions.q_tokens.tolist())

    @cached_property
    def kv_lengths(self) -> tuple[int, ...]:
        """The keys of each piece."""
        return tuple(self.regions.kv_tokens.tolist())

    def ends(self, batch: int) -> Ends:
        """The pieces of so many batch entries, in line.

        Made once: a copy to a GPU makes the caller wait for it, and can't be captured.
        """
        if batch not in self._ends:
            q, kv = (torch.from_numpy(starts).to(self.device) for starts in self.regions.starts(batch))
            self._ends[batch] = Ends(q, kv, max(self.q_lengths), max(self.kv_lengths), self.causal)
        return self._ends[batch]


def on_device(rows: Rows, device: torch.device) -> Tensor | range:
    """The run that rows are, or their indices, (rows,) int64, on a device."""
    return rows if isinstance(rows, range) else torch.from_numpy(rows).to(device)


def calls(
    regions: Iterable[Region], device: torch.device, *, varlen: bool, shared: bool = False
) -> list[Region | Pieces]:
    """The kernel calls of a block: several regions as one where that pays, without STRICT ones.

    `varlen` says that the kernel takes pieces of different sizes, `shared` that those may have rows in common, of which
    each gets a copy, if their results are added.
    """
    table = table_of(regions).plain
    alike = table.kind if varlen else table.by_size(SMALL)
    stacked = stacks(table, alike, shared=shared and varlen)
    return [Pieces(stack, device) if len(stack) > 1 else stack[0] for stack in stacked]
