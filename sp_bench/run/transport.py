"""How tensors get from rank to rank, and the count of what was sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.lower import ALONE, GLOO, STAGED, TransportKind

FIRST_TAG = 7_000
"""Message tags start here, out of the way of the caller's own messages on the same group."""
FIELDS_PER_LANE = 8
"""A lane has this many tags, one for each tensor of a chunk."""


class Turn(NamedTuple):
    """Which transfer of an execution a message belongs to."""

    lane: int
    """The lane's number."""
    number: int
    """The transfer's, which no other one of the execution has."""


Message = tuple[int, Sequence[Tensor]]
"""The peer's rank in the group, and the tensors of one chunk, which are contiguous."""
Key = tuple[str, str, str]
"""(lane, tensor, field), by which bytes are counted."""
NextTransfer = Callable[[], tuple[Turn, Message, Message] | None]
"""Returns a lane's next transfer, what it receives and what it sends; None while it still waits for other streams."""

_BROKEN: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


@dataclass
class Transport(ABC):
    """Point-to-point messages, matched by lane, number of the tensor and order."""

    kind: ClassVar[TransportKind]
    """What plans must be lowered to."""
    group: dist.ProcessGroup | None
    """None where there is one rank and nothing to send."""
    sent_bytes: Counter[Key] = field(default_factory=Counter)
    """Bytes handed to the network, by (lane, tensor, field)."""

    @abstractmethod
    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        """All messages of one transfer, at once. Its lane uses the tensors only after that.

        Returns when they have come and gone or, on a device, once the current stream waits for that. Each tensor of a
        message is counted under one of the keys, in their order.
        """

    def exchange_pipelined(
        self, turn: Turn, receive: Message, send: Message, counted_as: Sequence[Key], next_transfer: NextTransfer
    ) -> None:
        """An exchange beside which the lane's next transfer begins: with each tensor, once its predecessor has come and
        gone. Only where `kind.pipelines`.
        """
        raise NotImplementedError(self.kind.name)

    def prepost(self, turn: Turn, receives: Sequence[Message]) -> None:
        """Pre-post the receives of a transfer, ahead of its `exchange`. Only where `kind.preposts`.

        A lane does so in the order of its transfers. Receives that are posted already stay as they are.
        """
        raise NotImplementedError(self.kind.name)

    def count(self, tensors: Sequence[Tensor], counted_as: Sequence[Key]) -> None:
        """Add up what each tensor really weighs."""
        for tensor, key in zip(tensors, counted_as, strict=True):
            self.sent_bytes[key] += tensor.numel() * tensor.element_size()

    def give_up(self, why: str) -> None:
        """Refuse the group from now on: messages may be under way that the next execution would take for its own."""
        if self.group is not None:
            _BROKEN.setdefault(self.group, why)

    def check(self) -> None:
        """Raise RuntimeError if an execution on this group failed before."""
        if self.group is not None and (why := _BROKEN.get(self.group)) is not None:
            raise RuntimeError(f"this process group can't be used any more, an execution on it failed: {why}")


@dataclass
class GlooTransport(Transport):
    """Between CPUs, by one message of torch.distributed for each tensor."""

    kind = GLOO

    _ahead: dict[tuple[bool, Turn, int, int], dist.Work] = field(init=False, repr=False, default_factory=dict)
    """What was posted ahead of its exchange: (whether it is sent, turn, peer, tensor's number in the chunk). Of a
    failed execution it stays: what is late may still come."""

    def prepost(self, turn: Turn, receives: Sequence[Message]) -> None:
        for source, tensors in receives:
            for i, x in enumerate(tensors):
                self._prepost(turn, source, i, x)

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        works = [work for source, tensors in receives for work in self.receive(turn, source, tensors)]
        works += [work for target, tensors in sends for work in self.send(turn, target, tensors, counted_as)]
        for work in works:
            work.wait()

    def exchange_pipelined(
        self, turn: Turn, receive: Message, send: Message, counted_as: Sequence[Key], next_transfer: NextTransfer
    ) -> None:
        """The link isn't idle until a thread has woken that waits for the last tensor: milliseconds on busy cores.

        Before its predecessor has gone, a tensor would be received over it.
        """
        received, sent = self.receive(turn, *receive), self.send(turn, *send, counted_as)
        for i, (came, gone) in enumerate(zip(received, sent, strict=True)):
            came.wait()
            gone.wait()
            if then := next_transfer():
                after, (source, into), (target, outgoing) = then
                if i < len(into):  # the next transfer may be of another tensor, of fewer fields
                    self._prepost(after, source, i, into[i])
                    self._ahead[True, after, target, i] = self._send(after.lane, target, i, outgoing[i])

    def receive(self, turn: Turn, source: int, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Post the receives of one chunk, but for what was posted ahead."""
        ahead = [self._ahead.pop((False, turn, source, i), None) for i in range(len(tensors))]
        return [ahead[i] or self._receive(turn.lane, source, i, x) for i, x in enumerate(tensors)]

    def send(self, turn: Turn, target: int, tensors: Sequence[Tensor], counted_as: Sequence[Key]) -> list[dist.Work]:
        """The same for its sends, and count them all."""
        self.count(tensors, counted_as)
        ahead = [self._ahead.pop((True, turn, target, i), None) for i in range(len(tensors))]
        return [ahead[i] or self._send(turn.lane, target, i, x) for i, x in enumerate(tensors)]

    def _prepost(self, turn: Turn, source: int, number: int, x: Tensor) -> None:
        if (False, turn, source, number) not in self._ahead:
            self._ahead[False, turn, source, number] = self._receive(turn.lane, source, number, x)

    def _receive(self, lane: int, source: int, number: int, x: Tensor) -> dist.Work:
        return _posted(dist.irecv(x, group=self.group, group_src=source, tag=_tag(lane, number)))

    def _send(self, lane: int, target: int, number: int, x: Tensor) -> dist.Work:
        return _posted(dist.isend(x, group=self.group, group_dst=target, tag=_tag(lane, number)))


@dataclass
class HostTransport(Transport):
    """Between GPUs, or ranks that share one, through the memory of their hosts by gloo. It keeps the caller waiting.

    Nothing is received ahead: what came would have to be copied to the device, which is for `exchange`.
    """

    kind = STAGED

    def __post_init__(self) -> None:
        self._between_hosts = GlooTransport(self.group, self.sent_bytes)

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        outgoing = [(target, [x.cpu() for x in tensors]) for target, tensors in sends]
        incoming = [(source, [torch.empty_like(x, device="cpu") for x in tensors]) for source, tensors in receives]
        self._between_hosts.exchange(turn, incoming, outgoing, counted_as)
        for (_, theirs), (_, ours) in zip(incoming, receives, strict=True):
            for tensor, into in zip(theirs, ours, strict=True):
                into.copy_(tensor)


@dataclass
class AloneTransport(Transport):
    """For one rank without its peers: it receives copies of what it sends, as large as what would have come."""

    kind = ALONE
    group: dist.ProcessGroup | None = None

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        for _, tensors in sends:
            self.count(tensors, counted_as)
        for (_, ours), (_, theirs) in zip(receives, sends, strict=True):
            for into, tensor in zip(ours, theirs, strict=True):
                # Peers may send another part of a chunk than this rank does.
                into, tensor = into.view(-1), tensor.view(-1)
                both = min(into.numel(), tensor.numel())
                into[:both].copy_(tensor[:both])
                into[both:].zero_()


def _tag(lane: int, number: int) -> int:
    return FIRST_TAG + lane * FIELDS_PER_LANE + number


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work
