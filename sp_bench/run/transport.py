"""Transports: how tensors get from rank to rank, and how many bytes were sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from sp_bench.lower import ALONE, GLOO, STAGED, TransportKind
from sp_bench.lower.early import by_messages
from sp_bench.plan.groups import UP, Exchange, Group
from sp_bench.plan.ops import Collective, Plan, Transfer
from sp_bench.run.groups import own_group, timeout_of

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # their names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

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


@dataclass(frozen=True)
class Turn:
    """Identifies the transfer that a message belongs to."""

    lane: int
    """Number of the lane."""
    number: int
    """Number of the transfer, unique in an execution."""
    group: Group | Exchange | None = None
    """The ranks among which the plan moves data in it."""
    landing: tuple[Tensor, ...] = field(default=(), compare=False)
    """This rank's buffers for what it brings, whole. Those of the peers are at the same places of their memory."""


Message = tuple[int, Sequence[Tensor]]
"""(the peer's rank in the group, the contiguous tensors of one chunk)."""
Members = tuple[int, ...]
"""Ranks in the transport's group, ascending."""
Key = tuple[str, str, str]
"""(lane, tensor, field): the key under which sent bytes are counted."""
NextTransfer = Callable[[], tuple[Turn, Message, Message] | None]
"""Returns (turn, receive, send) of the lane's next transfer; None while that waits for other streams."""

_BROKEN: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def byte_keys(op: Transfer) -> list[Key]:
    """The keys of the bytes of a transfer, one for each field of what it sends."""
    return [(op.lane, op.tensor.name, field.name) for field in op.tensor.fields]


class Call(NamedTuple):
    """One collective of the library: an operation on each pair of tensors, one pair for each field of a chunk."""

    kind: Literal["all_gather", "reduce_scatter", "all_to_all"]
    group: Group
    """The ranks that take part; members are numbered by rank (Group.digit)."""
    received: Sequence[Tensor]
    """Contiguous. all_gather: (members, ...); reduce_scatter: one member's; all_to_all: the members' pieces."""
    sent: Sequence[Tensor]
    """Contiguous. all_gather: one member's; reduce_scatter, all_to_all: the members' pieces."""
    splits: Sequence[tuple[list[int], list[int]]] = ()
    """all_to_all: for each pair, elements (received from, sent to) each member; empty where all are equal."""


