"""torch's templated ring attention as a differentiable function. Import it inside ranks only: it imports torch."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel

from sp_bench.kernels import KERNELS, BlockKernel
from sp_bench.plan.regions import RegionKind

TOKENS_DIM = 2


class TorchRing(torch.autograd.Function):
    """Ring attention of q, k, v, out (B, S, H, D) on the ranks of a group.

    `rotate` is the name of one of torch's rotate methods, `kernel` that of a block kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, rotate: str, group: dist.ProcessGroup, kernel: str
    ) -> Tensor:
        _choose(causal, rotate)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = context_parallel._templated_ring_attention(
            group, TOKENS_DIM, partial(_forward_block, _kernel(kernel)), q, k, v, is_causal=causal
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.rotate, ctx.group, ctx.kernel = causal, rotate, group, kernel
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares no types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        _choose(ctx.causal, ctx.rotate)
        dout = grad_outputs[0].transpose(1, 2)
        dq, dk, dv = context_parallel._templated_ring_attention_backward(
            ctx.group,
            TOKENS_DIM,
            partial(_backward_block, _kernel(ctx.kernel)),
            dout,
            "grad_out",
            *ctx.saved_tensors,
            is_causal=ctx.causal,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None, None, None, None


def _choose(causal: bool, rotate: str) -> None:
    """Set torch's options, which hold for the whole process. Points of one run may differ in them."""
    options = context_parallel._cp_options
    options.enable_load_balance = causal
    options.rotate_method = context_parallel._RotateMethod[rotate.upper()]


def _forward_block(
    kernel: BlockKernel, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = kernel.forward(q, k, v, _mask(kwargs))
    return out.transpose(1, 2), lse


def _backward_block(
    kernel: BlockKernel, query: Tensor, key: Tensor, value: Tensor, **kwargs: object
) -> tuple[Tensor, Tensor, Tensor]:
    dout, out, lse = (cast(Tensor, kwargs[name]) for name in ("grad_out", "out", "logsumexp"))
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, query, key, value, out))
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, _mask(kwargs))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@cache
def _kernel(name: str) -> BlockKernel:
    return KERNELS[name]()


def _mask(kwargs: dict[str, object]) -> RegionKind:
    return RegionKind.CAUSAL if kwargs["is_causal"] else RegionKind.FULL
