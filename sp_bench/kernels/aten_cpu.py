"""PyTorch's own flash attention for CPUs, called below scaled_dot_product_attention since that drops the lse."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_bench.kernels.contract import PagedKernel, heads_first
from sp_bench.kernels.entries import Entries, merged

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

SMALLEST_PAGE = 64
"""Pages of fewer tokens are copied: a result for each would have more bytes than its keys, or take longer to merge."""


class AtenCpu(PagedKernel):
    """PyTorch's CPU flash attention. Tensors are passed as (B, H, S, D) views, so that nothing is copied."""

    name = "aten_cpu"

    @classmethod
    def takes_pages(cls, page: int) -> bool:
        return page >= SMALLEST_PAGE

    def forward_pages(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
        """A part for each page, whose results are merged: pages that lie together are entries of one batch."""
        parts = []
        for places, count, of_entries in entries.runs:
            pool = slice(places.start, places.stop)
            parts.append(self._forward(q[of_entries], k[pool, :count], v[pool, :count], False))
        entry = torch.cat([of_entries for _, _, of_entries in entries.runs])
        out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
        return merged(out, lse, entry, len(entries))

    @classmethod
    def refuses(cls, device: str, dtype: str, head_dim: int) -> str:
        return "" if device == "cpu" else f"it runs on cpu only, not on {device}"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = _FORWARD(*(heads_first(x) for x in (q, k, v)), 0.0, causal)
        # The lse is a view of a (B, S, H) tensor. It stays one, as folds are fastest on that.
        return out.transpose(1, 2), lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (heads_first(x) for x in (dout, q, k, v, out))
        dq, dk, dv = _BACKWARD(*tensors, lse, 0.0, causal)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
