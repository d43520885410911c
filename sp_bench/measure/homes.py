"""Hosts that a laboratory (sp_bench/labs) makes for the ranks of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sp_bench.run.home import Home

if TYPE_CHECKING:
    from sp_bench.cluster.cluster import Cluster
    from sp_bench.cluster.emulation import EmulatedHosts


class Homes(Protocol):
    """Hosts that are there, until they are closed, and the ranks that are to live on them."""

    @property
    def ranks_by_host(self) -> dict[str, list[int]]:
        """The ranks on each host, by its name."""
        ...

    def home_of(self, rank: int) -> Home:
        """Where that rank's process must move to (run.home). It is pickled on its way there."""
        ...

    def close(self) -> None:
        """Let go of the hosts."""
        ...


def homes_for(cluster: Cluster, ranks: int, *, transfers_first: bool = True) -> Homes | None:
    """The emulated hosts of a cluster, made for that many ranks; None where it has none. Raises RequestError.

    `transfers_first` false takes from transfers the priority over blocks that the hosts may give them.
    """
    from sp_bench.cluster.emulation import lab_module

    if cluster.hosts is None:
        return None
    host_of = cluster.node_of(ranks).tolist()
    return lab_module(cluster.hosts.lab, "hosts").make(cluster.hosts, host_of, transfers_first=transfers_first)


def refuse_hosts(hosts: EmulatedHosts) -> None:
    """Raise RequestError where such hosts can't be made here."""
    from sp_bench.cluster.emulation import lab_module

    lab_module(hosts.lab, "hosts").refuse(hosts)
