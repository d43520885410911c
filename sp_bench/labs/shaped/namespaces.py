"""Network namespaces without names: the kernel removes one as soon as no process is in it or has it open."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

CLONE_NEWNET = 0x40000000
T = TypeVar("T")


def new() -> int:
    """A new namespace, kept by the file descriptor that this returns. Raises OSError where it isn't allowed."""

    def kept() -> int:
        _call("unshare", CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    return _in_a_thread(kept)


def path(namespace: int) -> str:
    """Where other processes of the same user find a namespace that this process has open."""
    return f"/proc/{os.getpid()}/fd/{namespace}"


def enter(place: str) -> None:
    """Move the calling thread, and what it starts from now on, to the namespace at that path."""
    namespace = os.open(place, os.O_RDONLY)
    try:
        _call("setns", namespace, CLONE_NEWNET)
    finally:
        os.close(namespace)


def call_inside(place: str, call: Callable[[], T]) -> T:
    """call() from inside the namespace at that path; the caller stays where it is."""

    def inside() -> T:
        enter(place)
        return call()

    return _in_a_thread(inside)


def _call(name: str, *arguments: int) -> None:
    """A system call by its function in libc: Python has these two from 3.12 on."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_a_thread(call: Callable[[], T]) -> T:
    """In a thread of its own: a thread has its own network namespace, and takes it to its end."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
