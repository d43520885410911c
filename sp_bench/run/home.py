"""Where this process lives: on the machine as it is, unless a laboratory (sp_bench/labs) made a host for it."""

from __future__ import annotations


class Home:
    """The machine as it is. Hosts of a laboratory have homes of their own, which are sent to the ranks' processes."""

    transfers_first: bool = False
    """Whether threads that transfer run before those that compute, so that transfers must be posted from lanes."""

    def enter(self) -> None:
        """Make this process live here, before it joins a process group."""

    def put_transfers_first(self) -> None:
        """Where `transfers_first`, give priority to the calling lane's thread or, from the main one, to all others."""

    def link_bytes(self) -> tuple[int, int] | None:
        """What this host has (sent, received) over its link, headers included; None where no link is its own."""
        return None


_home = Home()


def home() -> Home:
    """Where this process lives."""
    return _home


def move_to(new: Home) -> None:
    """Make this process live there, before it joins a process group."""
    global _home
    new.enter()
    _home = new
