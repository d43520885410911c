"""Clocks: how long a call takes on a device. A device whose calls return before they end needs one of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

AHEAD_CYCLES = 4_000_000
"""Of a GPU's clock, two milliseconds: longer than Python should take to launch a block's kernels."""
ATTEMPTS = 4
"""How often a call is launched at most, each time four times as long ahead. The last one counts whatever it was."""


def cpu_seconds(call: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """What a call took, and what it returned."""
    started = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - started, result


def cuda_seconds(call: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """What the kernels of a call took on the current GPU and stream, between two events, and what it returned."""
    attempt = 0
    while True:
        attempt += 1
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # While the GPU sleeps, all is launched, so that it waits for no launch between the events.
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
"""By device."""
