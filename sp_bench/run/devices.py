"""Streams, events and clocks of the device that a rank computes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import torch

Result = TypeVar("Result")
DELAY_CYCLES = 2_000_000
"""Cycles of a GPU's clock that `delay` takes: about a millisecond, in which the host launches what begins a phase."""
HIGH_PRIORITY = -1
"""CUDA priority of lane streams: a send or receive kernel launches before a block kernel's next wave."""


class Clock(Protocol):
    """A device's clock. A mark is taken at once on a CPU, and on a GPU when its stream reaches it."""

    def mark(self) -> Any:
        """Return a time mark: now or, on a GPU, when earlier work on the current stream has ended."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks. Call `synchronize` first: both must have been reached."""
        ...

    def delay(self) -> None:
        """Queue a short wait on the current stream, so that what is queued next begins without its launch."""
        ...

    def machine_s(self, mark: Any) -> float | None:
        """The mark's time in seconds on a clock shared by all processes of the machine; None on a GPU."""
        ...

    def synchronize(self) -> None:
        """Block until all work started on the device has ended."""
        ...


class HostClock(Clock):
    """The clock of a CPU, where all work is synchronous."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def delay(self) -> None:
        """Do nothing: nothing is queued on a CPU."""

    def machine_s(self, mark: float) -> float:
        return mark

    def synchronize(self) -> None:
        """Do nothing: CPU work is synchronous."""


class Device(Clock, Protocol):
    """An asynchronous device with streams and events: torch.cuda, or a fake in tests."""

    capturing: bool
    """Whether queued work is captured, and nothing of it executed."""
    finished: Any
    """Event at the end of the last execution; None before the first. The next one waits for it to reuse buffers."""

    def current(self) -> Any:
        """Return the caller's current stream."""
        ...

    def lane(self, number: int) -> Any:
        """Return the stream of lane `number`, the same one at every call."""
        ...

    def switch(self, stream: Any) -> None:
        """Make `stream` the current one."""
        ...

    def record(self, stream: Any, event: Any = None) -> Any:
        """Return an event that completes when all work queued on `stream` so far has ended.

        It may be `event`, recorded anew: what waits for that has been told to.
        """
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work on `stream` wait for `event`; the caller doesn't block."""
        ...

    def recorder(self, stream: Any) -> tuple[Any, Callable[[], Any]]:
        """(an event, the bound call that records it on `stream`, anew each time)."""
        ...

    def waiter(self, stream: Any, event: Any) -> Callable[[], Any]:
        """`wait` as a bound call, for an event of `recorder`: for what was recorded last."""
        ...

    def switcher(self, stream: Any) -> Callable[[], Any]:
        """`switch` as a bound call."""
        ...

    def capture(self, queue: Callable[[], Result]) -> tuple[Any, Result]:
        """(a graph of all that `queue` queues, what it returns). Nothing is executed; `queue` must not block.

        Raises RuntimeError if something can't be captured.
        """
        ...

    def replay(self, graph: Any) -> None:
        """Execute a graph on the current stream, after the last execution. It uses the same memory each time."""
        ...


class Cuda(Device):
    """One GPU, driven by torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.capturing = device, False
        self.finished: torch.cuda.Event | None = None

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def lane(self, number: int) -> torch.cuda.Stream:
        return _lane_stream(self._device, number)

    def switch(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(stream)

    def record(self, stream: torch.cuda.Stream, event: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = event or torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    # Bound to the functions beneath torch's methods, each of which takes as long as what it calls.

    def recorder(self, stream: torch.cuda.Stream) -> tuple[torch.cuda.Event, Callable[[], Any]]:
        event = torch.cuda.Event()
        return event, partial(super(torch.cuda.Event, event).record, stream)

    def waiter(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> Callable[[], Any]:
        return partial(super(torch.cuda.Event, event).wait, stream)

    def switcher(self, stream: torch.cuda.Stream) -> Callable[[], Any]:
        number, device, kind = stream.stream_id, stream.device_index, stream.device_type
        beneath: Any = torch._C
        return partial(beneath._cuda_setStream, stream_id=number, device_index=device, device_type=kind)

    def capture(self, queue: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        self.synchronize()
        self.finished = None  # a capture can't wait for an event from outside; everything has ended
        graph, callers = torch.cuda.CUDAGraph(), self.current()
        self.capturing = True
        try:
            # NCCL's watchdog calls CUDA from its own thread.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = queue()
        finally:
            self.capturing = False
            self.switch(callers)  # where a capture fails, torch leaves its stream as the current one
            self.finished = None  # that of the capture is no event
        return graph, result

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        if self.finished is not None:
            self.wait(self.current(), self.finished)
        graph.replay()
        self.finished = self.record(self.current())

    def mark(self) -> torch.cuda.Event | None:
        """None while a graph is captured: its events have no times."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current())
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def delay(self) -> None:
        torch.cuda._sleep(DELAY_CYCLES)

    def machine_s(self, mark: torch.cuda.Event) -> None:
        return None

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


@cache
def _lane_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Cached, because torch hands out 32 streams per priority and device in round-robin order."""
    return torch.cuda.Stream(device, priority=HIGH_PRIORITY)


def clock_of(device: torch.device) -> Clock:
    """Return the clock that times work on a device."""
    return Cuda(device) if device.type == "cuda" else HostClock()
