"""The host environment of a process on a shaped host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

from sp_bench.labs.shaped import namespaces
from sp_bench.run.home import Home

LINK = "shaped0"
"""The network interface of a host's link, a name that no real machine has."""

SLICE_NS = 100_000_000
"""The longest time slice that Linux lets a thread ask for."""
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The number of the system call sched_setattr, which libc may lack."""


@dataclass(frozen=True)
class ShapedHome(Home):
    """A shaped host, with one rank or more."""

    place: str
    """The path of the host's namespace."""
    transfers_first: bool = True

    def enter(self) -> None:
        namespaces.enter(self.place)
        os.environ["GLOO_SOCKET_IFNAME"] = LINK

    def put_transfers_first(self) -> None:
        """Give transfer threads priority over compute threads, since a network's hardware needs no cores.

        Otherwise a message waits for a core that a block has: milliseconds if 16 ranks share 2. Without the right
        to set priorities, threads stay as they are. The main thread asks for long time slices (Linux 6.12), so that
        the same rank's block continues after a message. Otherwise another rank's block gets the core, with cold
        caches, and blocks take up to a tenth longer.

        With priority, lanes must post the transfers: gloo's thread polls a lock that another thread holds, and would
        keep a main thread from the core it needs to release it. Threads with priority take turns (SCHED_RR), so that
        none blocks another.
        """
        if not self.transfers_first:
            return
        mine = [int(thread) for thread in os.listdir("/proc/self/task")]
        own_thread = threading.get_native_id()
        if own_thread == os.getpid():
            _ask_for_long_slices()
        with contextlib.suppress(PermissionError):
            for thread in mine if own_thread == os.getpid() else [own_thread]:
                if thread != os.getpid():
                    with contextlib.suppress(ProcessLookupError):  # it has ended since
                        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))

    def link_bytes(self) -> tuple[int, int] | None:
        return link_bytes()


def _ask_for_long_slices() -> None:
    """Ask for long time slices for the calling thread. Kernels without them, or without the call, change nothing."""
    if number := SCHED_SETATTR.get(platform.machine()):
        size, flags, priority, nice = 48, 0, 0, os.getpriority(os.PRIO_PROCESS, 0)
        wanted = struct.pack("IIQiIQQQ", size, os.SCHED_OTHER, flags, nice, priority, SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, wanted, 0)


def link_bytes() -> tuple[int, int] | None:
    """Bytes that the calling thread's host has (sent, received) over its link, headers included; None without a link.

    Packets count when they leave the host's queue. A packet of several segments counts with one header.
    """
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == LINK:
            received, sent = (int(counters.split()[i]) for i in (0, 8))
            return sent, received
    return None
