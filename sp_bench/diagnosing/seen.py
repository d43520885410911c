"""Facts of a host and an environment, as a process sees them. Imports no torch."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sp_bench.diagnosing.nvidia_smi import gpus_state
from sp_bench.launch import host_name
from sp_bench.machine import cores_here, cpu_model, free_bytes, gpus_here, proc_number
from sp_bench.records import KEPT_VARIABLES


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of an RDMA network card."""

    name: str
    """The card and the port's number, such as mlx5_0:1."""
    state: str
    """ACTIVE, DOWN, ..."""
    rate: str
    """As the driver writes it: 400 Gb/sec (4X NDR)."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """A host, as the first rank on it sees it."""

    host: str
    cpu: str
    cores: int
    """Cores of the machine."""
    load: float
    """Processes that run or wait to, averaged over a minute."""
    governor: str
    """How the kernel chooses the clock of core 0; empty if not known."""
    memory_bytes: int
    free_bytes: int
    shm_bytes: int | None
    """Free bytes of /dev/shm; None if there is none."""
    locked_bytes: int | None
    """The limit of locked memory; None: no limit."""
    open_files: int
    """The limit of open files of a process."""
    ports: tuple[Port, ...]
    gpus: tuple[Mapping[str, str], ...]
    """The state of the host's GPUs, before anything ran."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The facts that one rank's process sees."""

    rank: int
    host: str
    cores: int
    """Cores that the process may use."""
    gpus: int
    """GPUs that the process sees in /dev."""
    device: Mapping[str, str]
    """The rank's device and its software, or the error why it has none, under `error`."""
    environment: Mapping[str, str]
    """The variables that records keep (records.KEPT_VARIABLES)."""
    near_cores: int | None = None
    """How many of its cores are at the GPU's socket; None on a CPU, or if that isn't known."""


def host_facts() -> HostFacts:
    """The facts that the doctor reads on this host."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm = Path("/dev/shm")
    return HostFacts(
        host=host_name(),
        cpu=cpu_model(),
        cores=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        governor=_text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        memory_bytes=(proc_number("meminfo", "MemTotal") or 0) * 1024,
        free_bytes=free_bytes(),
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ports=rdma_ports(),
        gpus=tuple(gpus_state()),
    )


def rank_facts(rank: int, device: Mapping[str, str], pci_address: str = "") -> RankFacts:
    """This process, whose rank has that device; of a GPU `pci_address` says where it is, such as 0000:1b:00.0."""
    near = cores_near(pci_address) if pci_address else None
    near_cores = None if near is None else len(near & os.sched_getaffinity(0))
    kept = {name: value for name, value in sorted(os.environ.items()) if name.startswith(KEPT_VARIABLES)}
    given = {"cores": cores_here(), "gpus": gpus_here(), "near_cores": near_cores}
    return RankFacts(rank=rank, host=host_name(), device=device, environment=kept, **given)


def cores_near(pci_address: str, root: Path = Path("/sys/bus/pci/devices")) -> set[int] | None:
    """The cores at the socket of a PCI device; None if the kernel doesn't say."""
    ranges = [part.partition("-") for part in _text(root / pci_address / "local_cpulist").split(",") if part]
    return {core for low, _, high in ranges for core in range(int(low), int(high or low) + 1)} or None


def rdma_ports(root: Path = Path("/sys/class/infiniband")) -> tuple[Port, ...]:
    """The ports of this host's RDMA network cards."""
    ports = []
    for port in sorted(root.glob("*/ports/*")):
        state = _text(port / "state").rpartition(":")[2].strip()
        ports.append(Port(name=f"{port.parts[-3]}:{port.name}", state=state, rate=_text(port / "rate")))
    return tuple(ports)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
