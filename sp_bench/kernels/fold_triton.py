"""The fold as one Triton kernel, which reads and writes everything once. Importing this module imports triton.

A program folds some tokens of one head of one batch entry. The head_dim elements of a row are contiguous, and so are
the statistics of the tokens, as tokens are the last dimension of lse_BHS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096
"""Accumulator elements of one program: 32 for each thread of its four warps."""


@triton.jit
def _fold_kernel(
    out, lse, part_out, part_lse, tokens, head_dim,
    out_b, out_s, out_h, out_d, lse_b, lse_h, lse_s,
    part_b, part_s, part_h, part_d, part_lse_b, part_lse_h, part_lse_s,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    # Offsets in 64 bits: a million tokens of 32 heads of 128 are 2^32 elements.
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    s = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, HEAD_DIM).to(tl.int64)
    rows = s < tokens
    cells = rows[:, None] & (d < head_dim)[None, :]

    lse_at = lse + b * lse_b + h * lse_h + s * lse_s
    held = tl.load(lse_at, mask=rows, other=0.0)
    new = tl.load(part_lse + b * part_lse_b + h * part_lse_h + s * part_lse_s, mask=rows, other=0.0)
    # Like torch.logaddexp: two equal infinities give the same infinity.
    apart = tl.where(held == new, 0.0, -tl.abs(held - new))
    total = tl.maximum(held, new) + tl.log(1.0 + tl.exp(apart))
    weight = tl.where(new == float("-inf"), 0.0, tl.exp(new - total))[:, None]

    out_at = out + b * out_b + h * out_h + s[:, None] * out_s + d[None, :] * out_d
    part_at = part_out + b * part_b + h * part_h + s[:, None] * part_s + d[None, :] * part_d
    x = tl.load(out_at, mask=cells, other=0.0)
    y = tl.load(part_at, mask=cells, other=0.0).to(tl.float32)
    # Like torch.lerp: exactly x at weight 0, exactly y at weight 1.
    merged = tl.where(weight < 0.5, x + weight * (y - x), y - (y - x) * (1.0 - weight))
    tl.store(out_at, merged, mask=cells)
    tl.store(lse_at, total, mask=rows)


def fold_fused_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """`fold_` in one kernel; out, lse and part_lse in fp32, part_out in fp32, bf16 or fp16, any strides.

    The new lse is within 2^-23 and a rounding of torch.logaddexp's. Raises ValueError for other dtypes.
    """
    if {out.dtype, lse.dtype, part_lse.dtype} != {torch.float32}:
        raise ValueError(f"accumulators of {out.dtype}, {lse.dtype}, {part_lse.dtype}: the fused fold is for float32")
    batch, tokens, heads, head_dim = out.shape
    if not out.numel():
        return
    padded = triton.next_power_of_2(head_dim)
    at_once = max(1, ELEMENTS // padded)
    # triton launches on the current device, which may not be the tensors' device.
    with torch.cuda.device_of(out):
        _fold_kernel[triton.cdiv(tokens, at_once), heads, batch](
            out, lse, part_out, part_lse, tokens, head_dim,
            *out.stride(), *lse.stride(), *part_out.stride(), *part_lse.stride(),
            TOKENS=at_once, HEAD_DIM=padded,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
