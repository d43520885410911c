"""The ranks of a point: forked on this machine, or started by srun or torchrun together with this process.

Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from sp_bench.measure.agents import LaunchedRanks, agents_of_launch, run_agent
from sp_bench.measure.devices import CPUS, Devices
from sp_bench.measure.launch import Launch, launched
from sp_bench.measure.pool import RankPool
from sp_bench.measure.termination import Terminated, terminable

if TYPE_CHECKING:
    from sp_bench.measure.homes import Homes


def drive(answer: Callable[[], int]) -> int:
    """Call answer(), in a launch only on rank 0's process; the others are agents. All return its exit code.

    SIGTERM, which SLURM sends before it kills, ends ranks, logger and launch in order, with exit code 143.
    """
    launch = launched()
    if launch and launch.rank:
        return run_agent(launch)
    code = 1
    with terminable():
        try:
            code = answer()
        except Terminated as terminated:
            code = 128 + terminated.signal
            print(f"sp_bench: ended by {terminated.signal.name}; finished points are kept", file=sys.stderr)
        finally:
            if launch:
                agents_of_launch().dismiss(code)
    return code


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
    hosts = pool.run("sp_bench.measure.launch:host_name")
    return {host: [rank for rank, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)}
