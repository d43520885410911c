"""The reference kernel: textbook attention in fp64, on any device. It is slow; tests compare other kernels with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sp_bench.kernels.contract import BlockKernel, empty_output
from sp_bench.kernels.fold import fold_unfused_
from sp_bench.kernels.row_sums import statistics_dtype
from sp_bench.plan.mask import Mask


class Reference(BlockKernel):
    """softmax(q k^T / sqrt(D)) v and its gradients, written out in fp64, one (batch, query head) at a time."""

    name = "reference"

    @classmethod
    def refuses(cls, device: str, dtype: str, head_dim: int) -> str:
        return ""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=statistics_dtype(q), device=q.device)
        group = q.shape[2] // k.shape[2]
        for b in range(q.shape[0]):
            for h in range(q.shape[2]):
                scores = _scores(q[b, :, h], k[b, :, h // group], causal)
                lse64 = torch.logsumexp(scores, dim=-1)
                out[b, :, h] = torch.exp(scores - lse64[:, None]) @ v[b, :, h // group].double()
                lse[b, h] = lse64
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, k, v))
        group, scale = q.shape[2] // k.shape[2], 1 / math.sqrt(q.shape[3])
        for b in range(q.shape[0]):
            for h in range(q.shape[2]):
                q64, k64, v64 = (x.double() for x in (q[b, :, h], k[b, :, h // group], v[b, :, h // group]))
                dout64 = dout[b, :, h].double()
                p = torch.exp(_scores(q64, k64, causal) - lse[b, h].double()[:, None])
                delta = (dout64 * out[b, :, h].double()).sum(dim=-1, keepdim=True)
                ds = p * (dout64 @ v64.T - delta) * scale
                dq[b, :, h] = ds @ k64
                dk[b, :, h // group] += ds.T @ q64
                dv[b, :, h // group] += p.T @ dout64
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, sinks: Tensor | None = None) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) in fp64 of a whole sequence; all tensors are BSHD, with tokens in order of position.

    With `sinks`, (H,), whose values are 0, also their gradient.
    """
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    kernel, everything = Reference(), (range(q.shape[1]),)
    windows = [
        (slice(r.q.start, r.q.stop), slice(r.kv.start, r.kv.stop), r.kind) for r in mask.regions(everything, everything)
    ]
    out, lse = empty_output(dout)
    for rows, columns, kind in windows:
        part = kernel.forward(q[:, rows], k[:, columns], v[:, columns], kind)
        fold_unfused_(out[:, rows], lse[:, :, rows], *part)
    if sinks is not None:
        lse, of_keys = torch.logaddexp(lse, sinks.double()[:, None]), lse
        out *= torch.exp(of_keys - lse).transpose(1, 2)[..., None]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, columns, kind in windows:
        inputs = dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows]
        for gradient, part in zip(
            (dq[:, rows], dk[:, columns], dv[:, columns]), kernel.gradients(*inputs, kind), strict=True
        ):
            gradient += part
    if sinks is None:
        return out, dq, dk, dv
    weights = torch.exp(sinks.double()[:, None] - lse)
    return out, dq, dk, dv, -(weights * (out * dout).sum(3).transpose(1, 2)).sum((0, 2))


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scaled scores, (queries, keys), in fp64; -inf where masked."""
    scores = q.double() @ k.double().T / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape, dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(hidden, -math.inf)
    return scores
