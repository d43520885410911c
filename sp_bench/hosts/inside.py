"""What a process does that lives on a shaped host."""

from __future__ import annotations

import os
from pathlib import Path

from sp_bench.hosts import namespaces

LINK = "shaped0"
"""The interface of a host's link: a name that no real machine has."""


def move_in(place: str) -> None:
    """Make this process one of the host whose namespace is at that path, before it joins a process group."""
    namespaces.enter(place)
    os.environ["GLOO_SOCKET_IFNAME"] = LINK


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
