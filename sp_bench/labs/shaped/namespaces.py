"""Network namespaces without names. The kernel removes one when no process is in it or has it open."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

CLONE_NEWNET = 0x40000000
T = TypeVar("T")


def new() -> int:
    """Make a namespace; return a file descriptor that holds it. Raises OSError without the rights."""

    def kept() -> int:
        _call("unshare", CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    return _in_a_thread(kept)


def path(namespace: int) -> str:
    """The path by which the same user's processes can open a namespace of this process."""
    return f"/proc/{os.getpid()}/fd/{namespace}"


def enter(place: str) -> None:
    """Move the calling thread, and processes it starts from now on, to the namespace at a path."""
    namespace = os.open(place, os.O_RDONLY)
    try:
        _call("setns", namespace, CLONE_NEWNET)
    finally:
        os.close(namespace)


def call_inside(place: str, call: Callable[[], T]) -> T:
    """Run call() inside the namespace at a path. The calling thread stays in its own."""

    def inside() -> T:
        enter(place)
        return call()

    return _in_a_thread(inside)


def _call(name: str, *arguments: int) -> None:
    """Call a function of libc; Python has setns and unshare only from 3.12 on. Raises OSError if it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_a_thread(call: Callable[[], T]) -> T:
    """Run call() in a new thread, which may change its network namespace."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
