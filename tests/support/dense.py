"""Attention by its definition, in fp64 with a dense mask, and the tensors to hold kernels against it.

Shape legend: B batch, S tokens, H heads, K kv_heads, D head_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sp_bench.plan.regions import RegionKind

BATCH, HEADS, HEAD_DIM = 2, 4, 16

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative L2 error of one block."""

LSE_TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-4, torch.float16: 2e-4}
"""Absolute: what comes in is exact, and scores are summed in fp32."""


class Block(NamedTuple):
    """The operands of one block."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Answers(NamedTuple):
    """Output and gradients in fp64."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def block_of(
    queries: int,
    keys: int,
    kv_heads: int = HEADS,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
    head_dim: int = HEAD_DIM,
    v_head_dim: int | None = None,
) -> Block:
    """Unit normal operands, the same on every device."""
    source = torch.Generator().manual_seed(seed)
    narrow = v_head_dim or head_dim
    shapes = (queries, HEADS, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, narrow), (queries, HEADS, narrow)
    draw = (torch.randn(BATCH, *shape, generator=source, dtype=torch.float64) for shape in shapes)
    return Block(*(x.to(device, dtype) for x in draw))


def attention(block: Block, mask: RegionKind) -> Answers:
    """softmax(q k^T / sqrt(D)) v and its gradients; rows without a key are out = 0, lse = -inf, and add nothing."""
    q, k, v = (x.detach().double().requires_grad_() for x in block[:3])
    k_BSHD, v_BSHD = (x.repeat_interleave(HEADS // x.shape[2], dim=2) for x in (k, v))
    scores_BHST = torch.einsum("bshd,bthd->bhst", q, k_BSHD) / math.sqrt(q.shape[3])
    query, key = (torch.arange(x.shape[1], device=x.device) for x in (q, k))
    query, key = query[:, None], key[None, :]
    hidden = {
        RegionKind.FULL: key < 0,
        RegionKind.CAUSAL: key > query,
        RegionKind.STRICT: key >= query,
        RegionKind.UPPER: key < query,
    }[mask].expand(scores_BHST.shape)
    weights = scores_BHST.exp().masked_fill(hidden, 0)
    total_BHS = weights.sum(dim=3)
    shares = weights / total_BHS.clamp(min=1e-300)[..., None]
    out = torch.einsum("bhst,bthd->bshd", shares, v_BSHD)
    gradients = torch.autograd.grad(out, (q, k, v), block.dout.double())
    return Answers(out.detach(), total_BHS.log().detach(), *gradients)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """L2, in relation to the reference, or to unit elements where that is rounding noise."""
    norm = float(wanted.norm())
    floor = math.sqrt(max(1, wanted.numel()))
    return float((got.double() - wanted).norm()) / (norm if norm > 1e-10 * floor else floor)
