"""A transport that behaves as NCCL does, for tests on CPUs: torch.distributed's part of it, for all ranks in a process.

The suite's own NcclTransport runs on it (`Nccl.on`), over the devices of tests.run.queued, whose work is done later in
an order drawn at random from all that is allowed. What NCCL and ProcessGroupNCCL do to operations:

- each communicator of a rank has one stream, on which its kernels run one after another, each after what the stream
  of the caller had queued before, which then waits for it (work.wait());
- a kernel takes SMs from its start to its end, for messages a power of two of them, and starts once they are free;
- with NCCL_LAUNCH_ORDER_IMPLICIT a kernel starts once the kernel launched before it on that GPU, of whatever
  communicator, has started, even while that still waits for its stream;
- a reduce-scatter rounds the sum to the dtype that is sent at every hop of its ring;
- members of a communicator ask for it by one name, in one order, and each has a GPU of its own;
- dtypes, layouts and sizes that it can't send are refused; where nothing goes on, the watchdog names what hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.lower import TransportOptions
from sp_bench.run import communicators, nccl, transport
from sp_bench.run.nccl import NcclTransport
from tests.run.queued import Batch, Machine, Rank, Stream, Stuck

DTYPES = {torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""ncclDataType_t, of those that this suite could send."""
VERSION = (2, 28, 9)


class Refused(RuntimeError):
    """NCCL, or torch for it, would refuse this, or hang."""


@dataclass(eq=False)
class Kernel(Batch):
    """A kernel of a communicator: one batch of messages, or a collective."""

    what: str
    order: int
    """Its number among the launches on its rank."""
    sms: int
    dtypes: dict[tuple, tuple[torch.dtype, int]] = field(default_factory=dict)
    """By message that is received, what it must be."""
    started: bool = False


@dataclass(eq=False)
class Communicator:
    """A rank's end of a communicator."""

    name: str
    members: tuple[int, ...]
    rank: Rank
    stream: Stream
    most_ctas: int
    launches: _Launches
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    """Messages so far, by (source, target)."""
    batch: list[tuple[bool, int, Tensor]] | None = None
    """Messages that are launched together: (whether it is sent, peer, tensor)."""
    supports_coalescing = True

    def _get_backend(self, device: torch.device) -> Communicator:
        return self

    def _start_coalescing(self) -> None:
        self.batch = []

    def send(self, tensors: list[Tensor], place: int, tag: int) -> None:
        self._post(True, tensors, place)

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> None:
        self._post(False, tensors, place)

    def _post(self, sends: bool, tensors: list[Tensor], place: int) -> None:
        (x,) = tensors
        if self.batch is None:
            raise Refused("messages one by one, of which two ranks may wait for each other")
        self.batch.append((sends, self.members[place], x))

    def _end_coalescing(self) -> _Work:
        messages, self.batch = self.batch, None
        if not messages:
            raise Refused("an empty batch")
        return self.launches._launch(self, "messages", messages, sms=_power_of_two_up(self.most_ctas))

    def key(self, source: int, target: int) -> tuple:
        """The next message of a pair: they are matched by their order."""
        number = self.counts[source, target] = self.counts.get((source, target), -1) + 1
        return (self.name, source, target, number)

    @property
    def me(self) -> int:
        return self.rank.rank


