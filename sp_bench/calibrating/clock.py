"""Clocks: how long a call takes on a device. A device whose calls return before they end needs one of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

AHEAD_CYCLES = 2_000_000
"""Of a GPU's clock, about a millisecond: longer than Python takes to launch a block's kernels."""


def cpu_seconds(call: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """What a call took, and what it returned."""
    started = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - started, result


def cuda_seconds(call: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """What the kernels of a call took on the current GPU and stream, between two events, and what it returned."""
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # While the GPU sleeps, all is launched, so that it waits for no launch between the events.
    torch.cuda._sleep(AHEAD_CYCLES)
    started.record()
    result = call(*arguments)
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1e3, result


Clock = Callable[..., tuple[float, Any]]

CLOCKS: dict[str, Clock] = {"cpu": cpu_seconds, "cuda": cuda_seconds}
"""By device."""
