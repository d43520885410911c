"""Transports by gloo: between CPU ranks, and between GPUs by way of host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.lower import GLOO, STAGED
from sp_bench.lower.early import by_messages
from sp_bench.plan.groups import UP, Group
from sp_bench.plan.ops import Collective, Plan
from sp_bench.run.groups import own_group, timeout_of
from sp_bench.run.transport import (
    Call,
    Key,
    Members,
    Message,
    NextTransfer,
    Transport,
    Turn,
    begin,
    members_of,
    posted,
)

FIRST_TAG = 7_000
"""First message tag, chosen to avoid the tags of the caller's own messages on the same group."""
FIELDS_PER_LANE = 8
"""Tags reserved per lane, one for each tensor of a chunk."""
TAGS = 64 * FIELDS_PER_LANE
"""Tags reserved per transport."""
MOST_SERIES = 2**20
NEVER_SENT = FIRST_TAG - 1
"""The tag of a receive that ends by its timeout."""
SOON = timedelta(milliseconds=1)


@dataclass
class GlooTransport(Transport):
    """CPU transport: one torch.distributed message per tensor."""

    kind = GLOO
    series: int = 0
    """Messages of transports with different numbers never match: ranks that run different plans wait, and get nothing
    of the wrong shape."""

    _ahead: dict[tuple[bool, Turn, int, int], dist.Work] = field(init=False, repr=False, default_factory=dict)
    """Operations posted before their exchange, by (is a send, turn, peer, tensor's number in the chunk). Those of a
    failed execution are kept: a late message may still arrive."""
    _groups: dict[tuple[int, Members], dist.ProcessGroup] = field(init=False, repr=False, default_factory=dict)
    """By lane and members, as lanes run their collectives in any order."""

    def prepare(self, plans: Iterable[Plan]) -> None:
        for lane, group in _collective_groups(plans) if self.group is not None else ():
            assert self.group is not None
            members, timeout = members_of(group, dist.get_rank(self.group)), timeout_of(self.group)
            self._groups[lane, members] = own_group(
                self.group, members, f"lane {lane}", backend="gloo", timeout=timeout
            )

    def collective(self, turn: Turn, call: Call) -> None:
        assert self.group is not None
        group = self._groups[turn.lane, members_of(call.group, dist.get_rank(self.group))]
        for work in begin(call, group):
            work.wait()

    def interrupt(self) -> None:
        assert self.group is not None
        for group in (self.group, *self._groups.values()):
            for other in range(1, dist.get_world_size(group)):
                source = (dist.get_rank(group) + other) % dist.get_world_size(group)
                with suppress(RuntimeError):  # where a wait times out gloo closes all connections of the group
                    posted(dist.irecv(torch.empty(1), group=group, group_src=source, tag=NEVER_SENT)).wait(SOON)

    def prepost(self, turn: Turn, receives: Sequence[Message]) -> None:
        for source, tensors in receives:
            for i, x in enumerate(tensors):
                self._prepost(turn, source, i, x)

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        for work in self.start(turn, receives, sends, counted_as):
            work.wait()

    def start(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> list[dist.Work]:
        works = [work for source, tensors in receives for work in self.receive(turn, source, tensors)]
        return works + [work for target, tensors in sends for work in self.send(turn, target, tensors, counted_as)]

    def exchange_pipelined(
        self, turn: Turn, receive: Message, send: Message, counted_as: Sequence[Key], next_transfer: NextTransfer
    ) -> None:
        """Start each tensor of the next transfer as soon as its predecessor has been received and sent.

        Otherwise the link would idle until the thread that waits for the last tensor wakes, which takes milliseconds
        on busy cores. Starting earlier would overwrite a predecessor that is still being sent.
        """
        received, sent = self.receive(turn, *receive), self.send(turn, *send, counted_as)
        for i, (came, gone) in enumerate(zip(received, sent, strict=True)):
            came.wait()
            gone.wait()
            if then := next_transfer():
                after, (source, into), (target, outgoing) = then
                if i < len(into):  # the next transfer may carry another chunk type with fewer fields
                    self._prepost(after, source, i, into[i])
                    self._ahead[True, after, target, i] = self._send(after.lane, target, i, outgoing[i])

    def receive(self, turn: Turn, source: int, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Return the receives of one chunk, posting those that are not yet posted."""
        ahead = [self._ahead.pop((False, turn, source, i), None) for i in range(len(tensors))]
        return [ahead[i] or self._receive(turn.lane, source, i, x) for i, x in enumerate(tensors)]

    def send(self, turn: Turn, target: int, tensors: Sequence[Tensor], counted_as: Sequence[Key]) -> list[dist.Work]:
        """Return the sends of one chunk, posting those that are not yet posted, and count their bytes."""
        self.count(tensors, counted_as)
        ahead = [self._ahead.pop((True, turn, target, i), None) for i in range(len(tensors))]
        return [ahead[i] or self._send(turn.lane, target, i, x) for i, x in enumerate(tensors)]

    def _prepost(self, turn: Turn, source: int, number: int, x: Tensor) -> None:
        if (False, turn, source, number) not in self._ahead:
            self._ahead[False, turn, source, number] = self._receive(turn.lane, source, number, x)

    def _receive(self, lane: int, source: int, number: int, x: Tensor) -> dist.Work:
        return posted(dist.irecv(x, group=self.group, group_src=source, tag=self._tag(lane, number)))

    def _send(self, lane: int, target: int, number: int, x: Tensor) -> dist.Work:
        return posted(dist.isend(x, group=self.group, group_dst=target, tag=self._tag(lane, number)))

    def _tag(self, lane: int, number: int) -> int:
        return FIRST_TAG + self.series % MOST_SERIES * TAGS + lane * FIELDS_PER_LANE + number


def gloo_transport(group: dist.ProcessGroup | None, *_: object) -> GlooTransport:
    """The transport of CPU ranks."""
    return GlooTransport(group)


@dataclass
class HostTransport(Transport):
    """GPU transport staged through host memory, by gloo; it blocks the caller. Ranks may share a GPU.

    It doesn't pre-post: only `exchange` copies received data to the GPU.
    """

    kind = STAGED

    series: int = 0

    def __post_init__(self) -> None:
        self._between_hosts = GlooTransport(self.group, self.sent_bytes, self.series)

    def interrupt(self) -> None:
        self._between_hosts.interrupt()

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        outgoing = [(target, [x.cpu() for x in tensors]) for target, tensors in sends]
        incoming = [(source, [torch.empty_like(x, device="cpu") for x in tensors]) for source, tensors in receives]
        self._between_hosts.exchange(turn, incoming, outgoing, counted_as)
        for (_, theirs), (_, ours) in zip(incoming, receives, strict=True):
            for tensor, into in zip(theirs, ours, strict=True):
                into.copy_(tensor)

    def prepare(self, plans: Iterable[Plan]) -> None:
        self._between_hosts.prepare(plans)

    def collective(self, turn: Turn, call: Call) -> None:
        received = [torch.empty_like(x, device="cpu") for x in call.received]
        sent = [x.cpu() for x in call.sent]
        self._between_hosts.collective(turn, call._replace(received=received, sent=sent))
        for x, into in zip(received, call.received, strict=True):
            into.copy_(x)


def _collective_groups(plans: Iterable[Plan]) -> list[tuple[int, Group]]:
    """(number of the lane, group) of the library's collectives, in the order of first use, upward groups only."""
    groups: dict[tuple[int, Group], None] = {}
    for plan in plans:
        for op in plan.ops:
            if isinstance(op, Collective) and not by_messages(op) and op.group.size > 1:
                groups[plan.lanes.index(op.lane), op.group._replace(way=UP)] = None
    return list(groups)