class GpuMachine(Machine):
    """GPUs with so many SMs free for NCCL's kernels."""

    streams_per_rank = 16

    def __init__(self, ranks: int, seed: int, *, sms: int = 132, in_launch_order: bool = True) -> None:
        super().__init__(ranks, seed)
        self._sms, self._in_order = sms, in_launch_order
        self.launched: list[list[Kernel]] = [[] for _ in range(ranks)]
        self.started: list[list[int]] = [[] for _ in range(ranks)]
        """By rank, the numbers of the launches in the order in which they started."""
        self.most_taken = 0
        """The most SMs that kernels took at once on a rank."""
        self.before: list[Callable[[], None]] = []
        """A function that is called before anything is done."""

    def run(self) -> None:
        for call in self.before:
            call()
        super().run()

    def _steps(self, stream: Stream) -> Iterator[Callable[[], None]]:
        head = stream.queue[0]
        if not isinstance(head, Kernel) or head.started:
            yield from super()._steps(stream)
        elif self._may_start(stream, head):
            yield lambda: self._start(stream, head)

    def _may_start(self, stream: Stream, kernel: Kernel) -> bool:
        launched = self.launched[stream.owner.rank]
        in_turn = not self._in_order or not kernel.order or launched[kernel.order - 1].started
        return in_turn and self._taken(stream.owner.rank) + kernel.sms <= self._sms

    def _start(self, stream: Stream, kernel: Kernel) -> None:
        kernel.started = True
        self.started[stream.owner.rank].append(kernel.order)
        self.most_taken = max(self.most_taken, self._taken(stream.owner.rank))

    def _taken(self, rank: int) -> int:
        return sum(k.sms for k in self.launched[rank] if k.started and (k.sends or k.receives))

    def _ready(self, key: tuple) -> bool:
        heads = (stream.queue[0] for stream in self.streams if stream.queue)
        return any(isinstance(head, Kernel) and head.started and key in head.receives for head in heads)

    def _receive(self, stream: Stream, batch: Batch, key: tuple) -> None:
        assert isinstance(batch, Kernel)
        (sent,), _ = self._wire[key]
        if (sent.dtype, sent.numel()) != batch.dtypes[key]:
            raise Refused(f"{key}: {sent.numel()} elements of {sent.dtype} come, {batch.dtypes[key]} is expected")
        super()._receive(stream, batch, key)

    def _stuck(self) -> Stuck:
        """The watchdog's words."""
        hanging = [
            f"rank {rank}: {kernel.what} {'has not ended' if kernel.started else 'was not started'}"
            for rank, kernels in enumerate(self.launched)
            for kernel in kernels
            if kernel.sends or kernel.receives
        ]
        return Stuck(f"the watchdog: {'; '.join(hanging) or super()._stuck()}")


