"""Transfers between GPUs by NCCL, with communicators of its own for each lane, so that lanes don't wait for each other.

A lane has one communicator for each group of ranks among which it moves data. NCCL gives a communicator's peers the
same number of channels, which is that of its worst connection: a ring inside a node would have the few channels of a
NIC if its communicator reached beyond the node. For the same reason messages of a group that reaches beyond a node
have two: one among the ranks of each node, and one of all ranks for what crosses nodes.

NCCL requires all ranks to launch the operations of several communicators in one order. One thread queues them in plan
order (DeviceStreams), which is the same on all ranks. A rank that takes no part in an operation, such as an exchange
with itself, skips it; the order of the others stays. Two communicators may execute in different orders on two ranks.
That can't deadlock as long as the kernels of all communicators fit on the GPU together: a lane takes at
most `lane_ctas` SMs (run.sms), the two of a lane's messages together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.cuda import nccl as library

from sp_bench.lower import DEFAULT_TRANSPORT, NCCL, TransportOptions
from sp_bench.lower.early import by_messages
from sp_bench.machine import boot_id
from sp_bench.plan.groups import Group, is_shared
from sp_bench.plan.ops import Pass, Plan
from sp_bench.run.communicators import Part, lane_communicator
from sp_bench.run.gloo import GlooTransport, HostTransport
from sp_bench.run.groups import gathered
from sp_bench.run.patience import before_use, use_of
from sp_bench.run.registered import Registered
from sp_bench.run.sms import VARIABLE, most_ctas
from sp_bench.run.transport import Call, Key, Members, Message, Transport, Turn, begin, members_of

_IN_WORDS = {Part.WHOLE: "", Part.NEAR: " of a node", Part.FAR: ", between nodes"}


class _End(NamedTuple):
    """The communicator of a rank's messages with a peer."""

    number: int
    """That of the communicator among those of a lane's messages."""
    group: Any
    place: int
    """The peer's rank in it."""


class _Batch(NamedTuple):
    """Messages that one communicator takes at once."""

    group: Any
    ops: list[Callable[[], Any]]
    """Each posts a message on the group's backend, below torch's functions, which work out anew where it goes."""
    uses: set[Hashable]
    coalescing: tuple[Callable[[], Any], Callable[[], Any]] | None
    """(a call that begins, one that ends) an operation of several messages; None if the group takes them one by one, as
    gloo does."""


