"""FlashAttention-2 from its own package (Dao 2023), called through the functions that return the lse.

The interface is that of flash_attn 2.7 and 2.8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from sp_bench.kernels.contract import PagedKernel, VarlenKernel
from sp_bench.kernels.cuda import CudaKernel, beneath, deterministic, unit_stride
from sp_bench.kernels.entries import Entries
from sp_bench.kernels.pieces import Ends

PAGES_OF = 256
"""Its pages have a multiple of so many tokens (csrc/flash_attn/flash_api.cpp, mha_fwd_kvcache)."""
PLAIN: Mapping[str, Any] = {
    "dropout_p": 0.0, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None,
}  # fmt: skip
"""The arguments for nothing beside the mask: a window of (-1, -1) is none."""


class FlashAttn(CudaKernel, VarlenKernel, PagedKernel):
    """FlashAttention-2. Its tensors are (B, S, H, D), as in the contract."""

    name = "flash_attn"
    package = "flash_attn.flash_attn_interface"
    packages: ClassVar[Mapping[str, str]] = {"flash_attn": "flash-attn"}
    install = "pip install flash-attn --no-build-isolation"

    @classmethod
    def takes_pages(cls, page: int) -> bool:
        return page % PAGES_OF == 0

    def forward_pages(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
        """Its kernel for caches, which it cuts into as many parts as keep the GPU busy; one if all is deterministic."""
        out, lse = self.functions.flash_attn_with_kvcache(
            unit_stride(q),
            unit_stride(k),
            unit_stride(v),
            cache_seqlens=entries.counts,
            block_table=entries.table,
            softmax_scale=1 / math.sqrt(q.shape[3]),
            causal=False,
            num_splits=1 if deterministic() else 0,
            return_softmax_lse=True,
        )
        return out, lse.contiguous()

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, name: str = "_flash_attn_forward", **varlen: Any
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = beneath(getattr(self.functions, name))(
            *(unit_stride(x) for x in (q, k, v)),
            softmax_scale=1 / math.sqrt(q.shape[-1]),
            causal=causal,
            return_softmax=False,
            **PLAIN,
            **varlen,
        )
        return out, lse.contiguous()

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        name: str = "_flash_attn_backward",
        **varlen: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (unit_stride(x) for x in (dout, q, k, v, out))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        beneath(getattr(self.functions, name))(
            *(dout, q, k, v, out, lse.contiguous(), dq, dk, dv),  # the lse is read through its pointer
            softmax_scale=1 / math.sqrt(q.shape[-1]),
            causal=causal,
            deterministic=deterministic(),
            **PLAIN,
            **varlen,
        )
        return dq, dk, dv

    def _forward_varlen(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, ends.causal, "_flash_attn_varlen_forward", **ends.named)

    def _backward_varlen(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Ends
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._backward(dout, q, k, v, out, lse, ends.causal, "_flash_attn_varlen_backward", **ends.named)
