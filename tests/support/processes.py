"""Whether processes end, and how long tests wait for that and for other things."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

SHORT_S = 4.0
"""A pool's patience in the tests of hangs: more than its ranks need to start."""


LONG_S = 120.0
"""How long a test waits for what should take a second or two, and takes half a minute where other tests are busy."""


def wait_for(condition: Callable[[], object], what: str, patience_s: float = LONG_S, *, every_s: float = 0.05) -> None:
    """Wait until condition() is true, asking again after `every_s`. Raises TimeoutError after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience_s:g} s for {what}")
        time.sleep(every_s)


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
