"""Calls for several points at once, in processes forked from this one: they have all that it has read."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from sp_bench.machine import cores_here, exit_reason, free_bytes, oom_kills
from sp_bench.termination import deferred, end_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST = 8
POINT_BYTES = 2 << 30
"""Memory that simulating a point of 4096 GPUs takes at most."""


def processes_here() -> int:
    """How many points are simulated at once: one on each core, MOST at most, where memory holds as many large ones.

    Elsewhere than on Linux one, as the system's libraries may hang in a forked process.
    """
    if sys.platform != "linux":
        return 1
    return max(1, min(cores_here(), MOST, free_bytes() // POINT_BYTES))


class ProcessEndedError(Exception):
    """A process ended before it answered."""

    def __init__(self, exitcode: int, oom_kills_before: int) -> None:
        self.signal = -exitcode if exitcode < 0 else None
        how = "was" if self.signal else "ended with"
        super().__init__(f"the process that simulated the point {how} {exit_reason(exitcode, oom_kills_before)}")


def forked(
    function: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> Generator[tuple[Item, Result | Exception], None, None]:
    """Each item with the function's result, as soon as it is known, or with the error that there was instead: a result
    that can't be pickled, or a process that ended (ProcessEndedError).

    Items are begun in their order; in this process where none can be forked. The processes end with the iterator.
    """
    todo, workers = deque(range(len(items))), list[Worker]()

    def start() -> None:
        """Fork a process for the next item, if there is one and the machine has room for a process."""
        if todo:
            with suppress(OSError):
                with deferred():
                    workers.append(Worker(function, items))
                workers[-1].ask(todo)

    try:
        for _ in range(min(processes, len(items))):
            start()
        while busy := {worker.pipe: worker for worker in workers if worker.index is not None}:
            for pipe in wait([*busy]):
                assert isinstance(pipe, Connection)
                worker = busy[pipe]
                assert worker.index is not None
                item = items[worker.index]
                try:
                    result = pickle.loads(worker.pipe.recv_bytes())
                except (EOFError, OSError):
                    workers.remove(worker)
                    yield item, worker.ending()
                    start()
                    continue
                except Exception as error:  # it can't be read
                    result = error
                worker.ask(todo)
                yield item, result
        while todo:
            item = items[todo.popleft()]
            yield item, function(item)
    finally:
        for worker in workers:
            worker.end()


class Worker:
    """A process that calls the function for one item after the other."""

    def __init__(self, function: Callable, items: Sequence[Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.index: int | None = None
        """The item that it is at."""
        self._oom_kills = oom_kills()
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(function, items, theirs), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of threads, whose locks stay locked in the process. Here one draws a progress bar, and
            # has those of the streams, in whose place the process opens its own.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def ask(self, todo: deque[int]) -> None:
        """Ask for the next item, if there is one."""
        self.index = todo.popleft() if todo else None
        with suppress(OSError):  # it has ended, which is found when its answer is read
            self.pipe.send(self.index)

    def ending(self) -> ProcessEndedError:
        """How the process has ended, after its pipe has closed."""
        self._process.join(timeout=1)
        self.end()
        return ProcessEndedError(self._process.exitcode or 0, self._oom_kills)

    def end(self) -> None:
        """End the process, and wait until it has ended."""
        self.pipe.close()
        self._process.kill()
        self._process.join()


def as_worker() -> None:
    """Have this forked process end with its parent, and write by streams of its own: a thread of the parent may have
    had the locks of the others.
    """
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    end_with_parent()


def _answer(function: Callable, items: Sequence[Any], pipe: Connection) -> None:
    as_worker()
    with suppress(EOFError, OSError):
        while (index := pipe.recv()) is not None:
            try:
                answer = pickle.dumps(function(items[index]))
            except MemoryError:
                answer = pickle.dumps(MemoryError())
            except Exception as error:
                answer = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
            pipe.send_bytes(answer)
    os._exit(0)
