"""The part of O that a backward needs: rowsum(dO * O), one number a row, and an O that has these row sums.

A block's gradients depend on O by delta = rowsum(dO * O) alone (FlashAttention-2, Dao 2023, algorithm 2). Kernels take
O and sum it up themselves. Any O with the same row sums gives them the same gradients, and the shortest one is the
projection of O on dO, delta / |dO|^2 * dO, no row of which is longer than that of O. Rounding it to dO's dtype changes
delta by at most that dtype's precision times delta: all terms of dO * O have one sign.

Shapes: out_BSHD and dout_BSHD are (batch, tokens, heads, head_dim), delta_BHS is (batch, heads, tokens).
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(out_BSHD: Tensor, dout_BSHD: Tensor) -> Tensor:
    """delta_BHS = rowsum(dO * O), contiguous, in fp32 (fp64 where O is fp64)."""
    exact = statistics_dtype(out_BSHD)
    return (out_BSHD.to(exact) * dout_BSHD.to(exact)).sum(-1).transpose(1, 2).contiguous()


def projection(dout_BSHD: Tensor, delta_BHS: Tensor) -> Tensor:
    """The O with these row sums that is shortest, (B, S, H, D) in dO's dtype; 0 where dO is 0."""
    dout = dout_BSHD.to(statistics_dtype(dout_BSHD))
    # Of gradients as small as 1e-20 the square is 0 in fp32.
    largest = dout.abs().amax(-1, keepdim=True)
    direction = dout / torch.where(largest > 0, largest, 1.0)
    length2 = direction.square().sum(-1, keepdim=True) * largest
    scale = torch.where(largest > 0, delta_BHS.transpose(1, 2).unsqueeze(-1) / length2, 0.0)
    return (scale * direction).to(dout_BSHD.dtype)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype of one number a row of a tensor: fp32 (fp64 where it is fp64)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
