"""SIGTERM, which SLURM sends before it kills, ends a process in order. Imports no torch."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Told(BaseException):
    """This process is to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class _Here:
    """What this process has been told."""

    by: signal.Signals | None = None
    busy = 0


@contextmanager
def leaving() -> Iterator[None]:
    """Inside, SIGTERM raises Told. For the outermost of a process: it is forgotten at the end."""
    handler, hook = signal.signal(signal.SIGTERM, _leave), sys.unraisablehook
    sys.unraisablehook = _all_but_told(hook)
    try:
        yield
    finally:
        _Here.by = None
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def not_now() -> Iterator[None]:
    """Inside, nothing is raised, but at the end: half of what is made here would be of no use, and stay."""
    _Here.busy += 1
    try:
        yield
    finally:
        _Here.busy -= 1
        leave_if_told()


def leave_if_told() -> None:
    """End, where this process has been told to and goes on: what a signal raises is lost in callbacks from C.

    To be asked before a failure is put down to somebody: its processes may have been told the same.
    """
    if _Here.by and not _Here.busy:
        raise Told(_Here.by)


def _all_but_told(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """What is lost in a callback from C is `hook`'s, but for Told: that is raised once more."""
    return lambda lost: None if isinstance(lost.exc_value, Told) else hook(lost)


def _leave(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # leaving takes a moment, and is not to be disturbed
    _Here.by = signal.Signals(number)
    leave_if_told()
