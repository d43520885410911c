"""Clocks: how long a call takes on a device. A device whose calls return before they end needs one of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def cpu_seconds(call: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """What a call took, and what it returned."""
    started = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - started, result


Clock = Callable[..., tuple[float, Any]]

CLOCKS: dict[str, Clock] = {"cpu": cpu_seconds}
"""By device. One for CUDA would record an event before and after the call, and wait for the second."""
