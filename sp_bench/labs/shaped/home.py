"""What a process does that lives on a shaped host."""

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
"""The interface of a host's link: a name that no real machine has."""

SLICE_NS = 100_000_000
"""The longest time for which Linux lets a thread ask."""
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The number of that system call, which libc may not name."""


@dataclass(frozen=True)
class ShapedHome(Home):
    """A shaped host, on which one or more ranks live."""

    place: str
    """The path of the host's namespace."""
    transfers_first: bool = True

    def enter(self) -> None:
        namespaces.enter(self.place)
        os.environ["GLOO_SOCKET_IFNAME"] = LINK

    def put_transfers_first(self) -> None:
        """Let threads that transfer run before any that computes, as a network's hardware does.

        Otherwise a message waits for the cores that blocks are on, which took milliseconds where 16 ranks share 2. A
        user without the right to do so leaves threads as they are. The main thread asks for long slices of time (Linux
        6.12), so that after a message the same rank's block goes on: otherwise each hands a core on to another rank's,
        which finds cold caches, and blocks take up to a tenth longer.

        Transfers must then be posted from lanes: gloo's thread asks again and again for a lock that another holds, and
        so keeps a main thread from the core that it would need to let it go. Threads with priority take turns
        (SCHED_RR) so that none can keep another of them from it.
        """
        if not self.transfers_first:
            return
        mine = [int(thread) for thread in os.listdir("/proc/self/task")]
        here = threading.get_native_id()
        if here == os.getpid():
            _ask_for_long_slices()
        with contextlib.suppress(PermissionError):
            for thread in mine if here == os.getpid() else [here]:
                if thread != os.getpid():
                    os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))

    def link_bytes(self) -> tuple[int, int] | None:
        return link_bytes()


def _ask_for_long_slices() -> None:
    """For the calling thread. Kernels that have no such slices, or no such call, leave everything as it is."""
    if number := SCHED_SETATTR.get(platform.machine()):
        size, flags, priority, nice = 48, 0, 0, os.getpriority(os.PRIO_PROCESS, 0)
        wanted = struct.pack("IIQiIQQQ", size, os.SCHED_OTHER, flags, nice, priority, SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, wanted, 0)


def link_bytes() -> tuple[int, int] | None:
    """What the calling thread's host has (sent, received) over its link, headers included; None if it is on none.

    Packets are counted as they leave the host's queue. A packet of several segments counts with one header.
    """
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == LINK:
            received, sent = (int(counters.split()[i]) for i in (0, 8))
            return sent, received
    return None
