"""What this machine has: cores, memory, GPUs."""

from __future__ import annotations

import os
from pathlib import Path


def cores_here() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus_here() -> int:
    """NVIDIA GPUs, counted without loading a driver."""
    return sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))


def free_bytes() -> int:
    """Memory that can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
