"""Streams of one rank: blocks and folds on one, each lane's transfers on one of their own.

Which thread or queue does an operation, and how one waits for another, is decided here, once for CPUs (ThreadStreams)
and once for devices that queue their work (DeviceStreams). What waits for what is the lowering's: a transfer starts as
soon as its operands and its buffer are there, however far the blocks are, and the other way round.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from sp_bench.lower import Lowering, Waits
from sp_bench.plan.ops import BLOCKS, Op, Plan
from sp_bench.run.devices import Clock, Device, HostClock
from sp_bench.run.home import home

Perform = Callable[[int, Op], None]
"""Does operation `index`: at once on a CPU, and on a device by queueing its work on the current stream."""
Prepost = Callable[[int, Op, bool], bool]
"""Posts the receives of transfer `index`, whose buffer is free; returns whether it could. With True, while the transfer
before it on its lane hasn't ended."""


class Aborted(RuntimeError):
    """Another stream of this rank failed; that stream raises the cause."""


class Streams(ABC):
    """The streams of one plan, for one execution at a time."""

    clock: Clock
    """By which the work of blocks is timed."""
    queued: bool
    """Whether work is queued, and done after the caller has gone on."""

    @abstractmethod
    def run(self, perform: Perform, prepost: Prepost) -> None:
        """Perform all operations, each on its stream after what it waits for. Raises what the first to fail raised.

        Where work isn't queued, lanes pre-post the receives of a transfer, and of the one after it, as soon as their
        buffer is free.
        """

    @abstractmethod
    def ready(self, index: int) -> bool:
        """Whether all that operation `index` waits for on other streams is known to have ended."""

    @abstractmethod
    def execution(self) -> Any:
        """A context for an execution on the caller's stream, after whatever the last one left to be done."""

    @abstractmethod
    def making(self) -> Any:
        """A context in which a lane may make tensors."""

    @abstractmethod
    def keep(self, tensors: Any) -> None:
        """From within a lane's operation: hold what nobody else does any more until it has ended."""

    @abstractmethod
    def abandon(self, held: Any) -> None:
        """An execution has failed, which used `held`."""

    def close(self) -> None:  # noqa: B027  # only threads have to be ended
        """No more executions."""


# CPUs: a thread for each lane


def lane_threads(lanes: int) -> ThreadPoolExecutor:
    """A thread for the transfers of each lane."""
    return ThreadPoolExecutor(lanes, "sp_bench-lane", initializer=home().put_transfers_first)


