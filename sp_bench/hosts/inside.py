"""What a process does that lives on a shaped host."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

from sp_bench.hosts import namespaces

LINK = "shaped0"
"""The interface of a host's link: a name that no real machine has."""


class Home(NamedTuple):
    """Where a rank lives."""

    place: str
    """The path of its host's namespace."""
    transfers_first: bool
    """Whether `transfers_go_first` does anything there."""


_home: Home | None = None


def move_in(home: Home) -> None:
    """Make this process one of a host, before it joins a process group."""
    global _home
    namespaces.enter(home.place)
    os.environ["GLOO_SOCKET_IFNAME"], _home = LINK, home


def transfers_go_first() -> bool:
    """On a host, let all threads but the main one run before any that computes, as a network's hardware does.

    A lane's thread calls it too, as it starts. Otherwise a message waits for the cores that blocks are on, which took
    milliseconds where 16 ranks share 2. Whether this user may; False on no host, or one whose transfers don't.

    Transfers must then be posted from lanes: gloo's thread starves a main thread that would post what it waits for.
    """
    if not _home or not _home.transfers_first:
        return False
    mine = [int(thread) for thread in os.listdir("/proc/self/task")]
    here = threading.get_native_id()
    try:
        for thread in mine if here == os.getpid() else [here]:
            if thread != os.getpid():
                os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    return True


def interface_bytes() -> tuple[int, int] | None:
    """What the calling thread's host has (sent, received) over its link, headers included; None if it is on none.

    Packets are counted as they leave the host's queue. A packet of several segments counts with one header.
    """
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == LINK:
            received, sent = (int(counters.split()[i]) for i in (0, 8))
            return sent, received
    return None
