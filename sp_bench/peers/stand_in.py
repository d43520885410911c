"""A stand-in for flash_attn on the CPU kernel of our own methods, so that peers compute with the same kernel.

In a rank that runs a peer, `install` puts this module in flash_attn's place, unless flash_attn is installed. The
interface is the part of flash_attn 2.7 and 2.8 that peers use: no dropout, window, softcap or bias, and the usual scale
1/sqrt(head_dim). A causal mask is aligned to the last key. Unlike flash_attn, it takes float32 and float64.

Shapes: q, out (B, S, H, D), k, v (B, S_k, kv_heads, D), lse (B, H, S). Packed ("varlen"): (tokens, H, D), lse (H,
tokens), sequence i from row cu_seqlens[i] to cu_seqlens[i + 1].
"""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sp_bench.kernels import KERNELS, fold_
from sp_bench.plan.regions import RegionKind

__version__ = "2.8.0"
"""The version of flash_attn that this interface has. Peers branch on it."""

KERNEL = KERNELS["aten_cpu"]()


def install() -> None:
    """Make `import flash_attn` find this module in this process, unless the package itself is installed."""
    if importlib.util.find_spec("flash_attn") is None:
        module = sys.modules[__name__]
        sys.modules |= {"flash_attn": module, "flash_attn.flash_attn_interface": module}


# flash_attn's signatures: peers pass arguments by position and by name, and look up names and defaults.


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """Return (out, lse, None, None); the last two would serve dropout."""
    _refuse_options(q, dropout_p, softmax_scale, (window_size_left, window_size_right), softcap, alibi_slopes)
    return (*_forward(q, k, v, causal), None, None)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients to dq, dk and dv."""
    _refuse_options(q, dropout_p, softmax_scale, (window_size_left, window_size_right), softcap, alibi_slopes)
    for into, grad in zip((dq, dk, dv), _backward(dout, q, k, v, out, softmax_lse, causal), strict=True):
        into.copy_(grad)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """Return (out, lse, None, None) of packed sequences, computed one after the other."""
    _refuse_options(q, dropout_p, softmax_scale, (window_size_left, window_size_right), softcap, alibi_slopes)
    parts = [
        _forward(q[None, rows], k[None, columns], v[None, columns], causal)
        for rows, columns in _sequences(cu_seqlens_q, cu_seqlens_k)
    ]
    out = torch.cat([part_out[0] for part_out, _ in parts])
    return out, torch.cat([part_lse[0] for _, part_lse in parts], dim=1), None, None


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients of packed sequences to dq, dk and dv."""
    _refuse_options(q, dropout_p, softmax_scale, (window_size_left, window_size_right), softcap, alibi_slopes)
    for rows, columns in _sequences(cu_seqlens_q, cu_seqlens_k):
        part_dout, part_q, part_out = (x[None, rows] for x in (dout, q, out))
        part_lse = softmax_lse[None, :, rows]
        grads = _backward(part_dout, part_q, k[None, columns], v[None, columns], part_out, part_lse, causal)
        for into, index, grad in zip((dq, dk, dv), (rows, columns, columns), grads, strict=True):
            into[index] = grad[0]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Return out, differentiable."""
    _refuse_options(q, dropout_p, softmax_scale, window_size, softcap, alibi_slopes)
    return _FlashAttn.apply(q, k, v, causal)  # pyright: ignore[reportReturnType]


class _FlashAttn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out, lse = _forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares no types
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*_backward(grad_outputs[0], q, k, v, out, lse, ctx.causal), None)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse). Our kernels need as many keys as queries under a causal mask. Earlier keys are a full block."""
    before, own = _parts(q, k, causal)
    out, lse = KERNEL.forward(q, k[:, own], v[:, own], RegionKind.CAUSAL if causal else RegionKind.FULL)
    if before.stop:
        accumulated = out.to(lse.dtype)
        fold_(accumulated, lse, *KERNEL.forward(q, k[:, before], v[:, before], RegionKind.FULL))
        out = accumulated.to(q.dtype)
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), from the out and lse over all keys that the queries see, on any rank."""
    before, own = _parts(q, k, causal)
    lse = lse.contiguous()
    mask = RegionKind.CAUSAL if causal else RegionKind.FULL
    dq, dk, dv = KERNEL.backward(dout, q, k[:, own], v[:, own], out, lse, mask)
    if before.stop:
        dq_before, dk_before, dv_before = KERNEL.backward(
            dout, q, k[:, before], v[:, before], out, lse, RegionKind.FULL
        )
        dq = (dq.to(lse.dtype) + dq_before).to(q.dtype)
        dk, dv = torch.cat((dk_before, dk), dim=1), torch.cat((dv_before, dv), dim=1)
    return dq, dk, dv


def _parts(q: Tensor, k: Tensor, causal: bool) -> tuple[slice, slice]:
    """The keys that all queries see, and the keys under the causal mask."""
    surplus = k.shape[1] - q.shape[1] if causal else 0
    if surplus < 0:
        raise ValueError(f"{q.shape[1]} queries and {k.shape[1]} keys under a causal mask")
    return slice(0, surplus), slice(surplus, k.shape[1])


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """The rows of each packed sequence in the queries and in the keys."""
    ends = list(zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True))
    return [(slice(q0, q1), slice(k0, k1)) for (q0, k0), (q1, k1) in zip(ends, ends[1:], strict=False)]


def _refuse_options(
    q: Tensor, dropout_p: float, softmax_scale: float | None, window_size: tuple[int, int], softcap: float,
    alibi_slopes: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for anything but plain exact attention."""
    usual = softmax_scale is None or math.isclose(softmax_scale, q.shape[-1] ** -0.5)
    if dropout_p or softcap or alibi_slopes is not None or tuple(window_size) != (-1, -1) or not usual:
        raise ValueError("this stand-in for flash_attn does plain exact attention only")
