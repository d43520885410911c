"""The inside of fakes of GPU kernels: attention in fp64, and checks and quirks that the kernels have in common.

Shapes: q, out (B, S, H, D), k, v (B, T, K, D), lse (B, H, S).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOP_LEFT, BOTTOM_RIGHT = False, True
"""The corner that a causal mask is aligned to."""


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, corner: bool) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, lse (B, H, S) in fp32)."""
    scores = _scores(q, k, scale, causal, corner)
    lse = scores.logsumexp(dim=3)
    out = torch.einsum("bhst,bthd->bshd", torch.exp(scores - lse[..., None]), _spread(v, q))
    return out.to(q.dtype), lse.float()


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool, corner: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, of scores that are exp(score - lse)."""
    p = torch.exp(_scores(q, k, scale, causal, corner) - lse.double()[..., None])
    delta_BSH = (dout.double() * out.double()).sum(dim=3)
    dp = torch.einsum("bshd,bthd->bhst", dout.double(), _spread(v, q))
    ds = p * (dp - delta_BSH.transpose(1, 2)[..., None]) * scale
    dq = torch.einsum("bhst,bthd->bshd", ds, _spread(k, q))
    dk, dv = torch.einsum("bhst,bshd->bthd", ds, q.double()), torch.einsum("bhst,bshd->bthd", p, dout.double())
    dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(dim=3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def forward_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: tuple[int, int], scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """(out (T, H, D), lse (H, T)) of sequences that stand one behind the other."""
    parts = [
        forward(*(x[None] for x in tensors), scale=scale, causal=causal, corner=BOTTOM_RIGHT)
        for tensors in zip(*_sequences((q, cu_q), (k, cu_k), (v, cu_k), longest=longest), strict=True)
    ]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=1)


def backward_varlen(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: tuple[int, int],
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of sequences that stand one behind the other."""
    assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
    given = ((dout, cu_q), (q, cu_q), (k, cu_k), (v, cu_k), (out, cu_q), (lse.T, cu_q))
    parts = [
        backward(*(x[None] for x in tensors), lse=lse.T[None], scale=scale, causal=causal, corner=BOTTOM_RIGHT)
        for *tensors, lse in zip(*_sequences(*given, longest=longest), strict=True)
    ]
    dq, dk, dv = (torch.cat([grad[0] for grad in grads]) for grads in zip(*parts, strict=True))
    return dq, dk, dv


def forward_pages(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, table: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, lse (E, H, S) in fp32) of q (E, S, H, D) over pools (pages, tokens, K, D): a table of pages
    (E, most), of whose tokens so many `counts` are each entry's. Masked values are multiplied by 0."""
    found = []
    for entry, (count, places) in enumerate(zip(counts.tolist(), table.tolist(), strict=True)):
        assert 0 < count <= len(places) * k.shape[1], "it would read beyond the table"
        keys, values = (x[places].flatten(0, 1)[None] for x in (k, v))
        scores = _scores(q[entry][None], keys, scale, causal=False, corner=TOP_LEFT)
        scores[..., count:] = -math.inf
        lse = scores.logsumexp(dim=3)
        out = torch.einsum("bhst,bthd->bshd", torch.exp(scores - lse[..., None]), _spread(values, q[entry][None]))
        found.append((out[0].to(q.dtype), lse[0].float()))
    out, lse = (torch.stack(x) for x in zip(*found, strict=True))
    return out, lse


def _sequences(*given: tuple[Tensor, Tensor], longest: tuple[int, int]) -> list[list[Tensor]]:
    """Each tensor cut at its cumulative lengths: int32, from 0 to all of its tokens."""
    found = []
    for x, cumulative in given:
        assert cumulative.dtype == torch.int32 and cumulative[0] == 0 and cumulative[-1] == x.shape[0]
        assert int(cumulative.diff().max()) in longest
        found.append(x.tensor_split(cumulative[1:-1].tolist()))
    return found


def _spread(x: Tensor, q: Tensor) -> Tensor:
    return x.double().repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, corner: bool) -> Tensor:
    scores = torch.einsum("bshd,bthd->bhst", q.double(), _spread(k, q)) * scale
    queries, keys = scores.shape[2:]
    if causal:
        shift = keys - queries if corner is BOTTOM_RIGHT else 0
        scores.masked_fill_(torch.ones(queries, keys, dtype=torch.bool).triu(1 + shift), -math.inf)
    return scores


def check(*tensors: Tensor) -> None:
    """The inputs that all take: fp16 or bf16, rows that lie together, at least one, a head_dim in steps of 8."""
    for x in tensors:
        assert x.dtype in (torch.float16, torch.bfloat16) and x.dtype == tensors[0].dtype
        assert x.stride(-1) == 1 and x.ndim in (3, 4) and x.numel() > 0 and x.shape[-1] % 8 == 0


def through_pointer(lse: Tensor) -> Tensor:
    """The statistic as a kernel reads it that is given a pointer and takes (B, H, S) to lie there."""
    assert lse.dtype == torch.float32
    batch, heads, tokens = lse.shape[:3]
    return lse.as_strided((batch, heads, tokens), (heads * tokens, tokens, 1))


def minus_inf_as_zero(lse: Tensor) -> Tensor:
    """FlashAttention-3 and 4 take lse = -inf for a row in which everything is masked, and read 0 in its place."""
    return torch.where(lse == -math.inf, 0.0, lse)


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Heads before tokens, or the other way round."""
    return tuple(x.transpose(1, 2) for x in tensors)
