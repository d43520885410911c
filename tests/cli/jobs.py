"""Jobs of ranks in these tests. Imported inside the ranks: no pytest."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def needs_much(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """An attention that on rank 1 asks for 1 GiB where little is left, while the others wait for it."""
    if dist.get_rank(group) == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
        torch.empty(2**30, dtype=torch.uint8)
    dist.barrier(group)
    return q
