"""A launch: processes that srun or torchrun started together, as their environment describes it. Imports no torch."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from sp_bench.errors import RequestError
from sp_bench.machine import cores_here, output_of


class RankCountError(RequestError):
    """A point needs another number of ranks than the launch has."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch, as one of its processes sees it."""

    by: str
    """srun or torchrun."""
    rank: int
    n: int
    ranks_by_node: tuple[int, ...]
    """The number of ranks on each node."""
    ranks_here: int
    """The number of ranks on this process's host, including this one."""
    cores_here: int
    """The number of cores that the ranks on this host share."""
    address: str
    """The address of rank 0's host."""
    name: str
    """The launch's name: the same in all its processes, and unique."""
    future: bool = False
    """Whether it is yet to start, on machines that this one says nothing about."""

    def refuse(self, gpus: int) -> None:
        """Raise RankCountError unless a point needs n ranks."""
        if gpus != self.n:
            rule = f"{self.by} has started {self.n} ranks"
            raise RankCountError(f"gpus={gpus}", rule, f"gpus={self.n}, or mode=simulate, would work")

    @staticmethod
    def planned(n: int) -> Launch:
        """A future launch of n ranks, none of them on this machine."""
        return Launch(
            by="srun", rank=0, n=n, ranks_by_node=(), ranks_here=0, cores_here=1, address="", name="", future=True
        )


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch that this process belongs to; None if it was started alone.

    A single task is no launch: it may fork ranks of its own.
    """
    by_torchrun = "WORLD_SIZE" in environment and "RANK" in environment
    by_srun = "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment
    if by_torchrun and int(environment["WORLD_SIZE"]) > 1:
        return _of_torchrun(environment)
    if by_srun and not by_torchrun and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return _of_srun(environment)
    return None


def _of_torchrun(environment: Mapping[str, str]) -> Launch:
    keys = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    n = int(environment["WORLD_SIZE"])
    local_ranks = int(environment.get("LOCAL_WORLD_SIZE", n))
    return Launch(
        by="torchrun",
        rank=int(environment["RANK"]),
        n=n,
        ranks_by_node=(local_ranks,) * (n // local_ranks),
        ranks_here=local_ranks,
        cores_here=cores_here(),
        address=environment.get("MASTER_ADDR", "localhost"),
        name="/".join(environment.get(key, "") for key in keys),
    )


def _of_srun(environment: Mapping[str, str]) -> Launch:
    """The launch of an srun step. Its name has the array task's own job id and a requeued job's restart count."""
    keys = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    cores, by_node = os.cpu_count() or 1, tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    return Launch(
        by="srun",
        rank=int(environment["SLURM_PROCID"]),
        n=int(environment["SLURM_STEP_NUM_TASKS"]),
        ranks_by_node=by_node,
        ranks_here=by_node[int(environment["SLURM_NODEID"])],
        cores_here=min(cores, int(environment.get("SLURM_CPUS_ON_NODE", cores))),
        address=_address(first_host(environment["SLURM_STEP_NODELIST"])),
        name="/".join(environment.get(key, "") for key in keys),
    )


def first_host(node_list: str) -> str:
    """The first host of a list as SLURM writes it: r1n03 for r[1-2]n[03-05,9],login."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    assert match
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def tasks_per_node(text: str) -> tuple[int, ...]:
    """The number of tasks on each node, which SLURM writes as 2(x3),1."""
    counts: list[int] = []
    for part in text.split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    return tuple(counts)


def _address(node: str) -> str:
    """The node's name if it resolves, otherwise the address that SLURM has for it."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        shown = output_of("scontrol", "show", "node", node, "--oneliner", timeout_s=30)
        match = re.search(r"\bNodeAddr=(\S+)", shown or "")
        return match[1] if match else node
    return node


def host_name() -> str:
    """The name of this process's host: in a SLURM job, the node's name."""
    return os.environ.get("SLURMD_NODENAME", platform.node())
