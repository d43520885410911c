"""Calls for several points at once, in processes forked from this one: they have all that it has read."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from sp_bench.machine import cores_here, free_bytes
from sp_bench.termination import end_with_parent

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

    def __init__(self, exitcode: int | None) -> None:
        how = f"killed by {signal.Signals(-exitcode).name}" if exitcode and exitcode < 0 else f"ended with {exitcode}"
        super().__init__(f"the process that simulated the point was {how}, perhaps for want of memory")


def forked(
    function: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> Generator[tuple[Item, Result | ProcessEndedError], None, None]:
    """Each item with the function's result, or with the error that its process ended, as soon as it is known.

    Items are begun in their order. The function raises nothing, and its results can be pickled. The processes end with
    the iterator, and with this process.
    """
    todo, asked = iter(range(len(items))), dict[Connection, tuple[BaseProcess, int]]()

    def ask(process: BaseProcess, pipe: Connection) -> None:
        """Ask a process for the next item; end it if there is none."""
        index = next(todo, None)
        if index is None:
            _end(process, pipe)
            return
        asked[pipe] = process, index
        with suppress(OSError):  # it has ended, as is found out below
            pipe.send(index)

    try:
        for _ in range(min(processes, len(items))):
            ask(*_started(function, items))
        while asked:
            for pipe in wait([*asked]):
                assert isinstance(pipe, Connection)
                process, index = asked.pop(pipe)
                try:
                    result = pipe.recv()
                except (EOFError, OSError):
                    process.join(timeout=1)  # so that the exit code is its own
                    _end(process, pipe)
                    result = ProcessEndedError(process.exitcode)
                    process, pipe = _started(function, items)
                ask(process, pipe)
                yield items[index], result
    finally:
        for pipe, (process, _) in asked.items():
            _end(process, pipe)


def _started(function: Callable, items: Sequence[Any]) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(function, items, theirs), daemon=True)
    with warnings.catch_warnings():
        # A thread that draws a progress bar may hold the lock of a stream, which the process leaves alone.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return process, ours


def _answer(function: Callable, items: Sequence[Any], pipe: Connection) -> None:
    """A process: the function of the items whose numbers come, one after the other."""
    end_with_parent()
    with suppress(EOFError, OSError):
        while True:
            pipe.send(function(items[pipe.recv()]))
    os._exit(0)


def _end(process: BaseProcess, pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.join()
