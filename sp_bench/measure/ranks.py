"""The ranks of a point: forked on this machine, or started by srun or torchrun together with this process.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sp_bench.launch import Launch
from sp_bench.machine import CPUS, Devices
from sp_bench.measure.agents import LaunchedRanks, agents_of_launch
from sp_bench.measure.pool import RankPool

if TYPE_CHECKING:
    from sp_bench.measure.homes import Homes


def open_ranks(
    n: int, timeout_s: float, launch: Launch | None, hosts: Homes | None = None, devices: Devices = CPUS
) -> RankPool:
    """A pool of n ranks: the launch's if there is one, otherwise processes of this machine, on `hosts` if given.

    Raises RankFailure if a process of the launch is gone.
    """
    if launch is None:
        return RankPool(n, timeout_s, hosts, devices)
    launch.refuse(n)
    return LaunchedRanks(agents_of_launch(), timeout_s, devices)


def ranks_by_host(pool: RankPool) -> dict[str, list[int]]:
    """The ranks on each host, by the host's name."""
    if pool.hosts:
        return pool.hosts.ranks_by_host
    hosts = pool.run("sp_bench.launch:host_name")
    return {host: [rank for rank, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)}
