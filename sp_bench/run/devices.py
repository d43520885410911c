"""What a rank computes on: how its work is ordered by streams and events, and what time it is there."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch

HIGH_PRIORITY = -1
"""Transfers are short to start and long to wait for: theirs goes before a block's next wave."""


class Clock(Protocol):
    """Time as the device has it. A mark is taken at once on a CPU, and on a GPU once its stream gets there."""

    def mark(self) -> Any:
        """Now; on a GPU, when the work before it on the current stream has ended."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks that have been reached: after `synchronize`."""
        ...

    def machine_s(self, mark: Any) -> float | None:
        """When a mark was, by a clock that all processes of the machine share; None where a device has its own."""
        ...

    def synchronize(self) -> None:
        """Return when all that was started has ended."""
        ...


class HostClock:
    """The clock of a CPU, on which nothing runs behind the caller."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def machine_s(self, mark: float) -> float:
        return mark

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class Device(Clock, Protocol):
    """A device whose work is queued on streams: what torch.cuda has, and what tests put in its place."""

    finished: Any
    """The event at the end of the last execution, whose buffers the next one uses; None before the first."""

    def current(self) -> Any:
        """The stream that the caller's work goes to."""
        ...

    def lane(self, number: int) -> Any:
        """The stream of a lane, the same one each time."""
        ...

    def on(self, stream: Any) -> AbstractContextManager:
        """Inside, work goes to that stream."""
        ...

    def record(self, stream: Any) -> Any:
        """An event that is there once all work so far on that stream has ended."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Work from now on on that stream starts after the event. The caller doesn't wait."""
        ...


class Cuda:
    """One GPU, by torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.finished: torch.cuda.Event | None = None

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def lane(self, number: int) -> torch.cuda.Stream:
        return _lane_stream(self._device, number)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager:
        return torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current())
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def machine_s(self, mark: torch.cuda.Event) -> None:
        return None

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


@cache
def _lane_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """torch has 32 streams of each priority on a device, and deals them out in turn."""
    return torch.cuda.Stream(device, priority=HIGH_PRIORITY)


def clock_of(device: torch.device) -> Clock:
    """The clock that work on a device is timed by."""
    return Cuda(device) if device.type == "cuda" else HostClock()
