"""Thread dumps of ranks that don't answer: what each thread executes (Python) and what it waits for (the kernel).

A rank is asked by two signals and writes a file for each: the stack of its main thread, which tells what to blame, then
those of all threads. Python can't write the latter safely while threads run, so they come second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WAITING_IN = ("torch/distributed", "torch/cuda")
"""Folders of torch in which a rank waits for others, itself or through work it has queued on its GPU."""
ANSWER_S = 1.0
"""Seconds a rank has to write a file."""
ASKED_BY = {"main": signal.SIGUSR1, "all": signal.SIGUSR2}
"""The signal that asks for each file, by the file's suffix."""
POLICIES = {0: "other", 1: "fifo", 2: "rr"}
"""Scheduling policies by Linux's numbers."""


@dataclass(frozen=True)
class Thread:
    """A thread as the kernel describes it."""

    name: str
    state: str
    """R runs or waits for a core, S sleeps, D sleeps and can't be woken, T is stopped."""
    policy: str
    """The scheduling policy: rr and fifo have priority over other."""
    core_s: float
    """Seconds on cores since the thread started."""
    sleeps_in: str
    """The kernel function it sleeps in; 0 if it doesn't sleep, or this user may not know."""


@dataclass(frozen=True)
class ThreadDump:
    """The threads of one rank. The stacks are empty if it doesn't react: it is stopped or deep in the kernel."""

    stack: list[str]
    """The main thread's frames, innermost first."""
    stacks: list[str]
    """The stacks of all threads, in lines as faulthandler writes them."""
    threads: list[Thread]
    core_share: float | None = None
    """The mean number of cores that the rank was busy on while it was asked; None if that isn't known."""

    @property
    def waits_for_others(self) -> bool:
        """Whether the main thread waits for other ranks."""
        for frame in self.stack[:4]:
            match = re.match(r'File "(.*)", line (\d+) in (.*)', frame)
            if match and (
                any(part in match[1] for part in WAITING_IN) or ".wait(" in linecache.getline(match[1], int(match[2]))
            ):
                return True
        return False


NO_DUMP = ThreadDump([], [], [])
"""The dump of a rank that can't be asked."""


@contextlib.contextmanager
def dumping(path: Path) -> Iterator[None]:
    """In a rank's process: write the dump to files beside `path` when asked."""
    with contextlib.ExitStack() as files:
        for which, asked_by in ASKED_BY.items():
            file = files.enter_context(open(_file(path, which), "w"))
            faulthandler.register(asked_by, file=file, all_threads=which == "all")
            files.callback(faulthandler.unregister, asked_by)
        yield


def dump(ranks: Sequence[tuple[int, Path]]) -> list[ThreadDump]:
    """The dump of each process, given its pid and the `path` of its `dumping`. All are asked at once."""
    before, began_s = [_core_s(threads_of(pid)) for pid, _ in ranks], time.monotonic()
    for asked_by in ASKED_BY.values():
        for pid, _ in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, asked_by)
        time.sleep(ANSWER_S)
    dumps, took_s = [], time.monotonic() - began_s
    for (pid, path), core_s in zip(ranks, before, strict=True):
        frames = [line.strip() for line in _lines(_file(path, "main")) if line.strip().startswith("File ")]
        threads = threads_of(pid)
        share = max(0.0, _core_s(threads) - core_s) / took_s if threads else None
        dumps.append(ThreadDump(frames, _lines(_file(path, "all")), threads, share))
    return dumps


def threads_of(pid: int) -> list[Thread]:
    """The threads of a process, the main one first; empty on systems other than Linux, or if the process has ended."""
    tasks = sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda task: int(task.name))
    return [thread for task in tasks if (thread := _thread(task))]


def _core_s(threads: Sequence[Thread]) -> float:
    return sum(thread.core_s for thread in threads)


def as_json(dumps: Mapping[int, ThreadDump]) -> dict[str, Any]:
    """The dumps by rank, as a JSON object."""
    return {str(rank): asdict(one) for rank, one in dumps.items()}


def _thread(task: Path) -> Thread | None:
    try:
        name, fields = task.joinpath("comm").read_text().strip(), task.joinpath("stat").read_text()
    except OSError:
        return None
    state, *numbers = fields.rpartition(")")[2].split()
    user, system, policy = (int(numbers[place]) for place in (10, 11, 37))
    sleeps_in = "0"
    with contextlib.suppress(OSError):
        sleeps_in = task.joinpath("wchan").read_text()
    core_s = (user + system) / os.sysconf("SC_CLK_TCK")
    return Thread(name, state, POLICIES.get(policy, str(policy)), core_s, sleeps_in)


def _file(path: Path, which: str) -> Path:
    return path.with_name(f"{path.name}.{which}")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
