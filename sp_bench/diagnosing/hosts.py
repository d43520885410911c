"""Findings on hosts and on how ranks were placed on them. Touches no machine and imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sp_bench.diagnosing.findings import Finding, finding
from sp_bench.diagnosing.seen import HostFacts, RankFacts
from sp_bench.launch import Launch

SHM_BYTES_PER_GPU = 64 * 2**20
"""Shared memory that NCCL may take for each GPU of a host."""
OPEN_FILES = 4096
BUSY_SHARE = 0.25
"""The share of a host's cores that other processes may take."""
MINUTES = 60
"""An allocation with less time left than this, in minutes, is too short for a first hour."""
ACTIVE = "ACTIVE"
PLACED = "--cpus-per-task=8 --distribution=block:block --cpu-bind=cores --gpu-bind=none"
"""srun's options that give each rank cores at its own GPU's socket, and all ranks of a host all its GPUs."""


def judge_hosts(hosts: Sequence[HostFacts], ranks: Sequence[RankFacts], before: float) -> list[Finding]:
    """Findings on each host. `before` is the load of the first host before the ranks started."""
    findings = []
    for i, host in enumerate(hosts):
        load = before if i == 0 else host.load
        of_gpus = sum(rank.host == host.host and "cuda" in rank.device for rank in ranks)
        findings.append(
            finding("hosts", f"{host.host}: CPU", f"{host.cores} cores, {host.cpu}, "
                    f"{host.free_bytes / 2**30:.0f} of {host.memory_bytes / 2**30:.0f} GiB free")
        )  # fmt: skip
        busy = load > max(BUSY_SHARE * host.cores, 0.5)
        what = f"{load:.1f} processes on {host.cores} cores, before this command's"
        findings.append(
            finding("hosts", f"{host.host}: load", what, "warn" if busy else "ok",
                    "wait, or ask for a host of your own: other work makes figures noisy")
        )  # fmt: skip
        if host.governor in ("powersave", "conservative"):
            fix = "cpupower frequency-set -g performance, or say so beside the figures"
            findings.append(finding("hosts", f"{host.host}: clocks", f"governor {host.governor}", "warn", fix))
        if host.open_files < OPEN_FILES and len(ranks) > 64:
            what = f"{host.open_files} open files a process, and each rank may hold {len(ranks)} connections"
            findings.append(finding("hosts", f"{host.host}: limits", what, "warn", "ulimit -n 65536"))
        if of_gpus and (host.shm_bytes or 0) < of_gpus * SHM_BYTES_PER_GPU:
            free = "no /dev/shm" if host.shm_bytes is None else f"{host.shm_bytes / 2**20:.0f} MiB free in /dev/shm"
            fix = "start the container with --ipc=host or --shm-size=8g"
            findings.append(finding("hosts", f"{host.host}: /dev/shm", f"{free} for {of_gpus} GPUs", "warn", fix))
        findings += _network(host)
    return findings


def _network(host: HostFacts) -> list[Finding]:
    """Findings on a host's RDMA network cards; none without one."""
    if not host.ports:
        return []
    up = [port for port in host.ports if port.state == ACTIVE]
    down = [port.name for port in host.ports if port.state != ACTIVE]
    rates = ", ".join(sorted({port.rate for port in up}))
    what = f"{len(up)} ports active ({rates})" if up else "no port is active"
    what += f", {', '.join(down)} not" if down else ""
    fix = "have the cables and the subnet manager looked at, or name the working ports in NCCL_IB_HCA"
    findings = [finding("hosts", f"{host.host}: NICs", what, "ok" if up and not down else "warn", fix)]
    if up and host.locked_bytes is not None:
        what = f"{host.locked_bytes / 2**20:.0f} MiB of locked memory a process: RDMA may fail to register buffers"
        findings.append(finding("hosts", f"{host.host}: limits", what, "warn", "ulimit -l unlimited"))
    return findings