@dataclass
class NcclTransport(Transport):
    """NCCL transport: each transfer is one batch of messages, or one collective, on a communicator of its lane.

    torch runs it on the communicator's own stream, after the current stream. work.wait() makes the current stream wait
    for it, without blocking the caller.
    """

    kind = NCCL
    communicator: Callable[[int, Members, Part], Any] = field(kw_only=True)
    """Makes the NCCL process group of a lane among some ranks of `group`."""
    nodes: Sequence[Hashable] = field(default=(), kw_only=True)
    """The node of each rank of `group`; empty: all are on one."""
    splits: bool = field(default=True, kw_only=True)
    """Whether messages beyond a node have a communicator of their own."""
    timeout: timedelta | None = field(default=None, kw_only=True)
    """How long a transfer may take, but for the first of a connection; None: as the communicators were made."""
    others: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Ranks with which something else exchanges the messages of a Pass, so that these need no communicator."""
    registered: Registered | None = field(default=None, kw_only=True)
    """The pool in which buffers are allocated, if they are registered with the communicators."""
    _made: dict[tuple[int, Members, Part], Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._posts: WeakValueDictionary[Hashable, Callable[[], Any]] = WeakValueDictionary()
        """The posts of messages, by all that they are made of: those of a buffer that many transfers use are few. Each
        keeps its memory, and is kept by what posts it.
        """
        self._end: Callable[[int, object, int | None], _End] = cache(self._find_end)
        """Members are worked out once for each group, not in each transfer."""

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Connect the lanes' communicators, in the order in which plans use them, which is the same on all ranks."""
        for plan in plans:
            for _, op in plan.transfers:
                if is_shared(op.group):
                    lane, members = plan.lanes.index(op.lane), self._members(op.group)
                    for key in self._parts(lane, members) if by_messages(op) else [(lane, members, Part.WHOLE)]:
                        if not isinstance(op, Pass) or set(key[1]) - self.others - {self._rank}:
                            self._communicator(*key)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.registered and self._made:
            return self.registered.empty(shape, dtype, list(self._made.values()))
        return super().empty(shape, dtype, device)

    @property
    def makes_memory(self) -> bool:
        return self.registered is not None

    def allocated(self) -> None:
        if self.registered:
            self.registered.register(list(self._made.values()))

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        for work in self.start(turn, receives, sends, counted_as):
            work.wait()

    def bind(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> Callable[[], None]:
        batches, counter, timeout = self._batches(turn, receives, sends), self.sent_bytes, self.timeout
        sent = [(key, x.nbytes) for _, tensors in sends for x, key in zip(tensors, counted_as, strict=True)]
        if len(batches) == 1 and (coalescing := batches[0].coalescing):
            (group, posts, uses, _), (begin, end) = batches[0], coalescing
            before = use_of(group, uses, timeout) if timeout is not None else None

            def exchange_at_once() -> None:
                for key, nbytes in sent:
                    counter[key] += nbytes
                if before is not None:
                    before()
                begin()
                for post in posts:
                    post()
                end().wait()

            return exchange_at_once

        def exchange() -> None:
            for key, nbytes in sent:
                counter[key] += nbytes
            for work in self._launched(batches):
                work.wait()

        return exchange

    def bind_send(
        self, turn: Turn, receives: Sequence[Message], target: int, counted_as: Sequence[Key]
    ) -> Callable[[Sequence[torch.Tensor]], None]:
        end, counter, timeout = self._end(turn.lane, turn.group, target), self.sent_bytes, self.timeout
        bound: list[Any] = []

        def bind(tensors: Sequence[torch.Tensor]) -> None:
            """Bind what is the same each time, and let go of the messages of these tensors."""
            batches = self._batches(turn, receives, [(target, tensors)])
            ops = next(batch.ops for batch in batches if ("send", target) in batch.uses)
            del ops[len(ops) - len(tensors) :]
            single = batches[0] if len(batches) == 1 and batches[0].coalescing else None
            bound.extend((batches, ops, len(ops), end.group._get_backend(tensors[0].device).send, single))

        def exchange(tensors: Sequence[torch.Tensor]) -> None:
            if not bound:
                bind(tensors)
            batches, ops, posted, send, single = bound
            for x, key in zip(tensors, counted_as, strict=True):
                counter[key] += x.nbytes
                ops.append(partial(send, [unmarked(_flat(x))], end.place, 0))
            try:
                if single is None:
                    for work in self._launched(batches):
                        work.wait()
                    return
                if timeout is not None:
                    before_use(single.group, single.uses, timeout)
                single.coalescing[0]()
                for post in ops:
                    post()
                single.coalescing[1]().wait()
            finally:
                del ops[posted:]  # they would keep the tensors

        return exchange

    def start(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> list[Any]:
        for _, tensors in sends:
            self.count(tensors, counted_as)
        return self._launched(self._batches(turn, receives, sends))

    def collective(self, turn: Turn, call: Call) -> None:
        group = self._end(turn.lane, call.group, None).group
        if self.timeout is not None:
            before_use(group, {call.kind}, self.timeout)
        received, sent = ([unmarked(_flat(x)) for x in tensors] for tensors in (call.received, call.sent))
        call = call._replace(received=received, sent=sent)
        for work in begin(call, group, coalesce=True):
            work.wait()

    def _batches(self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message]) -> list[_Batch]:
        """The messages of a transfer by communicator. That which takes longest, between nodes, is the first."""
        batches: dict[int, _Batch] = {}
        for operation, messages in (("recv", receives), ("send", sends)):
            for peer, tensors in messages:
                end = self._end(turn.lane, turn.group, peer)
                backend = end.group._get_backend(tensors[0].device)
                if end.number not in batches:
                    batches[end.number] = _Batch(end.group, [], set(), _coalescing(backend))
                batch, post = batches[end.number], getattr(backend, operation)
                batch.uses.add((operation, peer))
                for x in tensors:
                    key = (operation, id(end.group), end.place, x.data_ptr(), x.shape, x.dtype, x.is_contiguous())
                    if (bound := self._posts.get(key)) is None:
                        self._posts[key] = bound = partial(post, [unmarked(_flat(x))], end.place, 0)
                    batch.ops.append(bound)
        # NCCL has no empty batch, which is what a group of one has
        return [batches[number] for number in sorted(batches, reverse=True) if batches[number].ops]

    def _launched(self, batches: Sequence[_Batch]) -> list[Any]:
        """Start each batch as torch.distributed.batch_isend_irecv does."""
        works = []
        for group, ops, uses, coalescing in batches:
            if self.timeout is not None:
                before_use(group, uses, self.timeout)
            if coalescing is None:
                works += [post() for post in ops]
                continue
            coalescing[0]()
            for post in ops:
                post()
            works.append(coalescing[1]())
        return works

    def _find_end(self, lane: int, group: object, peer: int | None) -> _End:
        """Find the communicator of messages with a peer; without one, that of a group's collectives."""
        members = self._members(group)
        parts = self._parts(lane, members) if peer is not None else [(lane, members, Part.WHOLE)]
        number = next(i for i, (_, ranks, _) in enumerate(parts) if peer is None or peer in ranks)
        part = parts[number]
        return _End(number, self._communicator(*part), 0 if peer is None else part[1].index(peer))

    @property
    def communicators(self) -> tuple[str, ...]:
        return tuple(f"lane {lane}: {len(members)} ranks{_IN_WORDS[part]}" for (lane, members, part) in self._made)

    @property
    def crosses_nodes(self) -> bool:
        return any(len({self.nodes[member] for member in members}) > 1 for _, members, _ in self._made if self.nodes)

    @property
    def _rank(self) -> int:
        return dist.get_rank(self.group)

    def _members(self, group: object) -> Members:
        """The ranks of this rank's group; all for pairs of ranks that exchange."""
        if isinstance(group, Group):
            return members_of(group, dist.get_rank(self.group))
        return tuple(range(dist.get_world_size(self.group)))

    def _parts(self, lane: int, members: Members) -> list[tuple[int, Members, Part]]:
        """The communicators of a lane's messages among these ranks. A message takes the first that has its peer."""
        nodes = [self.nodes[member] for member in members] if self.nodes else []
        if not self.splits or not 1 < len(set(nodes)) < len(members):  # on one node, or each on its own
            return [(lane, members, Part.WHOLE)]
        mine = self.nodes[self._rank]
        near = tuple(member for member, node in zip(members, nodes, strict=True) if node == mine)
        return [(lane, near, Part.NEAR)] * (len(near) > 1) + [(lane, members, Part.FAR)]

    def _communicator(self, lane: int, members: Members, part: Part) -> Any:
        key = (lane, members, part)
        if key not in self._made:
            self._made[key] = self.communicator(*key)
        return self._made[key]


def _coalescing(backend: Any) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """(a call that begins, one that ends) an operation of several messages, if the backend takes them as one."""
    return (backend._start_coalescing, backend._end_coalescing) if backend.supports_coalescing else None


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Refuse a non-contiguous tensor: NCCL would send its raw memory, and torch doesn't check."""
    if not x.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} would be sent in the order of its strides {x.stride()}")
    return x


