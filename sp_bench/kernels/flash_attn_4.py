"""FlashAttention-4, in CuTe DSL, for Hopper and Blackwell. It compiles on first use.

The interface is that of flash-attn-4 4.0 (a beta), which torch 2.13 uses in its own prototype.
"""

from __future__ import annotations

import math

from torch import Tensor

from sp_bench.kernels.cuda import CudaKernel, deterministic, unit_stride
from sp_bench.kernels.pieces import Pieces


class FlashAttn4(CudaKernel):
    """FlashAttention-4. Its tensors are (B, S, H, D), as in the contract."""

    name = "flash_attn_4"
    majors = (9, 10, 11, 12)
    varlen = True
    package = "flash_attn.cute.interface"
    install = "pip install --pre flash-attn-4"

    @classmethod
    def most_head_dim(cls, capability: tuple[int, int]) -> int:
        # Blackwell supports 256 too, but nothing between 128 and 256.
        return 256 if capability[0] == 9 else 128

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.module()._flash_attn_fwd(
            *(unit_stride(x) for x in (q, k, v)),
            softmax_scale=1 / math.sqrt(q.shape[3]),
            causal=causal,
            return_lse=True,
        )
        return out, lse.contiguous()

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv, *_ = self.module()._flash_attn_bwd(
            *(unit_stride(x) for x in (q, k, v, out, dout)),
            lse.contiguous(),
            softmax_scale=1 / math.sqrt(q.shape[3]),
            causal=causal,
            deterministic=deterministic(),
        )
        return dq, dk, dv

    def _forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, cu_q: Tensor, cu_kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.module()._flash_attn_fwd(
            *(unit_stride(x) for x in (q, k, v)),
            softmax_scale=1 / math.sqrt(q.shape[2]),
            causal=pieces.causal,
            return_lse=True,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_kv,
            max_seqlen_q=max(pieces.q_lengths),
            max_seqlen_k=max(pieces.kv_lengths),
        )
        return out, lse

    def _backward_varlen(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        pieces: Pieces,
        cu_q: Tensor,
        cu_kv: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv, *_ = self.module()._flash_attn_bwd(
            *(unit_stride(x) for x in (q, k, v, out, dout)),
            lse,
            softmax_scale=1 / math.sqrt(q.shape[2]),
            causal=pieces.causal,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_kv,
            deterministic=deterministic(),
        )
        return dq, dk, dv
