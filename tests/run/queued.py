"""A device that does its work behind the caller, for tests: the streams, events and memory of several ranks.

What ranks do to tensors is queued instead of done, on the stream that is current, and done later in an order drawn at
random from all that events and messages allow. Memory that the caller has let go is given out again at once on the
stream that it was made on, as torch's allocator for GPUs does. Every access is held against all earlier ones of the
same bytes: two that no event or message orders, of which one writes, are a Hazard, whatever their order was this time.
"""

from __future__ import annotations

import random
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sp_bench.lower import NCCL
from sp_bench.run.transport import Call, Message, Transport, Turn

STREAMS_PER_RANK = 8
WAITING = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero"}
"""Operations whose results the caller would have to wait for."""
OF_LISTS = {"_foreach_add_", "_foreach_copy_"}
"""Operations that write to the tensors of a list and return nothing."""
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
POISON = 0xFF
"""Floating-point numbers of such bytes are NaN."""


class Hazard(AssertionError):
    """Two accesses to the same memory that nothing orders."""


class Stuck(AssertionError):
    """Nothing that is queued can go on."""


class Block:
    """A piece of memory, and who read and wrote each byte of it when: (streams, bytes) of their own counts."""

    def __init__(self, size: int, streams: int) -> None:
        self.bytes = np.full(size, POISON, np.uint8)
        self.read, self.written = (np.zeros((streams, size), np.int32) for _ in range(2))

    def tensor(self, like: Tensor) -> Tensor:
        """A view of it, whose life nobody watches."""
        first = like.untyped_storage().data_ptr() - self.bytes.ctypes.data
        flat = torch.from_numpy(self.bytes).view(like.dtype)
        return flat.as_strided(like.size(), like.stride(), first // like.element_size() + like.storage_offset())


@dataclass
class Access:
    """Some bytes of a block."""

    block: Block
    tensor: Tensor

    @property
    def where(self) -> np.ndarray:
        x = self.tensor
        return _bytes_of(tuple(x.size()), tuple(x.stride()), int(x.storage_offset()), x.element_size())


@lru_cache(maxsize=4096)
def _bytes_of(size: tuple[int, ...], stride: tuple[int, ...], offset: int, width: int) -> np.ndarray:
    elements = np.full(1, offset, np.int64)
    for count, step in zip(size, stride, strict=True):
        elements = (elements[:, None] + step * np.arange(count)).ravel()
    return (width * np.unique(elements)[:, None] + np.arange(width)).ravel()


@dataclass
class Event:
    """Recorded once its stream gets there, with what had ended by then.

    As a flag between ranks it is put where it is clear, and taken, which clears it, where it is set.
    """

    clock: np.ndarray | None = None


@dataclass
class Work:
    """An operation on tensors."""

    do: Callable[[], None]
    reads: list[Access]
    writes: list[Access]


@dataclass
class Batch:
    """Messages of one transfer: by key, what is sent and where it is received, until that has been done."""

    sends: dict[tuple, list[Access]]
    receives: dict[tuple, list[Access]]


@dataclass(eq=False)
class Stream:
    number: int
    owner: Rank
    queue: deque = field(default_factory=deque)
    free: dict[int, list[Block]] = field(default_factory=dict)
    """Memory that was made here and let go, by size."""


class Machine:
    """All ranks, and what they have queued."""

    streams_per_rank = STREAMS_PER_RANK

    def __init__(self, ranks: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = ranks * self.streams_per_rank
        self.clocks = np.zeros((self._count, self._count), np.int32)
        """The end of each stream that each stream knows of."""
        self.streams: list[Stream] = []
        self.blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        self._wire: dict[tuple, tuple[list[Tensor], np.ndarray]] = {}
        """Messages that have left and not arrived."""
        self._eager = self._random.random() < 0.5
        """Whether a message may leave before its receiver is ready; NCCL may do either."""
        self._steady = self._random.random() < 0.5
        self._ranking: dict[int, float] = {}
        self.ranks = [Rank(self, rank) for rank in range(ranks)]

    def stream(self, owner: Rank) -> Stream:
        self.streams.append(Stream(len(self.streams), owner))
        assert len(self.streams) <= self._count
        return self.streams[-1]

    def block(self, size: int) -> Block:
        block = Block(-(-size // 16) * 16, self._count)
        self.blocks[block.bytes.ctypes.data] = block
        insort(self._starts, block.bytes.ctypes.data)
        return block

    def access(self, x: Tensor) -> Access:
        """The place of a tensor, without keeping it alive."""
        block = self.block_of(x)
        assert block is not None, "not the device's memory"
        return Access(block, block.tensor(x))

    def block_of(self, x: Tensor) -> Block | None:
        """The block that a tensor is in, if it is the device's. The storage of an alias may begin within one."""
        start = x.untyped_storage().data_ptr()
        if start not in self.blocks:
            below = bisect_right(self._starts, start) - 1
            start = self._starts[below] if below >= 0 else -1
        block = self.blocks.get(start)
        return block if block and x.data_ptr() < start + block.bytes.size else None

    def run(self) -> None:
        """Do all that is queued. Raises Hazard, or Stuck where it waits for what never comes."""
        while any(stream.queue for stream in self.streams):
            steps = [(stream, step) for stream in self.streams if stream.queue for step in self._steps(stream)]
            if not steps:
                raise self._stuck()
            stream, step = self._pick(steps)
            self.clocks[stream.number, stream.number] += 1
            step()
            if stream.queue and isinstance(stream.queue[0], Batch):
                batch = stream.queue[0]
                if not batch.sends and not batch.receives:
                    stream.queue.popleft()

    def _stuck(self) -> Stuck:
        return Stuck(f"{[type(s.queue[0]).__name__ for s in self.streams if s.queue]} wait for each other")

    def _pick(self, steps: list) -> Any:
        """Any of them, or that of the stream first in a ranking which changes now and then."""
        if not self._steady:
            return self._random.choice(steps)
        if not self._ranking or self._random.random() < 0.02:
            self._ranking = {stream.number: self._random.random() for stream in self.streams}
        return max(steps, key=lambda step: self._ranking.setdefault(step[0].number, self._random.random()))

    def _steps(self, stream: Stream) -> Iterator[Callable[[], None]]:
        """The work that a stream could do now."""
        head = stream.queue[0]
        if isinstance(head, Work):
            yield lambda: self._do(stream, head)
        elif isinstance(head, tuple):
            what, event = head
            if what == "record" or (event.clock is None) == (what == "put"):
                yield lambda: self._event(stream, what, event)
        else:
            for key in head.sends:
                if self._eager or self._ready(key):
                    yield lambda key=key: self._send(stream, head, key)
            for key in head.receives:
                if key in self._wire:
                    yield lambda key=key: self._receive(stream, head, key)

    def _ready(self, key: tuple) -> bool:
        heads = (stream.queue[0] for stream in self.streams if stream.queue)
        return any(isinstance(head, Batch) and key in head.receives for head in heads)

    def _do(self, stream: Stream, work: Work) -> None:
        self._check(stream, work.reads, work.writes)
        work.do()
        stream.queue.popleft()

    def _event(self, stream: Stream, what: str, event: Event) -> None:
        clock = self.clocks[stream.number]
        if what in ("record", "put"):
            event.clock = clock.copy()
        else:
            assert event.clock is not None, "a stream goes on once its event was recorded"
            np.maximum(clock, event.clock, out=clock)
            event.clock = None if what == "take" else event.clock
        stream.queue.popleft()

    def _send(self, stream: Stream, batch: Batch, key: tuple) -> None:
        accesses = batch.sends.pop(key)
        self._check(stream, accesses, [])
        self._wire[key] = ([a.tensor.clone() for a in accesses], self.clocks[stream.number].copy())

    def _receive(self, stream: Stream, batch: Batch, key: tuple) -> None:
        tensors, clock = self._wire.pop(key)
        np.maximum(self.clocks[stream.number], clock, out=self.clocks[stream.number])
        accesses = batch.receives.pop(key)
        self._check(stream, [], accesses)
        for access, tensor in zip(accesses, tensors, strict=True):
            access.tensor.copy_(tensor)

    def _check(self, stream: Stream, reads: list[Access], writes: list[Access]) -> None:
        known = self.clocks[stream.number][:, None]
        for accesses, others in ((reads, ("written",)), (writes, ("written", "read"))):
            for access in accesses:
                where = access.where
                for other in others:
                    if (getattr(access.block, other)[:, where] > known).any():
                        raise Hazard(f"rank {stream.owner.rank}: memory {other} elsewhere, and nothing orders that")
        for accesses, mine in ((reads, "read"), (writes, "written")):
            for access in accesses:
                getattr(access.block, mine)[stream.number, access.where] = known[stream.number, 0]


class Rank(TorchDispatchMode):
    """One rank's device (run.devices.Device). While it is entered, what is done to tensors is queued."""

    def __init__(self, machine: Machine, rank: int) -> None:
        super().__init__()
        self.machine, self.rank, self.finished, self.capturing = machine, rank, None, False
        self._current, self._lanes = machine.stream(self), {}

    # What DeviceStreams wants

    def current(self) -> Stream:
        return self._current

    def lane(self, number: int) -> Stream:
        if number not in self._lanes:
            self._lanes[number] = self.machine.stream(self)
        return self._lanes[number]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def switch(self, stream: Stream) -> None:
        self._current = stream

    def record(self, stream: Stream, event: Event | None = None) -> Event:
        stream.queue.append(("record", event := Event()))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.queue.append(("wait", event))

    def recorder(self, stream: Stream) -> tuple[list[Event], Callable[[], Any]]:
        """Each record is another event; a wait is for the last one until it."""
        events: list[Event] = []
        return events, lambda: events.__setitem__(slice(None), [self.record(stream)])

    def waiter(self, stream: Stream, event: list[Event]) -> Callable[[], Any]:
        return lambda: self.wait(stream, event[-1])

    def switcher(self, stream: Stream) -> Callable[[], Any]:
        return lambda: self.switch(stream)

    def capture(self, queue: Callable[[], Any]) -> tuple[Any, Any]:
        raise NotImplementedError("tests.run.capturing has the device with graphs")

    def replay(self, graph: Any) -> None:
        raise NotImplementedError("tests.run.capturing has the device with graphs")

    def mark(self) -> None:
        return None

    def seconds(self, start: None, end: None) -> float:
        return 0.0

    def delay(self) -> None:
        pass

    def machine_s(self, mark: None) -> None:
        return None

    def synchronize(self) -> None:
        self.machine.run()

    # Tensors

    def put(self, x: Tensor) -> Tensor:
        """A copy of a tensor in the device's memory, made on the current stream."""
        return self._queue(torch.ops.aten.clone.default, (x,), {}, [x.contiguous()])[0]

    def get(self, x: Tensor) -> Tensor:
        """The values of a tensor, once everything was run."""
        return self.machine.access(x).tensor.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert name not in WAITING, f"the caller waits for the device: {name}"
        if name in OF_LISTS:
            self._in_place(func, args, kwargs)
            return None
        returned = [r.alias_info for r in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returned):
            return func(*args, **kwargs)  # a view
        if any(alias is not None for alias in returned):
            return self._in_place(func, args, kwargs)
        found = func(*args, **kwargs)  # for its shapes and strides; what it holds means nothing yet
        single = isinstance(found, Tensor)
        made = self._queue(func, args, kwargs, [found] if single else list(found), poisoned=name in EMPTY)
        return made[0] if single else tuple(made)

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Operations that write to `out`, or else to their first argument, and return it."""
        rest = {key: x for key, x in kwargs.items() if key != "out"}
        written, read = (kwargs["out"], (args, rest)) if "out" in kwargs else (args[0], (args[1:], rest))
        raw, raw_kwargs = self._raw(args), self._raw(kwargs)
        reads = [self.machine.access(x) for x in tree_leaves(read) if _is(x)]
        writes = [self.machine.access(x) for x in tree_leaves(written)]
        self._append(Work(lambda: func(*raw, **raw_kwargs), reads, writes))
        return written

    def _queue(self, func: Any, args: Any, kwargs: Any, found: Sequence[Any], *, poisoned: bool = False) -> list[Any]:
        made = [self._make(x) if isinstance(x, Tensor) else x for x in found]
        out = [self.machine.access(x) for x in made if isinstance(x, Tensor)]
        raw, raw_kwargs = self._raw(args), self._raw(kwargs)
        reads = [self.machine.access(x) for x in tree_leaves((args, kwargs)) if _is(x) and self._has(x)]

        def do() -> None:
            if poisoned:
                for access in out:
                    access.block.bytes[access.where] = POISON
                return
            result = func(*raw, **raw_kwargs)
            for access, x in zip(out, [result] if isinstance(result, Tensor) else result, strict=False):
                access.tensor.copy_(x)

        self._append(Work(do, reads, out))
        return made

    def _append(self, work: Work) -> None:
        self._current.queue.append(work)

    def _has(self, x: Tensor) -> bool:
        return self.machine.block_of(x) is not None

    def _raw(self, values: Any) -> Any:
        """The same, with tensors that don't keep the caller's alive."""
        return tree_map_only(Tensor, lambda x: self.machine.access(x).tensor if self._has(x) else x, values)

    def _make(self, like: Tensor) -> Tensor:
        """Memory for a tensor on the current stream, used before if it can be; given back when the tensor dies."""
        elements = 1 + sum((count - 1) * step for count, step in zip(like.size(), like.stride(), strict=True))
        size = -(-max(elements, 1) * like.element_size() // 16) * 16
        free = self._current.free.setdefault(size, [])
        block = free.pop() if free else self.machine.block(size)
        seen = block.bytes[:]
        weakref.finalize(seen, free.append, block)
        return torch.from_numpy(seen).view(like.dtype).as_strided(like.size(), like.stride())


def _is(x: object) -> bool:
    return isinstance(x, Tensor)


class Wires(Transport):
    """Messages between the ranks of a machine, each transfer one batch on its lane's stream."""

    kind = NCCL

    def __init__(self, rank: Rank) -> None:
        super().__init__(None)
        self._rank = rank
        self._numbers: dict[tuple[int, int, int], int] = {}

    def exchange(self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence) -> None:
        me, access = self._rank.rank, self._rank.machine.access
        for _, tensors in sends:
            self.count(tensors, counted_as)
        batch = Batch(
            {self._next(turn.lane, me, peer): [access(x) for x in tensors] for peer, tensors in sends},
            {self._next(turn.lane, peer, me): [access(x) for x in tensors] for peer, tensors in receives},
        )
        self._rank.current().queue.append(batch)

    def collective(self, turn: Turn, call: Call) -> None:
        """As messages between all members, and as NCCL adds: in the order of members."""
        me, access, size = self._rank.rank, self._rank.machine.access, call.group.size
        peers = [int(call.group.member(me, shift)) for shift in range(1, size)]
        own, slots = int(call.group.digit(me)), {peer: int(call.group.digit(peer)) for peer in peers}

        def pieces(x: Tensor, counts: list[int]) -> list[Tensor]:
            ends = [sum(counts[:i]) for i in range(size + 1)]
            return [x.view(-1)[start:end] for start, end in zip(ends, ends[1:], strict=False)]

        sends, receives = {peer: [] for peer in peers}, {peer: [] for peer in peers}
        totals = []
        for i, (into, x) in enumerate(zip(call.received, call.sent, strict=True)):
            received, sent = call.splits[i] if call.splits else ([x.numel() // size] * size,) * 2
            mine = [x.view(-1)] * size if call.kind == "all_gather" else pieces(x, sent)
            if call.kind == "all_gather":
                received = [x.numel()] * size
            places = pieces(torch.empty_like(x) if call.kind == "reduce_scatter" else into, received)
            for peer in peers:
                sends[peer].append(access(mine[slots[peer]]))
                receives[peer].append(access(places[slots[peer]]))
            if places[own].data_ptr() != mine[own].data_ptr():
                places[own].copy_(mine[own])
            totals.append((into, places))
        batch = Batch(
            {self._next(turn.lane, me, peer): sends[peer] for peer in peers},
            {self._next(turn.lane, peer, me): receives[peer] for peer in peers},
        )
        self._rank.current().queue.append(batch)
        if call.kind == "reduce_scatter":
            for into, places in totals:
                into.view(-1).copy_(places[0])
                for place in places[1:]:
                    into.view(-1).add_(place)

    def _next(self, lane: int, source: int, target: int) -> tuple[int, int, int, int]:
        """The next message from one rank to another on a lane: they are matched by their order."""
        key = (lane, source, target)
        self._numbers[key] = self._numbers.get(key, -1) + 1
        return (*key, self._numbers[key])