class ThreadStreams(Streams):
    """Blocks on the calling thread, each lane on a thread of its own.

    Where each operation waits for the one before it, as in Ulysses, the calling thread does all of them: on busy cores,
    handing over to another thread takes milliseconds. It can then be interrupted only between messages.
    """

    queued = False

    def __init__(self, plan: Plan, lowering: Lowering) -> None:
        self.clock, self._plan = HostClock(), plan
        self._waits, self._buffer_free = lowering.waits, lowering.buffer_free
        self._streams = (BLOCKS, *plan.lanes)
        self._by_stream = {name: [(i, op) for i, op in plan if op.stream == name] for name in self._streams}
        self._progress = Progress(self._streams)
        self._by_caller = _is_sequence(plan, lowering) and not (plan.lanes and home().transfers_first)
        self._threads = None if self._by_caller else lane_threads(len(plan.lanes))

    def run(self, perform: Perform, prepost: Prepost) -> None:
        progress = self._progress = Progress(self._streams)
        free, names = self._buffer_free, self._streams[1:]
        ahead = {lane: _Preposting(self._by_stream[lane], free, prepost, progress) for lane in names}
        if self._by_caller:
            self._follow_all(perform, ahead, progress)
            return
        lanes = []
        try:
            for lane in names:
                assert self._threads
                lanes.append(self._threads.submit(self._lane, lane, perform, ahead[lane], progress))
            self._follow(BLOCKS, perform, progress)
            for lane in lanes:
                lane.result()
        except BaseException as error:
            progress.fail(error)
            assert progress.cause is not None
            raise progress.cause from None

    def _follow_all(self, perform: Perform, ahead: dict[str, _Preposting], progress: Progress) -> None:
        """The whole plan, in its order."""
        with torch.no_grad():
            for index, op in self._plan:
                if op.stream in ahead:
                    ahead[op.stream].look(index)
                perform(index, op)
                progress.end(op.stream, index)

    def _lane(self, name: str, perform: Perform, ahead: _Preposting, progress: Progress) -> None:
        """One lane. Only its own thread, which may have priority, touches its messages."""
        try:
            with torch.no_grad():  # a thread of its own doesn't know the caller's grad mode
                for index, op in self._by_stream[name]:
                    progress.wait(self._buffer_free[index])
                    ahead.look(index)
                    progress.wait(self._waits[index])
                    ahead.look(index)  # the next one's buffer may be free by now
                    perform(index, op)
                    progress.end(name, index)
        except BaseException as error:
            progress.fail(error)
            raise

    def _follow(self, name: str, perform: Perform, progress: Progress) -> None:
        for index, op in self._by_stream[name]:
            progress.wait(self._waits[index])
            perform(index, op)
            progress.end(name, index)

    def ready(self, index: int) -> bool:
        return self._progress.has_reached(self._waits[index])

    def execution(self) -> Any:
        return nullcontext()

    def making(self) -> Any:
        return nullcontext()

    def keep(self, tensors: Any) -> None:
        """A transfer has ended when its thread comes here."""

    def abandon(self, held: Any) -> None:
        """Whoever still uses tensors has references to them."""

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown()


class _Preposting:
    """A lane's receives, pre-posted in the order of its transfers: of each one, and of the next one beside it."""

    def __init__(
        self, ops: Sequence[tuple[int, Op]], buffer_free: Sequence[Waits], prepost: Prepost, progress: Progress
    ) -> None:
        self._ops, self._buffer_free, self._prepost, self._progress = ops, buffer_free, prepost, progress
        self._places = {index: place for place, (index, _) in enumerate(ops)}
        self._posted = 0
        """How many of them have been posted, or have ended."""

    def look(self, index: int) -> None:
        """Pre-post what has a free buffer while the lane comes to transfer `index`."""
        here = self._places[index]
        self._posted = max(self._posted, here)
        for place, (other, op) in enumerate(self._ops[self._posted : here + 2], start=self._posted):
            if not self._progress.has_reached(self._buffer_free[other]) or not self._prepost(other, op, place > here):
                break
            self._posted = place + 1


def _is_sequence(plan: Plan, lowering: Lowering) -> bool:
    """Whether no operation may start before the one that it follows in the plan has ended."""
    streams = [op.stream for op in plan.ops]
    follows = enumerate(pairwise(streams), start=1)
    return all(here == before or (before, index - 1) in lowering.waits[index] for index, (before, here) in follows)


