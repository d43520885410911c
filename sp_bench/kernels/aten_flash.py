"""The FlashAttention-2 that torch has for GPUs, called below scaled_dot_product_attention since that drops the lse."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_bench.kernels.contract import VarlenKernel, heads_first
from sp_bench.kernels.cuda import CudaKernel, no_state, unit_stride
from sp_bench.kernels.pieces import Ends

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_VARLEN_FORWARD = torch.ops.aten._flash_attention_forward.default
_VARLEN_BACKWARD = torch.ops.aten._flash_attention_backward.default


class AtenFlash(CudaKernel, VarlenKernel):
    """PyTorch's FlashAttention-2. Tensors are passed as (B, H, S, D) views, so that nothing is copied.

    torch.use_deterministic_algorithms selects its deterministic backward.
    """

    name = "aten_flash"
    published_as = "flash_attn"

    @classmethod
    def most_head_dim(cls, capability: tuple[int, int]) -> int:
        # torch refuses gradients between 192 and 224 there (sdp_utils.cpp), for want of shared memory.
        return 192 if capability in ((8, 6), (8, 9)) or capability[0] == 12 else 256

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _FORWARD(heads_first(q), heads_first(k), heads_first(v), 0.0, causal)
        return out.transpose(1, 2), lse.contiguous()

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (heads_first(x) for x in (dout, q, k, v, out))
        # No cumulative lengths: all sequences are whole.
        state = no_state(q.device, (2,), torch.uint64)
        dq, dk, dv = _BACKWARD(
            *tensors, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal, state, state
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def _forward_varlen(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
        tensors = (unit_stride(x) for x in (q, k, v))
        out, lse, *_ = _VARLEN_FORWARD(*tensors, *ends[:4], 0.0, ends.causal, False)
        return out, lse

    def _backward_varlen(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Ends
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (unit_stride(x) for x in (dout, q, k, v, out))
        state = no_state(q.device, (2,), torch.uint64)
        return _VARLEN_BACKWARD(*tensors, lse, *ends[:4], 0.0, ends.causal, state, state)
