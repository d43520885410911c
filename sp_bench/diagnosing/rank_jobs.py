"""The doctor's jobs for ranks: say what they see, pass the gate with each kernel, exchange messages, compute.

Runs inside the ranks' processes.
"""

from __future__ import annotations

import os
import platform
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from sp_bench.calibrating.pairs import PairRate, pair_rates
from sp_bench.diagnosing.groups import Used
from sp_bench.diagnosing.nccl_log import NcclLog, read_log
from sp_bench.diagnosing.nvidia_smi import gpus_state
from sp_bench.diagnosing.seen import HostFacts, RankFacts, host_facts, rank_facts
from sp_bench.errors import RequestError
from sp_bench.kernels import KERNELS, auto_order
from sp_bench.kernels.cuda import CudaKernel
from sp_bench.launch import host_name
from sp_bench.measure.devices import device_here, device_versions, transport_here
from sp_bench.measure.pool import report
from sp_bench.plan.groups import Group
from sp_bench.run.devices import clock_of
from sp_bench.run.transport import Call, Turn, members_of
from sp_bench.workload import RankContext, Spec

__all__ = [
    "KernelRow", "PairRate", "gate", "kernels_here", "look", "message_each_way", "nccl_log", "pair_rates", "under_load",
]  # fmt: skip

LOAD_S = 2.0
SIDE = {"cuda": 8192, "cpu": 256}
"""The side of the square matrices that are multiplied under load."""


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """A kernel in the order in which kernel=auto tries them, and whether a rank can use it."""

    name: str
    refusal: str
    """Why it can't be used; empty if it can."""
    for_other_devices: bool
    """Whether no software would change that."""
    install: str
    """The command that installs it, if it needs a package."""


def look() -> tuple[RankFacts, HostFacts | None]:
    """The facts of this rank, and of its host if it is the first rank on it. All ranks must call it."""
    device = _versions()
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host_name())
    first = hosts.index(host_name()) == dist.get_rank()
    return rank_facts(dist.get_rank(), device, _pci_address()), host_facts() if first else None


def _pci_address() -> str:
    """The PCI address of this rank's GPU, such as 0000:1b:00.0; empty for a CPU, or if torch doesn't say."""
    if "error" in _versions() or device_here().type != "cuda":
        return ""
    of_gpu = torch.cuda.get_device_properties(device_here())
    parts = [getattr(of_gpu, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    return "" if None in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)


def _versions() -> dict[str, str]:
    """The rank's device and its software, or why it has none."""
    try:
        return device_versions()
    except RequestError as error:
        return {"error": str(error)}


def message_each_way(used: Used) -> str:
    """Make this rank's group, and exchange a message each way with its neighbours there; what is wrong, or nothing.

    A collective gathers a number of each member. All ranks must call it.
    """
    rank, device, group = dist.get_rank(), device_here(), used.group
    transport = transport_here({})
    turn = Turn(used.lane, 0, group)
    mine = torch.full((4,), float(rank), device=device)
    if used.collective and isinstance(group, Group) and transport.kind.adds:
        into = torch.empty(group.size, 4, device=device)
        transport.collective(turn, Call("all_gather", group, [into], [mine]))
        got, wanted = into[:, 0].tolist(), [float(member) for member in members_of(group, rank)]
    else:
        peers = [peer for peer in (int(group.member(rank, shift)) for shift in (1, -1)) if peer != rank]
        into = torch.empty(len(peers), 4, device=device)
        receives = [(peer, [into[i]]) for i, peer in enumerate(reversed(peers))]
        transport.exchange(turn, receives, [(peer, [mine]) for peer in peers], [("groups", "q", "q")])
        got, wanted = into[:, 0].tolist(), [float(peer) for peer in reversed(peers)]
    return "" if got == wanted else f"rank {rank} got {got} from ranks {wanted}"


def kernels_here(dtype: str, head_dim: int) -> list[KernelRow]:
    """The kernels for this rank's device, in the order in which kernel=auto tries them, then the others."""
    device = device_here().type
    order = auto_order(device)
    rows = []
    for kernel in (*order, *(kernel for kernel in KERNELS.values() if kernel not in order)):
        refusal = kernel.refuses(device, dtype, head_dim)
        hopeless = bool(refusal) and not (issubclass(kernel, CudaKernel) and kernel.package and _fits(kernel))
        install = kernel.install if issubclass(kernel, CudaKernel) else ""
        rows.append(KernelRow(name=kernel.name, refusal=refusal, for_other_devices=hopeless, install=install))
    return rows


def _fits(kernel: type[CudaKernel]) -> bool:
    """Whether a kernel is for a GPU such as this rank's."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in kernel.majors


def gate(spec: Spec) -> str:
    """Why the plans fail the correctness gate; empty if they pass. All ranks must call it."""
    context = RankContext(dist.get_rank(), device_here(), transport_here, alive=lambda: report("gate", step=False))
    return spec.workload.gate(spec, context).wrong(spec.problem.dtype)


def under_load(seconds: float = LOAD_S) -> tuple[str, list[dict[str, str]]] | None:
    """This host and the state of its GPUs while all ranks compute, on its first rank. All ranks must call it."""
    _, host = look()
    done = threading.Event()
    device = device_here()
    thread = threading.Thread(target=_multiply, args=(device, done), daemon=True)
    dist.barrier()
    thread.start()
    done.wait(seconds / 2)  # clocks take a while to rise
    state = (host.host, gpus_state()) if host else None
    done.wait(seconds / 2)
    dist.barrier()
    done.set()
    thread.join()
    return state


def _multiply(device: torch.device, done: threading.Event) -> None:
    """Keep a device busy until the event is set."""
    x = torch.ones((SIDE[device.type],) * 2, device=device, dtype=torch.bfloat16)
    clock = clock_of(device)
    while not done.is_set():
        for _ in range(20):
            torch.mm(x, x)
        clock.synchronize()


def nccl_log() -> NcclLog:
    """The lines about this rank's communicators that NCCL has written to NCCL_DEBUG_FILE."""
    name = os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", platform.node()).replace("%p", str(os.getpid()))
    try:
        return read_log(Path(name).read_text(errors="replace"))
    except OSError:
        return NcclLog()
