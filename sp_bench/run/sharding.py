"""Deal a full tensor out by a layout and gather it again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.plan import Layout


def positions(layout: Layout, rank: int, n: int, seqlen: int) -> Tensor:
    """The global ids of the tokens that `rank` owns, in its local order: (seqlen / n,) int64.

    Raises RequestError where the layout can't deal `seqlen` tokens out over n ranks.
    """
    layout.refuse(n, seqlen)
    return torch.cat([torch.arange(r.start, r.stop, r.step) for r in layout.positions(rank, n, seqlen)])


def shard(x_BSHD: Tensor, layout: Layout, rank: int, n: int) -> Tensor:
    """This rank's tokens of a full tensor: (B, S, H, D) -> (B, S / n, H, D), contiguous."""
    index = positions(layout, rank, n, x_BSHD.shape[1]).to(x_BSHD.device)
    return x_BSHD.index_select(1, index)


def unshard(x_BSHD: Tensor, layout: Layout, group: dist.ProcessGroup | None, n: int) -> Tensor:
    """The full tensor from every rank's part, on every rank: (B, S / n, H, D) -> (B, S, H, D). Not differentiable."""
    local = x_BSHD.detach().contiguous()
    parts = [torch.empty_like(local) for _ in range(n)]
    if n == 1:
        parts = [local]
    else:
        dist.all_gather(parts, local, group=group)
    seqlen = local.shape[1] * n
    full = local.new_empty((local.shape[0], seqlen, *local.shape[2:]))
    for rank, part in enumerate(parts):
        full[:, positions(layout, rank, n, seqlen).to(full.device)] = part
    return full