def unmarked(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that isn't the allocator's.

    torch marks what it hands to NCCL as used by NCCL's stream (recordStream). When such memory is freed, its allocator
    gives it out again only once the GPU has got there, though the caller has queued waits for that stream. Meanwhile it
    holds far more than the plan. It doesn't mark memory that came by DLPack. The plan's waits order the uses of it
    (DeviceStreams).
    """
    torchs: Any = torch._C
    return torchs._from_dlpack(torchs._to_dlpack(x.detach() if x.requires_grad else x))


def nccl_transport(
    group: dist.ProcessGroup,
    device: torch.device,
    plans: Mapping[str, Plan],
    timeout: timedelta | None = None,
    lane_ctas: int | None = None,
    options: TransportOptions = DEFAULT_TRANSPORT,
) -> NcclTransport:
    """Return an NcclTransport among the ranks of a group, for plans whose lanes share the GPU.

    A lane takes `lane_ctas` CTAs at most, a power of two; None: its share of the GPU. It is the least of all ranks,
    whose GPUs may differ: NCCL takes the same from all, and the communicators' names hold it. A lane of one CTA, or of
    as many as NCCL_MAX_CTAS says, has one communicator for messages of any reach, as two would take twice as many.
    """
    if lane_ctas is None:
        lanes = max((len(plan.lanes) for plan in plans.values()), default=1)
        lane_ctas = most_ctas(torch.cuda.get_device_properties(device).multi_processor_count, lanes)
    of_ranks = gathered((boot_id(), lane_ctas), group)
    nodes, least = [node for node, _ in of_ranks], min(ctas for _, ctas in of_ranks)
    splits = least > 1 and VARIABLE not in os.environ
    communicator = partial(lane_communicator, group, device, timeout, least, cta_policy=options.cta_policy)
    registered = Registered(device, library.version()) if options.registered_buffers else None
    return NcclTransport(
        group, communicator=communicator, registered=registered, nodes=nodes, splits=splits, timeout=timeout
    )


def transport_for(
    group: dist.ProcessGroup | None,
    device: torch.device,
    plans: Mapping[str, Plan],
    lane_ctas: int | None = None,
    series: int = 0,
) -> Transport:
    """Return the transport for `group` on `device`, ready for the plans. All ranks of the group must call this.

    NCCL if the group has that backend, with `lane_ctas` as in `nccl_transport`; else gloo, with its `series`.
    """
    if group is None or device.type == "cpu":
        transport = GlooTransport(group, series=series)
    elif "nccl" in dist.get_backend_config(group):
        transport = nccl_transport(group, device, plans, lane_ctas=lane_ctas)
    else:
        transport = HostTransport(group, series=series)
    transport.prepare(plans.values())
    return transport
