"""Shard a full tensor by a layout, and gather it again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.plan.layout import Layout, Shards


def positions(layout: Layout, rank: int, n: int, seqlen: int, history: int = 0) -> Tensor:
    """Return the global ids of the tokens that `rank` owns, in its local order: (S,) int64.

    The first `history` of the seqlen tokens are assigned on their own. Raises RequestError if there are too few tokens
    for n ranks of this layout.
    """
    shards = Shards.of(layout, n, seqlen, history)
    shards.refuse()
    return owned(shards, rank)


def owned(shards: Shards, rank: int) -> Tensor:
    """Return the global ids of the tokens that `rank` owns, in its local order: (S,) int64."""
    runs = shards.positions(rank)
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(r.start, r.stop, r.step) for r in runs)])


def shard(x_BSHD: Tensor, layout: Layout, rank: int, n: int, history: int = 0) -> Tensor:
    """Return this rank's shard, contiguous: (B, seqlen, H, D) -> (B, S, H, D), S = seqlen / n or nearly."""
    index = positions(layout, rank, n, x_BSHD.shape[1], history).to(x_BSHD.device)
    return x_BSHD.index_select(1, index)


def unshard(x_BSHD: Tensor, layout: Layout, group: dist.ProcessGroup | None, n: int, history: int = 0) -> Tensor:
    """All-gather the full tensor on every rank: (B, S, H, D) -> (B, seqlen, H, D). Not differentiable."""
    parts = _parts(x_BSHD.detach().contiguous(), group, n)
    return _whole(parts, Shards.of(layout, n, sum(part.shape[1] for part in parts), history))


def gathered(x_BSHD: Tensor, shards: Shards, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather the full tensor of some shards on every rank: (B, S, H, D) -> (B, seqlen, H, D)."""
    return _whole(_parts(x_BSHD.detach().contiguous(), group, shards.n), shards)


def _parts(local: Tensor, group: dist.ProcessGroup | None, n: int) -> list[Tensor]:
    """The shards of all ranks."""
    if n == 1:
        return [local]
    count = torch.tensor([local.shape[1]], device=local.device)
    counts = [torch.empty_like(count) for _ in range(n)]
    dist.all_gather(counts, count, group=group)
    tokens = [int(x) for x in counts]
    # all_gather needs shards of equal size.
    padded = local.new_zeros((local.shape[0], max(tokens), *local.shape[2:]))
    padded[:, : local.shape[1]] = local
    parts = [torch.empty_like(padded) for _ in range(n)]
    dist.all_gather(parts, padded, group=group)
    return [part[:, :size] for part, size in zip(parts, tokens, strict=True)]


def _whole(parts: list[Tensor], shards: Shards) -> Tensor:
    """Assemble the full tensor from the shards of all ranks."""
    full = parts[0].new_empty((parts[0].shape[0], shards.seqlen, *parts[0].shape[2:]))
    for rank, part in enumerate(parts):
        full[:, owned(shards, rank).to(full.device)] = part
    return full
