"""Streams of one rank: one for blocks and folds, and one per lane for its transfers.

Streams decide which thread or GPU stream runs an operation and how streams wait for each other: ThreadStreams on CPUs,
DeviceStreams (run.device_streams) on asynchronous devices. The lowering decides what waits for what. A transfer starts
when its operands and its buffer are ready, whatever block is running, and a block likewise.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch

from sp_bench.lower import Lowering, Waits
from sp_bench.plan.ops import BLOCKS, Op, Plan
from sp_bench.run.devices import Clock, HostClock
from sp_bench.run.home import home

Program = Sequence[Callable[[Any], None]]
"""The call of each operation: it performs it on a CPU, and queues it on the current stream on a GPU."""
Prepost = Callable[[int, Op, bool], bool]
"""Posts the receives of transfer `index`, whose buffer is free, and returns whether it could. The bool says that the
lane's previous transfer is still running."""


class Aborted(RuntimeError):
    """Raised in the streams that were waiting when another stream of this rank failed."""


class Streams(ABC):
    """The streams of one plan, for one execution at a time."""

    clock: Clock
    """The clock that times blocks."""
    queued: bool
    """Whether work is queued and runs asynchronously to the caller."""

    @property
    def capturing(self) -> bool:
        """Whether queued work becomes a graph, and isn't executed."""
        return False

    @abstractmethod
    def run(self, program: Program, execution: Any, prepost: Prepost) -> None:
        """Call every operation, with the execution, on its stream once its waits are met. Raises the first's error.

        If work isn't queued, a lane pre-posts the receives of its current and next transfer as soon as their buffers
        are free.
        """

    @abstractmethod
    def ready(self, index: int) -> bool:
        """Whether every operation that `index` waits for on other streams is known to have ended."""

    @abstractmethod
    def execution(self) -> Any:
        """Return a context for an execution on the caller's stream; it starts after the previous execution ends."""

    @abstractmethod
    def keeper(self, index: int) -> Callable[[Any], None]:
        """Return a function that keeps tensors alive until transfer `index` has ended. Call it within the transfer."""

    @abstractmethod
    def abandon(self, held: Any) -> None:
        """Clean up after a failed execution, whose tensors were `held`."""

    def close(self) -> None:  # noqa: B027  # only threads have to be ended
        """Shut down; no execution may follow."""


def lane_threads(lanes: int) -> ThreadPoolExecutor:
    """Return a pool with one thread per lane."""
    return ThreadPoolExecutor(lanes, "sp_bench-lane", initializer=home().put_transfers_first)


class ThreadStreams(Streams):
    """Blocks run on the calling thread, each lane on a thread of its own.

    If every operation waits for the previous one, as in Ulysses, the calling thread performs all of them: on busy
    cores a thread switch takes milliseconds. It can then be interrupted only between messages.
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

    def run(self, program: Program, execution: Any, prepost: Prepost) -> None:
        progress = self._progress = Progress(self._streams)
        free, names = self._buffer_free, self._streams[1:]
        ahead = {lane: _Preposting(self._by_stream[lane], free, prepost, progress) for lane in names}
        if self._by_caller:
            self._follow_all(program, execution, ahead, progress)
            return
        lanes = []
        try:
            for lane in names:
                assert self._threads
                lanes.append(self._threads.submit(self._lane, lane, program, execution, ahead[lane], progress))
            self._follow(BLOCKS, program, execution, progress)
            for lane in lanes:
                lane.result()
        except BaseException as error:
            progress.fail(error)
            assert progress.cause is not None
            raise progress.cause from None

    def _follow_all(self, program: Program, execution: Any, ahead: dict[str, _Preposting], progress: Progress) -> None:
        """Perform the whole plan in its order on the calling thread."""
        with torch.no_grad():
            for index, op in self._plan:
                if op.stream in ahead:
                    ahead[op.stream].look(index)
                program[index](execution)
                progress.end(op.stream, index)

    def _lane(self, name: str, program: Program, execution: Any, ahead: _Preposting, progress: Progress) -> None:
        """Perform one lane's transfers. Only this thread, which may have priority, touches the lane's messages."""
        try:
            with torch.no_grad():  # grad mode is thread-local
                for index, _ in self._by_stream[name]:
                    progress.wait(self._buffer_free[index])
                    ahead.look(index)
                    progress.wait(self._waits[index])
                    ahead.look(index)  # the next transfer's buffer may be free by now
                    program[index](execution)
                    progress.end(name, index)
        except BaseException as error:
            progress.fail(error)
            raise

    def _follow(self, name: str, program: Program, execution: Any, progress: Progress) -> None:
        for index, _ in self._by_stream[name]:
            progress.wait(self._waits[index])
            program[index](execution)
            progress.end(name, index)

    def ready(self, index: int) -> bool:
        return self._progress.has_reached(self._waits[index])

    def execution(self) -> Any:
        return nullcontext()

    def keeper(self, index: int) -> Callable[[Any], None]:
        return _let_go_at_once

    def abandon(self, held: Any) -> None:
        """Do nothing: threads that still use tensors hold references to them."""

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown()


class _Preposting:
    """Pre-posts a lane's receives in plan order: those of the current transfer and of the next one."""

    def __init__(
        self, ops: Sequence[tuple[int, Op]], buffer_free: Sequence[Waits], prepost: Prepost, progress: Progress
    ) -> None:
        self._ops, self._buffer_free, self._prepost, self._progress = ops, buffer_free, prepost, progress
        self._places = {index: place for place, (index, _) in enumerate(ops)}
        self._posted = 0
        """Number of transfers that are posted or have ended."""

    def look(self, index: int) -> None:
        """Pre-post receives with free buffers, up to the transfer after `index`, the lane's current one."""
        place_of = self._places[index]
        self._posted = max(self._posted, place_of)
        for place, (other, op) in enumerate(self._ops[self._posted : place_of + 2], start=self._posted):
            if not self._progress.has_reached(self._buffer_free[other]) or not self._prepost(
                other, op, place > place_of
            ):
                break
            self._posted = place + 1


def _is_sequence(plan: Plan, lowering: Lowering) -> bool:
    """Whether every operation must wait for the one before it in the plan."""
    streams = [op.stream for op in plan.ops]
    follows = enumerate(pairwise(streams), start=1)
    return all(place == before or (before, index - 1) in lowering.waits[index] for index, (before, place) in follows)


class Progress:
    """Index of the last finished operation of each stream. A stream finishes its operations in plan order."""

    def __init__(self, streams: tuple[str, ...]) -> None:
        self._ended = dict.fromkeys(streams, -1)
        self._changed = threading.Condition()
        self.cause: BaseException | None = None
        """Exception of the first stream that failed."""

    def wait(self, waits: Waits) -> None:
        """Block until every (stream, index) has ended. Raises Aborted if another stream failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.cause or self._reached(waits))
            if self.cause:
                raise Aborted("another stream of this rank failed") from self.cause

    def has_reached(self, waits: Waits) -> bool:
        """Whether every (stream, index) has ended."""
        with self._changed:
            return self._reached(waits)

    def end(self, stream: str, index: int) -> None:
        """Mark operation `index` of `stream` as ended."""
        with self._changed:
            self._ended[stream] = index
            self._changed.notify_all()

    def fail(self, cause: BaseException) -> None:
        """Make all waiting streams raise Aborted."""
        with self._changed:
            self.cause = self.cause or cause
            self._changed.notify_all()

    def _reached(self, waits: Waits) -> bool:
        return all(self._ended[stream] >= index for stream, index in waits)


def _let_go_at_once(tensors: Any) -> None:
    """Keep nothing: the transfer has already ended."""
