"""Emulated hosts that a laboratory (sp_bench/labs) makes for the ranks of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sp_bench.run.home import Home

if TYPE_CHECKING:
    from sp_bench.cluster.cluster import Cluster


class Homes(Protocol):
    """Hosts that exist until they are closed, and the ranks on each."""

    @property
    def ranks_by_host(self) -> dict[str, list[int]]:
        """The ranks on each host, by the host's name."""
        ...

    def home_of(self, rank: int) -> Home:
        """The host environment that the rank's process must move to (run.home). It is pickled for that process."""
        ...

    def close(self) -> None:
        """Release the hosts."""


def homes_for(cluster: Cluster, ranks: int, *, transfers_first: bool = True) -> Homes | None:
    """The emulated hosts of a cluster, made for that many ranks; None if it has none.

    transfers_first=False takes away the priority of transfers over blocks that the hosts may give.
    Raises RequestError if the hosts can't be made.
    """
    from sp_bench.cluster.emulation import lab_module

    if cluster.hosts is None:
        return None
    host_of = cluster.node_of(ranks).tolist()
    return lab_module(cluster.hosts.lab, "hosts").make(cluster.hosts, host_of, transfers_first=transfers_first)