def judge_allocation(
    launch: Launch | None, ranks: Sequence[RankFacts], environment: Mapping[str, str], seconds_left: float | None
) -> list[Finding]:
    """Findings on the launch, its SLURM allocation, and how ranks share cores and GPUs."""
    hosts = {host: [rank for rank in ranks if rank.host == host] for host in dict.fromkeys(r.host for r in ranks)}
    where = f"{len(ranks)} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    by = f"started by {launch.by}" if launch else "processes of this machine"
    findings = [finding("allocation", "ranks", f"{where}, {by}")]
    if "SLURM_JOB_ID" in environment:
        nodes = int(environment.get("SLURM_JOB_NUM_NODES", 1))
        command = f"srun --nodes={nodes} --ntasks-per-node=8 {PLACED} python -m sp_bench.doctor"
        what = f"job {environment['SLURM_JOB_ID']} on {environment.get('SLURM_JOB_NODELIST', '?')}, {nodes} nodes"
        alone = launch is None and nodes > 1
        findings.append(
            finding("allocation", "SLURM", what + (", of which only this one is examined" if alone else ""),
                    "warn" if alone else "ok", f"{command}, with as many tasks as GPUs on a node")
        )  # fmt: skip
        if seconds_left is not None and seconds_left < 60 * MINUTES:
            what = f"{seconds_left / 60:.0f} minutes are left"
            fix = "ask for more with --time; sweeps and first_hour go on where they were cut off"
            findings.append(finding("allocation", "time", what, "warn", fix))
    counts = {len(of_host) for of_host in hosts.values()}
    if len(counts) > 1:
        shown = ", ".join(f"{host}: {len(of_host)}" for host, of_host in hosts.items())
        fix = "srun --ntasks-per-node, equal on all nodes"
        findings.append(finding("allocation", "ranks by host", shown, "warn", fix))
    return findings + _cores(hosts) + _devices(hosts, environment)


def _cores(hosts: Mapping[str, Sequence[RankFacts]]) -> list[Finding]:
    """Findings on the cores of ranks with GPUs, which need one to queue work and some for NCCL's threads."""
    least = min(min(rank.cores for rank in of_host) for of_host in hosts.values())
    what = f"each rank may use {least} or more"
    on_gpus = any("cuda" in rank.device for of_host in hosts.values() for rank in of_host)
    fix = "srun --cpus-per-task=8: srun doesn't take it from sbatch, and its default is one core a task"
    findings = [finding("allocation", "cores", what, "warn" if on_gpus and least < 4 else "ok", fix)]
    far = [rank.rank for of_host in hosts.values() for rank in of_host if rank.near_cores == 0]
    if far:
        what = f"no core of rank {', '.join(map(str, far))} is at its GPU's socket: each copy and launch crosses to it"
        fix = f"srun {PLACED}; SLURM takes sockets in turn unless told otherwise"
        findings.append(finding("allocation", "cores and GPUs", what, "warn", fix))
    return findings


def _devices(hosts: Mapping[str, Sequence[RankFacts]], environment: Mapping[str, str]) -> list[Finding]:
    """Findings on the GPUs of ranks: errors, and launches that hide the other GPUs of a host."""
    ranks = [rank for of_host in hosts.values() for rank in of_host]
    errors = {rank.rank: rank.device["error"] for rank in ranks if "error" in rank.device}
    if errors:
        what = f"ranks {', '.join(map(str, errors))}: {next(iter(errors.values()))}"
        fix = "as many ranks on a host as it has GPUs, and a torch for CUDA"
        return [finding("allocation", "devices", what, "fail", fix)]
    models = sorted({rank.device["device"] for rank in ranks})
    fix = "ask for equal GPUs (srun --constraint): the slowest sets the step"
    findings = [finding("allocation", "devices", ", ".join(models), "ok" if len(models) == 1 else "warn", fix)]
    promised = environment.get("CUDA_VISIBLE_DEVICES", "")
    if promised and not any(rank.gpus for rank in ranks):
        what = f"CUDA_VISIBLE_DEVICES={promised}, and no such device is in /dev: ranks compute on CPUs"
        fix = "install the driver, or ask for a node with GPUs"
        findings.append(finding("allocation", "GPUs", what, "warn", fix))
    hidden = [host for host, of_host in hosts.items() if len(of_host) > 1 and all(rank.gpus == 1 for rank in of_host)]
    if hidden:
        what = f"each rank sees one GPU on {', '.join(hidden)}: NCCL may find no NVLink between them (NVIDIA/nccl#1066)"
        fix = "srun --gpus-per-node=8 --gpu-bind=none in place of --gpus-per-task=1"
        findings.append(finding("allocation", "binding", what, "warn", fix))
    return findings
