"""Whether processes end, and how long tests wait for that."""

from __future__ import annotations

import time
from pathlib import Path

SHORT_S = 4.0
"""A pool's patience in the tests of hangs: more than its ranks need to start."""


LONG_S = 120.0
"""How long a test waits for what should take a second or two, and takes half a minute where other tests are busy."""


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def survivors(pids: list[int], patience_s: float = LONG_S) -> list[int]:
    """The processes still there after a while."""
    deadline = time.monotonic() + patience_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