class Nccl:
    """The library in the processes of all ranks of a machine, and the groups that they ask for."""

    def __init__(self, machine: GpuMachine, node_size: int = 0, gpu_of: Callable[[int], int] | None = None) -> None:
        """`node_size`: ranks of a node, 0 for one node of all; `gpu_of`: the GPU of a rank on its node."""
        self._machine, self._node_size = machine, node_size or len(machine.ranks)
        self._gpu_of = gpu_of or (lambda rank: rank % self._node_size)
        self._made: dict[tuple[int, str], Communicator] = {}
        self._asked: dict[tuple[int, ...], dict[int, list[tuple[str, int]]]] = {}
        """By members, what each of them asked for, in order: (name, CTAs)."""

    def transport(self, device: Rank, lane_ctas: int, **options: Any) -> NcclTransport:
        """The suite's transport of a rank. Call it, and use it, within `on`."""
        nodes = [rank // self._node_size for rank in range(len(self._machine.ranks))]
        with patch.object(nccl, "gathered", lambda mine, group: [(node, lane_ctas) for node in nodes]):
            where, world = torch.device("cuda", self._gpu_of(device.rank)), cast(Any, _World())
            return nccl.nccl_transport(world, where, {}, lane_ctas=lane_ctas, options=TransportOptions(**options))

    @contextmanager
    def on(self, device: Rank) -> Iterator[None]:
        """The library as one rank's process has it."""
        n, launches = len(self._machine.ranks), _Launches(self._machine, device)

        class Options:
            def __init__(self, is_high_priority_stream: bool) -> None:
                self.config = SimpleNamespace(max_ctas=32)

        torchs = SimpleNamespace(
            Work=dist.Work,
            get_rank=lambda group: device.rank,
            get_world_size=lambda group: n,
            all_to_all_single=launches.all_to_all,
            ProcessGroupNCCL=SimpleNamespace(Options=Options),
        )
        with ExitStack() as all_of:
            for module in (communicators, nccl, transport):
                all_of.enter_context(patch.object(module, "dist", torchs))
            all_of.enter_context(patch.object(communicators, "own_group", self._group_of(device, launches)))
            all_of.enter_context(patch.object(communicators.library, "version", lambda: VERSION))
            all_of.enter_context(patch.object(transport, "all_gather_single", launches.all_gather))
            all_of.enter_context(patch.object(transport, "reduce_scatter_single", launches.reduce_scatter))
            all_of.enter_context(patch.object(transport.c10d, "_coalescing_manager", launches.coalescing))
            yield

    def refuse_different_groups(self) -> None:
        """Raise Refused unless all members have asked for the same groups of theirs in the same order."""
        for members, asked in self._asked.items():
            if any(asked.get(rank) != asked[next(iter(asked))] for rank in members):
                raise Refused(f"ranks {members} ask for different groups: {asked}")

    def _group_of(self, device: Rank, launches: _Launches) -> Callable[..., Communicator]:
        def own_group(parent: object, members: Sequence[int], purpose: str, **how: Any) -> Communicator:
            name, ranks, ctas = f"{purpose} of {members}", tuple(members), how["options"].config.max_ctas
            if device.rank not in ranks:
                raise Refused(f"rank {device.rank} is not one of {ranks}")
            gpus = [(rank // self._node_size, self._gpu_of(rank)) for rank in ranks]
            if len(set(gpus)) < len(gpus):
                raise Refused(f"Duplicate GPU detected : ranks {ranks} have {gpus}")
            if (device.rank, name) not in self._made:
                self._asked.setdefault(ranks, {}).setdefault(device.rank, []).append((name, ctas))
                stream = self._machine.stream(device)
                self._made[device.rank, name] = Communicator(name, ranks, device, stream, ctas, launches)
            return self._made[device.rank, name]

        return own_group


class _World:
    """The default group of a rank."""

    def __init__(self) -> None:
        """It carries nothing."""


class _Launches:
    """The operations that a rank launches."""

    def __init__(self, machine: GpuMachine, device: Rank) -> None:
        self._machine, self._device = machine, device
        self._together: list[tuple[str, Tensor, Tensor]] | None = None
        """The collectives of a group of calls."""

    def all_to_all(
        self, into: Tensor, x: Tensor, received: list[int] | None, sent: list[int] | None, *, group: Communicator,
        async_op: bool,
    ) -> Any:  # fmt: skip
        size = len(group.members)
        places, pieces = _pieces(into, received or [into.shape[0] // size] * size), _pieces(
            x, sent or [x.shape[0] // size] * size
        )  # fmt: skip
        own = group.members.index(group.me)
        if places[own].numel() != pieces[own].numel():
            raise Refused("a rank's own piece has two sizes")
        messages = [(True, peer, piece) for peer, piece in zip(group.members, pieces, strict=True)]
        messages += [(False, peer, place) for peer, place in zip(group.members, places, strict=True)]
        others = [message for message in messages if message[1] != group.me]
        # NCCL skips pieces without elements in torch's all2all_single_unequal_split
        others = [message for message in others if message[2].numel()]
        work = self._launch(group, "all-to-all", others, sms=_power_of_two_up(group.most_ctas))
        with self._device.on(group.stream):
            places[own].copy_(pieces[own])
        return work.again()

    def all_gather(self, into: Tensor, x: Tensor, group: Communicator, async_op: bool = False) -> Any:
        return self._collective("all-gather", into, x, group)

    def reduce_scatter(self, into: Tensor, x: Tensor, group: Communicator, async_op: bool = False) -> Any:
        return self._collective("reduce-scatter", into, x, group)

    def _collective(self, what: str, into: Tensor, x: Tensor, group: Communicator) -> Any:
        longer, shorter = (into, x) if what == "all-gather" else (x, into)
        if longer.numel() != shorter.numel() * len(group.members) or into.dtype != x.dtype:
            raise Refused(f"{what} of {x.numel()} elements of {x.dtype} into {into.numel()} of {into.dtype}")
        if self._together is None:
            return self._collectives(group, [(what, into, x)])
        self._together.append((what, into, x))
        return None

    @contextmanager
    def coalescing(self, group: Communicator, async_ops: bool) -> Iterator[Any]:
        self._together, manager = [], SimpleNamespace(work=None)
        manager.wait = lambda: manager.work.wait()
        yield manager
        calls, self._together = self._together, None
        if len({x.dtype for _, _, x in calls}) != 1:
            raise Refused("coalesced collectives of several dtypes")
        manager.work = self._collectives(group, calls)

    def _collectives(self, group: Communicator, calls: Sequence[tuple[str, Tensor, Tensor]]) -> Any:
        size, own = len(group.members), group.members.index(group.me)
        messages, after = [], []
        for what, into, x in calls:
            if what == "all-gather":
                places, pieces = list(into.view(-1).chunk(size)), [x.view(-1)] * size
                after.append((places[own], [pieces[own]]))
            else:
                with self._device.on(group.stream):
                    places = [torch.empty(into.numel(), dtype=into.dtype) for _ in range(size)]  # NCCL's own
                pieces = list(x.view(-1).chunk(size))
                places[own] = pieces[own]
                ring = [places[(own + step) % size] for step in range(1, size + 1)]
                after.append((into.view(-1), ring))
            for place, peer in enumerate(group.members):
                if peer != group.me:
                    messages += [(True, peer, pieces[place]), (False, peer, places[place])]
        work = self._launch(group, calls[0][0], messages, sms=group.most_ctas)
        with self._device.on(group.stream):
            for into, ring in after:
                if into.data_ptr() != ring[0].data_ptr():
                    into.copy_(ring[0])
                for x in ring[1:]:
                    into.add_(x)  # rounded to the dtype that is sent
        return work.again()

    def _launch(self, group: Communicator, what: str, messages: Sequence[tuple[bool, int, Tensor]], sms: int) -> Any:
        device, launched = self._device, self._machine.launched[self._device.rank]
        assert group.rank is device, "a process has its own end of a communicator"
        device.wait(group.stream, device.record(device.current()))
        name = f"{what} number {len(launched)} on {group.name}"
        kernel = Kernel({}, {}, name, len(launched), sms)
        for sends, peer, x in messages:
            _refuse(x)
            ends = (group.me, peer) if sends else (peer, group.me)
            key = group.key(*ends)
            access = self._machine.access(x)
            (kernel.sends if sends else kernel.receives)[key] = [access]
            if not sends:
                kernel.dtypes[key] = (x.dtype, x.numel())
        launched.append(kernel)
        group.stream.queue.append(kernel)
        return _Work(device, group)


class _Work:
    """The work that torch returns for an operation."""

    def __init__(self, device: Rank, group: Communicator) -> None:
        self._device, self._group = device, group
        self._ended = device.record(group.stream)

    def wait(self) -> None:
        self._device.wait(self._device.current(), self._ended)

    def again(self) -> _Work:
        """The work that has been queued on the communicator's stream until now."""
        return _Work(self._device, self._group)


def _refuse(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise Refused(f"Unconvertible NCCL type {x.dtype}")
    if not x.is_contiguous():
        raise Refused("Tensors must be contiguous")
    if not x.numel():
        raise Refused("a message without elements has no peer that waits for it")
    if x.data_ptr() % x.element_size():
        raise Refused(f"a buffer of {x.dtype} at {x.data_ptr():#x}")


def _pieces(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    if sum(counts) != x.shape[0]:
        raise Refused(f"Split sizes {counts} don't match {x.shape[0]} elements")
    return list(x.split(list(counts)))


def _power_of_two_up(ctas: int) -> int:
    """paths.cc: "Make nChannelsPerPeer and nChannels powers of 2"."""
    return 1 << (ctas - 1).bit_length()
