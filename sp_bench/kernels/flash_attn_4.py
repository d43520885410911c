"""FlashAttention-4, in CuTe DSL, for Hopper and Blackwell. It compiles on first use.

The interface is that of flash-attn-4 4.0 (a beta), which torch 2.13 uses in its own prototype.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.kernels.contract import VarlenKernel
from sp_bench.kernels.cuda import CudaKernel, deterministic, unit_stride
from sp_bench.kernels.pieces import Ends

CALLED_WITH: Mapping[str, tuple[str, ...]] = {
    "_flash_attn_fwd": (
        "softmax_scale", "causal", "return_lse", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
    ),
    "_flash_attn_bwd": ("softmax_scale", "causal", "cu_seqlens_q", "cu_seqlens_k", "deterministic"),
}  # fmt: skip
"""The functions that are called, and the arguments that they are given by name."""


class FlashAttn4(CudaKernel, VarlenKernel):
    """FlashAttention-4. Its tensors are (B, S, H, D), as in the contract."""

    name = "flash_attn_4"
    majors = (9, 10, 11, 12)
    persistent_on = (10, 11)
    narrow = frozenset({(192, 128)})
    package = "flash_attn.cute.interface"
    packages: ClassVar[Mapping[str, str]] = {"flash_attn.cute": "flash-attn-4"}
    install = "pip install --pre flash-attn-4"

    @classmethod
    def most_head_dim(cls, capability: tuple[int, int]) -> int:
        # Blackwell supports 256 too, but nothing between 128 and 256.
        return 256 if capability[0] == 9 else 128

    @classmethod
    def module(cls) -> Any:
        """The package. Raises RequestError if it can't be imported, or is another release than this calls.

        flash-attn 2.8 brings an old flash_attn/cute, in the place of that of flash-attn-4.
        """
        module = super().module()
        for name, wanted in CALLED_WITH.items():
            function = getattr(module, name, None)
            taken = inspect.signature(function).parameters if callable(function) else {}
            if lacking := [argument for argument in wanted if argument not in taken]:
                rule = f"is of another release: {name} takes no {', '.join(lacking)} (flash-attn 2.8 brings an old one)"
                raise RequestError(f"import {cls.package}", rule, f"{cls.install}, after flash-attn, would replace it")
        return module

    @classmethod
    def refuses_deterministic(cls, capability: tuple[int, int], head_dim: int) -> str:
        return "its backward is not deterministic on GPUs of compute capability 12.x" if capability[0] == 12 else ""

    def takes_varlen(self, head_dim: int) -> bool:
        # 4.0.0b36 rounds accumulators of gradients up to 32 elements a row, and reads those of variable lengths
        # elsewhere: on an H100 head_dim=16 got wrong gradients but for the first piece, 64 and 128 right ones.
        return super().takes_varlen(head_dim) and head_dim % 32 == 0

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, **lengths: Any) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.functions._flash_attn_fwd(
            *(unit_stride(x) for x in (q, k, v)),
            softmax_scale=1 / math.sqrt(q.shape[-1]),
            causal=causal,
            return_lse=True,
            **lengths,
        )
        return out, lse.contiguous()

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, **lengths: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv, *_ = self.functions._flash_attn_bwd(
            *(unit_stride(x) for x in (q, k, v, out, dout)),
            lse.contiguous(),
            softmax_scale=1 / math.sqrt(q.shape[-1]),
            causal=causal,
            deterministic=deterministic(),
            **lengths,
        )
        return dq, dk, dv

    def _forward_varlen(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, ends.causal, **ends.named)

    def _backward_varlen(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Ends
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._backward(dout, q, k, v, out, lse, ends.causal, cu_seqlens_q=ends.q, cu_seqlens_k=ends.kv)
