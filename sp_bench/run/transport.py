"""How tensors get from rank to rank, and the count of what was sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

FIELDS_PER_LANE = 8
"""Message tags: a lane has this many, one for each tensor of a chunk."""


@dataclass
class GlooTransport:
    """Point-to-point messages of torch.distributed, one message for each tensor, matched by lane and order."""

    group: dist.ProcessGroup | None
    """None is the default group."""
    sent_bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Bytes handed to the network, by (lane, tensor, field)."""

    def receive(self, lane: int, source: int, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Post the receives of one chunk."""
        tag = lane * FIELDS_PER_LANE
        works = [dist.irecv(x, group=self.group, group_src=source, tag=tag + i) for i, x in enumerate(tensors)]
        return [_posted(work) for work in works]

    def send(
        self, lane: int, target: int, tensors: Sequence[Tensor], counted_as: Sequence[tuple[str, str, str]]
    ) -> list[dist.Work]:
        """Post the sends of one chunk and count what each tensor really weighs."""
        tag = lane * FIELDS_PER_LANE
        for tensor, key in zip(tensors, counted_as, strict=True):
            self.sent_bytes[key] += tensor.numel() * tensor.element_size()
        works = [dist.isend(x, group=self.group, group_dst=target, tag=tag + i) for i, x in enumerate(tensors)]
        return [_posted(work) for work in works]


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work
