"""The resident memory of this process, from the kernel's own accounts (Linux)."""

from __future__ import annotations

import contextlib
from pathlib import Path

_SELF = Path("/proc/self")


def resident_bytes() -> int:
    """What is resident now; 0 where the kernel doesn't say."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most that was resident since `forget_peak`, or since the process began; 0 where the kernel doesn't say."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Start the peak anew, where the kernel lets a process do that."""
    with contextlib.suppress(OSError):
        (_SELF / "clear_refs").write_text("5")


def _status(key: str) -> int:
    try:
        lines = (_SELF / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
