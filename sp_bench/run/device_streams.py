"""Streams of a rank on a device that works asynchronously: one thread queues all, in the order of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from sp_bench.lower import Lowering, Waits
from sp_bench.plan.ops import BLOCKS, Plan
from sp_bench.plan.schedule import released_by
from sp_bench.run.devices import Device
from sp_bench.run.streams import Prepost, Program, Streams

MOST_STREAMS = 4
"""Streams of callers for which a plan's bound calls are kept."""


class _Turn(NamedTuple):
    """An operation in the order of the plan."""

    lane: Any
    """Its lane's stream; None for what runs on the blocks' stream."""
    waits: tuple[int, ...]
    """The operations whose events its stream waits for."""
    awaited: bool
    """Whether any stream waits for it, so that its end is an event."""
    lets_go: tuple[int, ...]
    """Transfers of partials that have ended before it, so that what they sent may be let go."""


class _Queueing(NamedTuple):
    """All that is queued around the calls of a plan's operations, as bound calls."""

    begin: tuple[Callable[[], Any], ...]
    around: Sequence[tuple[tuple[Callable[[], Any], ...], Callable[[], Any] | None]]
    """By operation: what comes before its call, and what records its end, if any stream waits for that."""
    end: tuple[Callable[[], Any], ...]


def needed_waits(plan: Plan, waits: Sequence[Waits]) -> list[tuple[int, ...]]:
    """By operation, the others that its stream must wait for; without those that follow from what it waited for."""
    known: dict[str, dict[str, int]] = {BLOCKS: {}, **{lane: {} for lane in plan.lanes}}
    """By stream, the last operation of each stream that has ended before its next one."""
    at_end: list[dict[str, int]] = []
    needed = []
    for index, op in plan:
        mine, own = known[op.stream], []
        for stream, last in sorted(waits[index], key=lambda wait: -wait[1]):
            if mine.get(stream, -1) < last:
                own.append(last)
                for other, at in {**at_end[last], stream: last}.items():
                    mine[other] = max(at, mine.get(other, -1))
        needed.append(tuple(own))
        at_end.append(dict(mine))
    return needed


_abandoned: list[Any] = []
"""Tensors of failed executions. They are never freed: their transfers may still be running."""


class DeviceStreams(Streams):
    """The calling thread queues everything in plan order: blocks on the current stream, each lane on its own stream.

    Before an operation its stream waits, by events, for exactly what the plan says; the caller never blocks. Plan order
    is the same on all ranks, so all ranks use their communicators in the same order. There is no deadlock even if
    queueing blocks: the first operation in plan order that has not ended is, or will be, queued by all its ranks,
    since all operations before it have ended.

    Memory: the caching allocator hands freed memory to the next request on the stream it was allocated on, ordered
    with that stream's work only. Therefore all tensors are allocated on the blocks' stream, which is the caller's:

    - A lane's tensors are allocated before the execution (inputs, buffers, received results, neutral partials), or by a
      block that the lane waits for (partials).
    - Tensors that only blocks use stay on one stream.
    - `keeper` holds a partial that a lane sent until the blocks' stream has waited for that lane, so its memory is
      reused after the transfer. account.peak_bytes releases it at the same point.
    - Receive and staging buffers are freed between executions only: when an engine is closed, or the arena that several
      share grows. The plan's waits order their uses within an execution. The next execution starts after the last, and
      at its end the caller's stream has waited for all lanes. A caller with several streams orders them itself.
    """

    queued = True

    def __init__(self, plan: Plan, lowering: Lowering, device: Device) -> None:
        self.clock = self._device = device
        lanes = {name: device.lane(number) for number, name in enumerate(plan.lanes)}
        last = {op.stream: index for index, op in plan}
        self._ends = [last[lane] for lane in plan.lanes]
        self._lanes, waits = list(lanes.values()), needed_waits(plan, lowering.waits)
        awaited, let_go = {last for of_op in waits for last in of_op} | set(self._ends), _let_go(plan, lowering.waits)
        self._turns = [_Turn(lanes.get(op.stream), waits[i], i in awaited, let_go[i]) for i, op in plan]
        self._queueing: list[tuple[Any, _Queueing]] = []
        """With the streams of blocks that they are for, that used last at the end."""
        self._kept: dict[int, Any] = {}
        """Tensors that transfers sent, by transfer."""

    def run(self, program: Program, execution: Any, prepost: Prepost) -> None:
        with self.execution():
            self._run(program, execution)

    @property
    def capturing(self) -> bool:
        return self._device.capturing

    def ready(self, index: int) -> bool:
        """Return False: the host doesn't know what has ended on the GPU."""
        return False

    @contextmanager
    def execution(self) -> Iterator[None]:
        device, blocks = self._device, self._device.current()
        if device.finished is not None:
            device.wait(blocks, device.finished)
        try:
            yield
        finally:
            device.switch(blocks)
        device.finished = device.record(blocks)

    def _run(self, program: Program, execution: Any) -> None:
        self._kept.clear()
        begin, around, end = self._queueing_for(self._device.current())
        for queue in begin:
            queue()
        for (before, record), call in zip(around, program, strict=True):
            for queue in before:
                queue()
            call(execution)
            if record is not None:
                record()
        for queue in end:
            queue()
        self._kept.clear()

    def _queueing_for(self, blocks: Any) -> _Queueing:
        """The bound calls for blocks on that stream, which are worked out once for each of the last few streams."""
        for place, (stream, known) in enumerate(self._queueing):
            if stream == blocks:
                self._queueing.append(self._queueing.pop(place))
                return known
        queueing = self._find_queueing(blocks)
        self._queueing = [*self._queueing[1 - MOST_STREAMS :], (blocks, queueing)]
        return queueing

    def _find_queueing(self, blocks: Any) -> _Queueing:
        device = self._device
        begun, record_begun = device.recorder(blocks)
        ends: dict[int, Any] = {}
        around, current = [], blocks
        for index, turn in enumerate(self._turns):
            stream = blocks if turn.lane is None else turn.lane
            before = [device.waiter(stream, ends[last]) for last in turn.waits]
            if stream is not current:
                before.append(device.switcher(stream))
                current = stream
            if turn.lane is None:
                before += [partial(self._kept.pop, transfer, None) for transfer in turn.lets_go]
            record = None
            if turn.awaited:
                ends[index], record = device.recorder(stream)
            around.append((tuple(before), record))
        begin = (record_begun, *(device.waiter(lane, begun) for lane in self._lanes))
        return _Queueing(begin, around, tuple(device.waiter(blocks, ends[last]) for last in self._ends))

    def keeper(self, index: int) -> Callable[[Any], None]:
        return partial(self._kept.__setitem__, index)

    def abandon(self, held: Any) -> None:
        """Keep the tensors for the life of the process: nothing waits for the lanes that use them."""
        _abandoned.append((held, dict(self._kept)))


def _let_go(plan: Plan, waits: Sequence[Waits]) -> list[tuple[int, ...]]:
    """By operation, the transfers of partials that the blocks' stream has first waited for before it."""
    let_go: list[tuple[int, ...]] = [()] * len(plan.ops)
    for transfer, index in released_by(plan, waits).items():
        if any(chunk.tensor.is_partial for chunk in plan.ops[transfer].reads):
            let_go[index] += (transfer,)
    return let_go
