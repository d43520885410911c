"""Orderly exit on SIGTERM, which SLURM sends before it kills. Imports no torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(BaseException):
    """This process has received `signal` and must end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


class _Here:
    """The state of this process."""

    received: signal.Signals | None = None
    deferring = 0


@contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated on SIGTERM inside the block, the process's outermost: at its end the signal is forgotten."""
    handler, hook = signal.signal(signal.SIGTERM, _receive), sys.unraisablehook
    sys.unraisablehook = _all_but_terminated(hook)
    try:
        yield
    finally:
        _Here.received = None
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Delay Terminated to the end of the block: a resource that is half made could not be closed."""
    _Here.deferring += 1
    try:
        yield
    finally:
        _Here.deferring -= 1
        raise_if_terminated()


def raise_if_terminated() -> None:
    """Raise Terminated if the signal has come. An exception raised in a callback from C may have been lost.

    Call it before blaming a failure on a rank: the rank's process may have received the same signal.
    """
    if _Here.received and not _Here.deferring:
        raise Terminated(_Here.received)


def end_with_parent() -> None:
    """End this process, one of multiprocessing's, when its parent ends, and at once on Ctrl-C or SIGTERM."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _all_but_terminated(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """`hook` without Terminated, which is raised again later, for exceptions lost in callbacks from C."""
    return lambda lost: None if isinstance(lost.exc_value, Terminated) else hook(lost)


def _receive(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not disturb the orderly exit, which takes a moment
    _Here.received = signal.Signals(number)
    raise_if_terminated()
