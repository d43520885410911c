"""FlashAttention-3, for Hopper (Shah et al. 2024), called through the operators that its package registers.

torch's own prototype calls them, too: the package's Python functions change more often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.kernels.contract import PagedKernel, VarlenKernel
from sp_bench.kernels.cuda import CudaKernel, deterministic, unit_stride
from sp_bench.kernels.entries import ABSORBED, Entries
from sp_bench.kernels.pieces import Ends


class FlashAttn3(CudaKernel, VarlenKernel, PagedKernel):
    """FlashAttention-3. Its tensors are (B, S, H, D), as in the contract.

    num_splits is 1, as the order of sums over more splits of the keys would depend on the load; of decode steps, which
    would keep few SMs busy, it is as many as its package finds best. Its kernels have one CTA for each SM but the last
    `sm_margin`, from start to end.
    """

    name = "flash_attn_3"
    majors = (9,)
    persistent_on = (9,)
    has_margin = True
    package = "flash_attn_interface"
    packages: ClassVar[Mapping[str, str]] = {"flash_attn_interface": "flash-attn-3", "flash_attn_3": "flash-attn-3"}
    install = "python setup.py install in hopper/ of github.com/Dao-AILab/flash-attention"
    narrow = frozenset({ABSORBED})

    @classmethod
    def module(cls) -> Any:
        """The package's operators. Raises RequestError if it can't be imported, or lacks operators with defaults."""
        super().module()
        ops = torch.ops.flash_attn_3
        # Operators of older releases have no default arguments.
        if not all(hasattr(ops, name) and _has_defaults(getattr(ops, name)) for name in ("fwd", "bwd")):
            rule = "has no operators flash_attn_3::fwd and bwd, or an older release's"
            raise RequestError(f"import {cls.package}", rule, f"{cls.install} would install it")
        return ops

    @classmethod
    def refuses_deterministic(cls, capability: tuple[int, int], head_dim: int) -> str:
        return f"its deterministic backward takes a head_dim of at most 192, not {head_dim}" if head_dim > 192 else ""

    @classmethod
    def refuses_caches(cls, device: str, dtype: str, head_dim: int, value_dim: int) -> str:
        """Latent keys are computed in two parts (`_operands`), of which the first is as wide as values."""
        return cls.refuses(device, dtype, value_dim // 2 if (head_dim, value_dim) == ABSORBED else head_dim)

    @classmethod
    def takes_pages(cls, page: int) -> bool:
        """True: they may have any number of tokens."""
        return True

    @property
    def _splits(self) -> int:
        """Splits of the keys; 0 for as many as its package chooses."""
        return 0 if self.decodes and not deterministic() else 1

    def _operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """(q, k, v) and further tensors. Of latent keys, k are the last elements, at most 64, and the first, at least
        256, are v, which the operator multiplies with q_v (mha_fwd in hopper/flash_api.cpp).
        """
        if (k.shape[-1], v.shape[-1]) != ABSORBED:
            return tuple(unit_stride(x) for x in (q, k, v)), {}
        width, q = v.shape[-1], unit_stride(q)
        return (q[..., width:], unit_stride(k)[..., width:], unit_stride(v)), {"q_v": q[..., :width]}

    def forward_pages(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, False, seqused_k=entries.counts, page_table=entries.table)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, **lengths: Any) -> tuple[Tensor, Tensor]:
        operands, more = self._operands(q, k, v)
        out, lse, *_ = self.functions.fwd.default(
            *operands,
            **more,
            softmax_scale=1 / math.sqrt(q.shape[-1]),
            is_causal=causal,
            num_splits=self._splits,
            sm_margin=self.sm_margin,
            **lengths,
        )
        return out, lse.contiguous()

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, **lengths: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (unit_stride(x) for x in (dout, q, k, v, out))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self.functions.bwd.default(
            *(dout, q, k, v, out, lse.contiguous()),
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=1 / math.sqrt(q.shape[-1]),
            is_causal=causal,
            deterministic=deterministic(),
            sm_margin=self.sm_margin,
            **lengths,
        )
        return dq, dk, dv

    def _forward_varlen(self, q: Tensor, k: Tensor, v: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, ends.causal, **ends.named)

    def _backward_varlen(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Ends
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._backward(dout, q, k, v, out, lse, ends.causal, **ends.named)


def _has_defaults(operator: Any) -> bool:
    """Whether all arguments but tensors have defaults."""
    arguments = operator.default._schema.arguments
    return all(x.has_default_value() or str(x.type) == "Tensor" for x in arguments)