@dataclass
class Transport(ABC):
    """Point-to-point messages, matched by lane, number of the tensor and order; and the library's collectives."""

    kind: ClassVar[TransportKind]
    """The transport kind that plans must be lowered for."""
    group: dist.ProcessGroup | None
    """The process group; None for a single rank, which sends nothing."""
    sent_bytes: Counter[Key] = field(default_factory=Counter)
    """Bytes handed to the network, by (lane, tensor, field)."""

    @abstractmethod
    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        """Send and receive all messages of one transfer concurrently.

        Returns when they have completed or, on a GPU, once the current stream waits for them. `counted_as` has one
        key for each tensor of a message.
        """

    def bind(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> Callable[[], None]:
        """`exchange` of tensors that are the same each time, with all that can be worked out once."""
        return partial(self.exchange, turn, receives, sends, counted_as)

    def bind_send(
        self, turn: Turn, receives: Sequence[Message], target: int, counted_as: Sequence[Key]
    ) -> Callable[[Sequence[Tensor]], None]:
        """`bind`, where what is sent to one rank differs each time."""
        return lambda tensors: self.exchange(turn, receives, [(target, tensors)], counted_as)

    def start(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> Sequence[dist.Work]:
        """Start what `exchange` does, and return what is still to be waited for: here nothing."""
        self.exchange(turn, receives, sends, counted_as)
        return ()

    def exchange_pipelined(
        self, turn: Turn, receive: Message, send: Message, counted_as: Sequence[Key], next_transfer: NextTransfer
    ) -> None:
        """Exchange one message each way; a transport that pipelines starts the lane's next transfer meanwhile, tensor
        by tensor as tensors complete. Others leave it to its own exchange.
        """
        self.exchange(turn, [receive], [send], counted_as)

    def prepost(self, turn: Turn, receives: Sequence[Message]) -> None:  # noqa: B027  # `exchange` posts what isn't
        """Post the receives of a transfer before its `exchange`, where the transport can.

        A lane calls it in the order of its transfers. Receives that are already posted are left alone.
        """

    def prepare(self, plans: Iterable[Plan]) -> None:  # noqa: B027  # most transports need nothing
        """Make the groups for the collectives of plans. All ranks call it before the first execution."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer that chunks are received into or sent from. All ranks make the same ones in the same order."""
        return torch.empty(shape, dtype=dtype, device=device)

    @property
    def makes_memory(self) -> bool:
        """Whether buffers must come from `empty`; else they may lie in any memory of the device."""
        return False

    @property
    def communicators(self) -> tuple[str, ...]:
        """NCCL's communicators that it uses, in words."""
        return ()

    @property
    def outside_bytes(self) -> int:
        """Bytes of a GPU that `empty` has made outside of torch's allocator."""
        return 0

    @property
    def crosses_nodes(self) -> bool:
        """Whether NCCL carries something between nodes."""
        return False

    def allocated(self) -> None:  # noqa: B027  # most transports need nothing
        """Take note that the buffers of a plan have been made."""

    @abstractmethod
    def collective(self, turn: Turn, call: Call) -> None:
        """Perform one collective; returns as `exchange` does. The caller counts its bytes."""

    def count(self, tensors: Sequence[Tensor], counted_as: Sequence[Key]) -> None:
        """Add each tensor's actual size in bytes to `sent_bytes`."""
        for tensor, key in zip(tensors, counted_as, strict=True):
            self.sent_bytes[key] += tensor.numel() * tensor.element_size()

    def give_up(self, why: str) -> None:
        """Mark the group as unusable: the next execution could receive messages still in flight as its own."""
        give_up(self.group, why)

    def interrupt(self) -> None:  # noqa: B027  # what waits on a GPU can't be interrupted
        """Make all that waits for messages, on any thread, raise RuntimeError. The group can't be used any more."""

    def check(self) -> None:
        """Raise RuntimeError if an execution on this group failed before."""
        refuse_broken(self.group)


def give_up(group: dist.ProcessGroup | None, why: str) -> None:
    """Mark a group as unusable."""
    if group is not None:
        _BROKEN.setdefault(group, why)


def refuse_broken(group: dist.ProcessGroup | None) -> None:
    """Raise RuntimeError if an execution on this group failed before."""
    if group is not None and (why := _BROKEN.get(group)) is not None:
        raise RuntimeError(f"this process group can't be used any more, an execution on it failed: {why}")


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
        for lane, group in collective_groups(plans) if self.group is not None else ():
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
                    _posted(dist.irecv(torch.empty(1), group=group, group_src=source, tag=NEVER_SENT)).wait(SOON)

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
        return _posted(dist.irecv(x, group=self.group, group_src=source, tag=self._tag(lane, number)))

    def _send(self, lane: int, target: int, number: int, x: Tensor) -> dist.Work:
        return _posted(dist.isend(x, group=self.group, group_dst=target, tag=self._tag(lane, number)))

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


@dataclass
class AloneTransport(Transport):
    """Transport of a rank executed without peers: it receives copies of what it sends, cut or padded to size."""

    kind = ALONE
    group: dist.ProcessGroup | None = None

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        for _, tensors in sends:
            self.count(tensors, counted_as)
        for i, (_, ours) in enumerate(receives):
            theirs = sends[i][1] if i < len(sends) else [x.new_zeros(0) for x in ours]
            for into, tensor in zip(ours, theirs, strict=True):
                # Peers may send another number of rows than this rank does.
                into, tensor = into.view(-1), tensor.view(-1)
                both = min(into.numel(), tensor.numel())
                into[:both].copy_(tensor[:both])
                into[both:].zero_()

    def collective(self, turn: Turn, call: Call) -> None:
        for into, x in zip(call.received, call.sent, strict=True):
            flat, repeated = into.view(-1), x.reshape(-1)
            if call.kind == "all_gather":
                flat.copy_(repeated.repeat(flat.numel() // max(repeated.numel(), 1)))
            else:  # what comes from others is like what goes to them
                flat.copy_(repeated.repeat(-(-flat.numel() // max(repeated.numel(), 1)))[: flat.numel()])


def collective_groups(plans: Iterable[Plan]) -> list[tuple[int, Group]]:
    """(number of the lane, group) of the library's collectives, in the order of first use, upward groups only."""
    groups: dict[tuple[int, Group], None] = {}
    for plan in plans:
        for op in plan.ops:
            if isinstance(op, Collective) and not by_messages(op) and op.group.size > 1:
                groups[plan.lanes.index(op.lane), op.group._replace(way=UP)] = None
    return list(groups)


def members_of(group: Group, rank: int) -> Members:
    """The ranks of this rank's group, ascending."""
    first = int(group.first(rank))
    return tuple(first + group.offset(digit) for digit in range(group.size))


def begin(call: Call, group: dist.ProcessGroup, *, coalesce: bool = False) -> list[Any]:
    """Start a collective on a process group of its members; what is to be waited for.

    `coalesce`: one kernel for all fields of a dtype.
    """
    pairs = list(zip(call.received, call.sent, strict=True))
    if call.kind == "all_to_all":
        splits = call.splits or [(None, None)] * len(pairs)
        return [
            _posted(dist.all_to_all_single(into, x, received, sent, group=group, async_op=True))
            for (into, x), (received, sent) in zip(pairs, splits, strict=True)
        ]
    start = all_gather_single if call.kind == "all_gather" else reduce_scatter_single
    flat = [(into.view(-1), x.view(-1)) for into, x in pairs]
    if not coalesce:
        return [_posted(start(*pair, group=group, async_op=True)) for pair in flat]
    works = []
    for dtype in dict.fromkeys(x.dtype for _, x in flat):
        with c10d._coalescing_manager(group, async_ops=True) as together:
            for pair in flat:
                if pair[1].dtype == dtype:
                    start(*pair, group=group)
        works.append(together)
    return works


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work
