"""Transports: how tensors get from rank to rank, and how many bytes were sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from sp_bench.lower import ALONE, TransportKind
from sp_bench.plan.groups import Exchange, Group
from sp_bench.plan.ops import Plan, Transfer

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # their names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


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
    to_row: int = field(default=0, compare=False)
    """The row of the peer's buffers at which what this rank sends begins."""


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
            posted(dist.all_to_all_single(into, x, received, sent, group=group, async_op=True))
            for (into, x), (received, sent) in zip(pairs, splits, strict=True)
        ]
    start = all_gather_single if call.kind == "all_gather" else reduce_scatter_single
    flat = [(into.view(-1), x.view(-1)) for into, x in pairs]
    if not coalesce:
        return [posted(start(*pair, group=group, async_op=True)) for pair in flat]
    works = []
    for dtype in dict.fromkeys(x.dtype for _, x in flat):
        with c10d._coalescing_manager(group, async_ops=True) as together:
            for pair in flat:
                if pair[1].dtype == dtype:
                    start(*pair, group=group)
        works.append(together)
    return works


def posted(work: dist.Work | None) -> dist.Work:
    """The work of a message or collective that this process takes part in."""
    assert work is not None, "this process is not in the group"
    return work
