"""Clocks that time a call on a device. A GPU needs its own, because calls return before their kernels end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

AHEAD_CYCLES = 4_000_000
"""GPU clock cycles, about two milliseconds: longer than Python should take to launch a block's kernels."""
ATTEMPTS = 4
"""The most launches of a call, each with four times as much time for it. The last one counts in any case."""


def cpu_seconds(call: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """The duration of a call, and its result."""
    started = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - started, result


def cuda_seconds(call: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """The duration of a call's kernels on the current GPU and stream, between two events, and the call's result."""
    attempt = 0
    while True:
        attempt += 1
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # All is launched while the GPU sleeps, so that the GPU waits for no launch between the events.
        torch.cuda._sleep(4 ** (attempt - 1) * AHEAD_CYCLES)
        started.record()
        result = call(*arguments)
        ended.record()
        slept_long_enough = not started.query()
        ended.synchronize()
        if slept_long_enough or attempt == ATTEMPTS:
            return started.elapsed_time(ended) / 1e3, result


Clock = Callable[..., tuple[float, Any]]

CLOCKS: dict[str, Clock] = {"cpu": cpu_seconds, "cuda": cuda_seconds}
"""The clock of each device."""
