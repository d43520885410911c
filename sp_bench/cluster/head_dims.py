"""Heads of a size without figures: a kernel pads them to one that it is built for, and takes as long as with that.

Where that size has no figures either, the time of a pair of tokens is taken to be linear in it between the sizes below
and above that have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sp_bench.cluster.kernel_table import KernelTable
from sp_bench.plan.problem import Problem

FLASH_ATTENTION_2 = (32, 64, 96, 128, 192, 256)
BUILT = {
    "flash_attn": FLASH_ATTENTION_2,
    "aten_flash": FLASH_ATTENTION_2,
    "flash_attn_3": (64, 96, 128, 192, 256),
    "flash_attn_4": range(16, 257, 16),
    "splash": range(128, 257, 128),
}
"""The sizes of heads that kernels are built for. Sources: HEADDIM_SWITCH in csrc/flash_attn/src/static_switch.h and
round_up_headdim in hopper/flash_api.cpp of the flash-attention repository, hdim_multiple_of in its flash_attn/cute; the
128 lanes of a TPU's matrix unit. A kernel that is not listed isn't known to pad."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded(KernelTable):
    """The rates of a kernel for heads that it pads, values too. All else is as of the first of its figures."""

    computed: int
    """The size of heads that the kernel computes on."""
    tables: tuple[KernelTable, ...]
    """The kernel's figures for `computed`, or for the sizes next below and above it."""

    def flops_per_s(
        self, phase: str, mask: str, q_tokens: int, kv_tokens: int, *, batch_heads: int, dtype: str
    ) -> float:
        """FLOP/s of a block, counted without the padding."""
        rates = [
            table.flops_per_s(phase, mask, q_tokens, kv_tokens, batch_heads=batch_heads, dtype=dtype)
            for table in self.tables
        ]
        return self._padded(rates)

    def flops_per_s_of(self, phase: str, mask: str, q_tokens, kv_tokens, *, batch_heads, dtype: str) -> np.ndarray:
        """FLOP/s of many blocks, counted without the padding."""
        return self._padded(
            [
                table.flops_per_s_of(phase, mask, q_tokens, kv_tokens, batch_heads=batch_heads, dtype=dtype)
                for table in self.tables
            ]
        )

    def _padded(self, rates: Sequence[Any]) -> Any:
        times = [table.head_dim / rate for table, rate in zip(self.tables, rates, strict=True)]
        low, high = self.tables[0].head_dim, self.tables[-1].head_dim
        share = (self.computed - low) / (high - low) if high > low else 0.0
        return self.head_dim / (times[0] + share * (times[-1] - times[0]))

    def note(self) -> str:
        """How the rates follow from the figures, for a record."""
        sizes = " and ".join(str(table.head_dim) for table in self.tables)
        how = "the figures" if len(self.tables) == 1 else "a time between those of the figures"
        pads = f"computes heads of {self.head_dim} as heads of {self.computed}"
        what = pads if self.computed > self.head_dim else f"has no figures for heads of {self.head_dim}"
        return f"{self.kernel} {what}: {how} for {sizes}"


def padded(tables: Iterable[KernelTable], problem: Problem) -> Padded | None:
    """The rates of the first kernel whose figures give them for the problem's head_dim; None if there is none."""
    wide = [table for table in tables if not table.v_head_dim]
    usable = [table for table in wide if problem.dtype in table.dtypes and table.kernel in BUILT]
    for kernel in dict.fromkeys(table.kernel for table in usable):
        own = sorted((table for table in usable if table.kernel == kernel), key=lambda table: table.head_dim)
        computed = next((size for size in BUILT[kernel] if size >= problem.head_dim), None)
        if computed and (around := _around(own, computed)):
            first = {each.name: getattr(around[0], each.name) for each in fields(KernelTable)}
            smallest = max(table.smallest for table in around)
            changed = {"figures": "assumed", "head_dim": problem.head_dim, "smallest": smallest}
            return Padded(**first | changed, computed=computed, tables=around)
    return None


def _around(tables: Sequence[KernelTable], size: int) -> tuple[KernelTable, ...]:
    """The table of that size, or those next below and above it; none if there is no such pair."""
    exact = [table for table in tables if table.head_dim == size]
    below, above = ([t for t in tables if t.head_dim < size], [t for t in tables if t.head_dim > size])
    return tuple(exact[:1]) or ((below[-1], above[0]) if below and above else ())
