"""The host environment of this process: the real machine, or an emulated host made by a lab (sp_bench/labs)."""

from __future__ import annotations


class Home:
    """The real machine. Labs subclass it for emulated hosts, and send the object to the ranks' processes."""

    transfers_first: bool = False
    """Whether transfer threads have priority over compute threads; then lanes must post the transfers."""

    def enter(self) -> None:
        """Move this process to the host. Call it before joining a process group."""

    def put_transfers_first(self) -> None:
        """Raise the priority of the calling lane thread or, from the main thread, of all other threads.

        Does nothing unless `transfers_first`.
        """

    def link_bytes(self) -> tuple[int, int] | None:
        """Bytes this host has (sent, received) over its link, headers included; None if it has no link of its own."""
        return None


_home = Home()


def home() -> Home:
    """Return the host environment of this process."""
    return _home


def move_to(new: Home) -> None:
    """Move this process to another host environment. Call it before joining a process group."""
    global _home
    new.enter()
    _home = new
