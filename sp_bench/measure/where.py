"""Where a rank is that doesn't answer: what its threads execute, by Python, and what they wait for, by the kernel.

A rank writes two files when it is asked by signals: the stack of its main thread, by which the blame is found, and
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
from typing import Any, NamedTuple

WAITING_IN = ("torch/distributed", "torch/cuda")
"""Where in torch a rank waits for others, itself or by what it has queued on its GPU."""
ANSWER_S = 1.0
"""How long a rank has to write a file."""
ASKED_BY = {"main": signal.SIGUSR1, "all": signal.SIGUSR2}
"""The file's suffix, and the signal that asks for it."""
POLICIES = {0: "other", 1: "fifo", 2: "rr"}
"""Linux's numbers of them."""


class Thread(NamedTuple):
    """What the kernel says of a thread."""

    name: str
    state: str
    """R runs or waits for a core, S sleeps, D sleeps and can't be woken, T is stopped."""
    policy: str
    """How it gets cores: rr and fifo have priority over other."""
    core_s: float
    """Seconds on cores since it started."""
    sleeps_in: str
    """A function of the kernel; 0 where it doesn't sleep, or one may not know."""


@dataclass(frozen=True)
class Where:
    """Where one rank is. A rank that doesn't react, as it is stopped or deep in the kernel, has no stack."""

    stack: list[str]
    """Of the main thread, innermost frame first."""
    stacks: list[str]
    """Of all threads, line by line as faulthandler writes them."""
    threads: list[Thread]

    @property
    def waits_for_others(self) -> bool:
        """Whether its main thread does."""
        for frame in self.stack[:4]:
            match = re.match(r'File "(.*)", line (\d+) in (.*)', frame)
            if match and (
                any(part in match[1] for part in WAITING_IN) or ".wait(" in linecache.getline(match[1], int(match[2]))
            ):
                return True
        return False


NOWHERE = Where([], [], [])
"""Of a rank that nobody can ask."""


@contextlib.contextmanager
def answering(path: Path) -> Iterator[None]:
    """In a rank's process: write to files beside `path` where it is, when asked."""
    with contextlib.ExitStack() as files:
        for who, asked_by in ASKED_BY.items():
            file = files.enter_context(open(_file(path, who), "w"))
            faulthandler.register(asked_by, file=file, all_threads=who == "all")
            files.callback(faulthandler.unregister, asked_by)
        yield


def ask(ranks: Sequence[tuple[int, Path]]) -> list[Where]:
    """Where each process is, given its number and the `path` of its `answering`. All are asked at once."""
    for asked_by in ASKED_BY.values():
        for pid, _ in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, asked_by)
        time.sleep(ANSWER_S)
    found = []
    for pid, path in ranks:
        frames = [line.strip() for line in _lines(_file(path, "main")) if line.strip().startswith("File ")]
        found.append(Where(frames, _lines(_file(path, "all")), threads_of(pid)))
    return found


def threads_of(pid: int) -> list[Thread]:
    """What Linux says of the threads of a process, the main one first; none on another system, or once it has ended."""
    tasks = sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda task: int(task.name))
    return [found for task in tasks if (found := _thread(task))]


def as_json(where: Mapping[int, Where]) -> dict[str, Any]:
    """For a file, by rank."""
    return {
        str(rank): asdict(found) | {"threads": [thread._asdict() for thread in found.threads]}
        for rank, found in where.items()
    }


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


def _file(path: Path, who: str) -> Path:
    return path.with_name(f"{path.name}.{who}")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
