"""Keys and values of a block, made of latents once for all of its kernel calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sp_bench.kernels import BlockKernel
from sp_bench.kernels.contract import Kind
from sp_bench.run.latents import Expanding
from sp_bench.run.partials import Rows, Tensors, add_rows, tokens_of

Call = tuple[Rows, Kind]
"""The key rows of a kernel call of a block, and its kind."""


def is_one_making(calls: Sequence[Call]) -> bool:
    """Whether each key row is in a single call of the block, and there once."""
    if len(calls) != 1:
        return False
    rows = calls[0][0]
    return isinstance(rows, range) or rows.unique().numel() == rows.numel()


class Together:
    """The keys of a block's calls: rows that any of them sees are made once, and each call takes its own of these."""

    def __init__(self, expanding: Expanding, calls: Sequence[Call], device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is that of the sums of gradients."""
        self.kernel: BlockKernel = expanding.kernel
        """Computes the calls, given keys and values."""
        self.rows: Rows = _union([rows for rows, _ in calls], device)
        """The rows that are made, ascending."""
        self._expanding, self._dtype = expanding, dtype
        self._of_calls = [_within(rows, self.rows) for rows, _ in calls]

    def made(self, c: Tensor) -> Tensors:
        """(k_BSHD, v_BSHV) of latents c_BS1W of `rows`."""
        return self._expanding.made(c)

    def take(self, call: int) -> Callable[[Tensors], Tensors]:
        """A function that takes the rows of a call out of what was made."""
        rows = self._of_calls[call]
        return lambda made: tuple([tokens_of(x, rows) for x in made])

    def sums(self, made: Tensors) -> Tensors:
        """Zeros for the gradients of what was made."""
        return tuple([torch.zeros_like(x, dtype=self._dtype) for x in made])

    def add(self, sums: Tensors, call: int, gradients: Tensors) -> None:
        """Add a call's (dk, dv) to the sums."""
        add_rows(sums, self._of_calls[call], gradients)

    def gradients(self, c: Tensor, sums: Tensors) -> Tensor:
        """The gradient of latents c_BS1W of `rows` by those of all that was made; the matrices' are added to theirs."""
        dk, dv = (x.to(c.dtype) for x in sums)
        return self._expanding.gradient_of_latents(c, dk, dv)


def _union(each: Sequence[Rows], device: torch.device) -> Rows:
    """All rows of some calls: a run if they are neighbours."""
    rows = torch.cat([_indices(rows, device) for rows in each]).unique()
    first, last = int(rows[0]), int(rows[-1])
    return range(first, last + 1) if rows.numel() == last + 1 - first else rows


def _within(rows: Rows, union: Rows) -> Rows:
    """Rows as places among the rows of a union."""
    if isinstance(union, range):
        return (
            range(rows.start - union.start, rows.stop - union.start) if isinstance(rows, range) else rows - union.start
        )
    return torch.searchsorted(union, _indices(rows, union.device))


def _indices(rows: Rows, device: torch.device) -> Tensor:
    return torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, range) else rows
