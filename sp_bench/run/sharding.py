"""Shard a full tensor by a layout, and gather it again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.plan.layout import Layout


def positions(layout: Layout, rank: int, n: int, seqlen: int) -> Tensor:
    """Return the global ids of the tokens that `rank` owns, in its local order: (S,) int64.

    Raises RequestError if the sequence has too few tokens for n ranks of this layout.
    """
    layout.refuse(n, seqlen)
    runs = layout.positions(rank, n, seqlen)
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(r.start, r.stop, r.step) for r in runs)])


def shard(x_BSHD: Tensor, layout: Layout, rank: int, n: int) -> Tensor:
    """Return this rank's shard, contiguous: (B, seqlen, H, D) -> (B, S, H, D), S = seqlen / n or nearly."""
    index = positions(layout, rank, n, x_BSHD.shape[1]).to(x_BSHD.device)
    return x_BSHD.index_select(1, index)


def unshard(x_BSHD: Tensor, layout: Layout, group: dist.ProcessGroup | None, n: int) -> Tensor:
    """All-gather the full tensor on every rank: (B, S, H, D) -> (B, seqlen, H, D). Not differentiable."""
    local = x_BSHD.detach().contiguous()
    if n == 1:
        return _whole([local], layout)
    count = torch.tensor([local.shape[1]], device=local.device)
    counts = [torch.empty_like(count) for _ in range(n)]
    dist.all_gather(counts, count, group=group)
    tokens = [int(x) for x in counts]
    # all_gather needs shards of equal size.
    padded = local.new_zeros((local.shape[0], max(tokens), *local.shape[2:]))
    padded[:, : local.shape[1]] = local
    parts = [torch.empty_like(padded) for _ in range(n)]
    dist.all_gather(parts, padded, group=group)
    return _whole([part[:, :size] for part, size in zip(parts, tokens, strict=True)], layout)


def _whole(parts: list[Tensor], layout: Layout) -> Tensor:
    """Assemble the full tensor from the shards of all ranks."""
    n, seqlen = len(parts), sum(part.shape[1] for part in parts)
    full = parts[0].new_empty((parts[0].shape[0], seqlen, *parts[0].shape[2:]))
    for rank, part in enumerate(parts):
        full[:, positions(layout, rank, n, seqlen).to(full.device)] = part
    return full
