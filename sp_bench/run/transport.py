"""How tensors get from rank to rank, and the count of what was sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

FIRST_TAG = 7_000
"""Message tags start here, out of the way of the caller's own messages on the same group."""
FIELDS_PER_LANE = 8
"""A lane has this many tags, one for each tensor of a chunk."""

_BROKEN: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


@dataclass
class GlooTransport:
    """Point-to-point messages of torch.distributed, one message for each tensor, matched by lane and order."""

    group: dist.ProcessGroup | None
    """None where there is one rank and nothing to send."""
    sent_bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Bytes handed to the network, by (lane, tensor, field)."""

    def receive(self, lane: int, source: int, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Post the receives of one chunk."""
        tag = FIRST_TAG + lane * FIELDS_PER_LANE
        works = [dist.irecv(x, group=self.group, group_src=source, tag=tag + i) for i, x in enumerate(tensors)]
        return [_posted(work) for work in works]

    def send(
        self, lane: int, target: int, tensors: Sequence[Tensor], counted_as: Sequence[tuple[str, str, str]]
    ) -> list[dist.Work]:
        """Post the sends of one chunk and count what each tensor really weighs."""
        tag = FIRST_TAG + lane * FIELDS_PER_LANE
        for tensor, key in zip(tensors, counted_as, strict=True):
            self.sent_bytes[key] += tensor.numel() * tensor.element_size()
        works = [dist.isend(x, group=self.group, group_dst=target, tag=tag + i) for i, x in enumerate(tensors)]
        return [_posted(work) for work in works]

    def give_up(self, why: str) -> None:
        """Refuse the group from now on: messages may be under way that the next execution would take for its own."""
        if self.group is not None:
            _BROKEN.setdefault(self.group, why)

    def check(self) -> None:
        """Raise RuntimeError if an execution on this group failed before."""
        if self.group is not None and (why := _BROKEN.get(self.group)) is not None:
            raise RuntimeError(f"this process group can't be used any more, an execution on it failed: {why}")


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work
