"""cuDNN's fused attention through torch. It builds a plan for each new shape, so every block shape needs a warm-up."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_bench.kernels.contract import heads_first
from sp_bench.kernels.cuda import CudaKernel, deterministic, no_state
from sp_bench.kernels.reference import Reference

_FORWARD = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_ONE_KEY = Reference()
"""The reference kernel computes blocks of a single key, which cuDNN refuses and only tests have."""
LEAST_VERSION = 90000
LEAST_TORCH = (2, 9)
"""Older versions of torch return the lse as (B, H, S)."""
WIDE_VERSION = 91000
"""The first cuDNN version that supports head_dim up to 256 on Hopper (torch, sdp_utils.cpp)."""


class Cudnn(CudaKernel):
    """cuDNN's fused attention. Tensors are passed as (B, H, S, D) views; its lse is (B, H, S, 1)."""

    name = "cudnn"

    @classmethod
    def most_head_dim(cls, capability: tuple[int, int]) -> int:
        return 256 if capability == (9, 0) and (torch.backends.cudnn.version() or 0) >= WIDE_VERSION else 128

    @classmethod
    def _refuses_software(cls) -> str:
        version = torch.backends.cudnn.version()
        if version is None or version < LEAST_VERSION:
            return f"it needs cuDNN 9, and torch has {version or 'none'}"
        if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH:
            return f"it needs torch {LEAST_TORCH[0]}.{LEAST_TORCH[1]}, and this is {torch.__version__}"
        if deterministic():
            return "its backward is not deterministic, which torch.use_deterministic_algorithms asks for"
        return ""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        if k.shape[1] == 1:
            return _ONE_KEY._forward(q, k, v, causal)
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
        out, lse, *_ = _FORWARD(q, k, v, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal)
        return out.transpose(1, 2), lse.squeeze(3).contiguous()

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if k.shape[1] == 1:
            return _ONE_KEY._backward(dout, q, k, v, out, lse, causal)
        state = no_state(q.device, (), torch.int64)
        dq, dk, dv = _BACKWARD(
            *(heads_first(x) for x in (dout, q, k, v, out)),
            logsumexp=lse.contiguous().unsqueeze(3),
            philox_seed=state,
            philox_offset=state,
            attn_bias=None,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.shape[1],
            max_k=k.shape[1],
            dropout_p=0.0,
            is_causal=causal,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