class Progress:
    """The last operation that each stream has ended. Operations of one stream end in plan order."""

    def __init__(self, streams: tuple[str, ...]) -> None:
        self._ended = dict.fromkeys(streams, -1)
        self._changed = threading.Condition()
        self.cause: BaseException | None = None
        """What the first stream to fail raised."""

    def wait(self, waits: Waits) -> None:
        """Return when every (stream, index) has ended. Raises Aborted if another stream failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.cause or self._reached(waits))
            if self.cause:
                raise Aborted("another stream of this rank failed") from self.cause

    def has_reached(self, waits: Waits) -> bool:
        """Whether every (stream, index) has ended."""
        with self._changed:
            return self._reached(waits)

    def end(self, stream: str, index: int) -> None:
        """Operation `index` of `stream` has ended."""
        with self._changed:
            self._ended[stream] = index
            self._changed.notify_all()

    def fail(self, cause: BaseException) -> None:
        """Wake all streams with Aborted."""
        with self._changed:
            self.cause = self.cause or cause
            self._changed.notify_all()

    def _reached(self, waits: Waits) -> bool:
        return all(self._ended[stream] >= index for stream, index in waits)


# Devices: all from one thread, in the order of the plan


_abandoned: list[Any] = []
"""What failed executions used."""


class DeviceStreams(Streams):
    """Everything queued by the calling thread in plan order: blocks on the current stream, each lane on one of its own.

    Before an operation its stream waits, by events, for exactly what the plan says; the caller never waits. Plan order
    is the same on all ranks, and so is that in which each uses its communicators. Nor can it deadlock if queueing
    blocks: of all operations that have not ended on some rank, the first one in plan order has been queued by all its
    ranks, or will be, since all before it have ended.

    Memory. An allocator gives memory that was freed to the next who asks on the stream that it was made on, ordered
    with the work of that stream only. Therefore all tensors are made on the blocks' stream, which is the caller's:

    - what a lane reads or writes was made before the execution, which its stream waits for (inputs, buffers, results
      that it receives), or by a block that the plan has it wait for (partials), or within `making`;
    - what blocks make and free among themselves stays on one stream;
    - a partial that a lane sent on is kept until the blocks' stream has waited for that lane (`keep`), so that who
      gets its memory comes after the transfer. That is where account.peak_bytes releases it too;
    - receive buffers and staging stay. Within an execution the plan's waits order their uses, the next one begins
      after the last has ended, and at its end the caller's stream has waited for all lanes: whatever is freed after
      that, by whomever, was used by nobody else.
    """

    queued = True

    def __init__(self, plan: Plan, lowering: Lowering, device: Device) -> None:
        self.clock = self._device = device
        self._plan, self._waits = plan, lowering.waits
        self._lanes = {name: device.lane(number) for number, name in enumerate(plan.lanes)}
        last = {op.stream: index for index, op in plan}
        self._last = {lane: last[lane] for lane in plan.lanes}
        self._awaited = {wait for waits in lowering.waits for wait in waits} | set(self._last.items())
        self._blocks: Any = None
        self._here: tuple[str, int] = (BLOCKS, -1)
        self._kept: dict[str, list[tuple[int, Any]]] = {}

    def run(self, perform: Perform, prepost: Prepost) -> None:
        with self.execution():
            self._run(perform)

    def ready(self, index: int) -> bool:
        """The caller never knows what has ended."""
        return False

    @contextmanager
    def execution(self) -> Iterator[None]:
        device = self._device
        self._blocks = device.current()
        if device.finished is not None:
            device.wait(self._blocks, device.finished)
        yield
        device.finished = device.record(self._blocks)

    def _run(self, perform: Perform) -> None:
        device, ended = self._device, {}
        self._kept = {lane: [] for lane in self._lanes}
        begun = device.record(self._blocks)
        for lane in self._lanes.values():
            device.wait(lane, begun)
        for index, op in self._plan:
            self._here = (op.stream, index)
            stream = self._blocks if op.stream == BLOCKS else self._lanes[op.stream]
            for wait in self._waits[index]:
                device.wait(stream, ended[wait])
            if op.stream == BLOCKS:
                self._let_go(index)
                perform(index, op)
            else:
                with device.on(stream):
                    perform(index, op)
            if self._here in self._awaited:
                ended[self._here] = device.record(stream)
        for last in self._last.items():
            device.wait(self._blocks, ended[last])
        self._kept = {}

    @contextmanager
    def making(self) -> Iterator[None]:
        """On the blocks' stream, and the lane waits for it: more than the plan asks, so only where it must."""
        lane = self._lanes[self._here[0]]
        with self._device.on(self._blocks):
            yield
        self._device.wait(lane, self._device.record(self._blocks))

    def keep(self, tensors: Any) -> None:
        lane, index = self._here
        self._kept[lane].append((index, tensors))

    def abandon(self, held: Any) -> None:
        """Lanes may use it as long as the process lives, since nobody waits for them any more."""
        _abandoned.append((held, self._kept))

    def _let_go(self, index: int) -> None:
        for lane, last in self._waits[index]:
            self._kept[lane] = [entry for entry in self._kept[lane] if entry[0] > last]
