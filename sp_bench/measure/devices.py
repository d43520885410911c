"""The devices that a pool's ranks compute on. Each rank's process is told before it joins a group. Imports no torch.

Each rank has one GPU: the one whose index is its local rank or, if the launcher shows each process a single GPU, that
one. Host-side messages (barriers, samples, agreement) use gloo. Transfers between GPUs use NCCL. Ranks that share a
GPU, which NCCL refuses, transfer through host memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from sp_bench.errors import RequestError
from sp_bench.lower import DEFAULT_TRANSPORT, LAUNCH_ORDER, TransportOptions
from sp_bench.machine import CPUS, Devices, gpus_and_driver
from sp_bench.records.identity import gpu_environment, version

if TYPE_CHECKING:
    import torch

    from sp_bench.measure.start import Start
    from sp_bench.plan.ops import Plan
    from sp_bench.run.devices import Clock
    from sp_bench.run.transport import Transport

PREFIX = "NCCL_"
SETTINGS = {LAUNCH_ORDER: "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Variables that ranks on GPUs set unless the environment does: NCCL keeps the order in which lanes' operations are
launched, and streams have hardware queues of their own, so that a hop doesn't wait behind a block."""


class _Process:
    """The device of this process."""

    devices: Devices = CPUS
    index: int = 0
    group_timeout: timedelta | None = None
    refused: RequestError | None = None


def set_up_device(devices: Devices, local_rank: int, group_timeout: timedelta) -> None:
    """Choose this rank's device. Call it in a rank's process before it joins a group.

    An error is kept and raised by `device_here`, so that the rank can report it to its pool.
    """
    _Process.devices, _Process.group_timeout = devices, group_timeout
    if devices.kind == "cpu":
        return
    os.environ |= {PREFIX + name: value for name, value in devices.nccl.items()}
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import torch

    count = torch.cuda.device_count()
    if not count:
        _Process.refused = RequestError("device=cuda", "torch finds no GPU on this host", "device=cpu would work")
    elif local_rank >= count and count > 1 and not devices.shared:
        rule = f"rank {local_rank} of its host has no GPU: torch finds {count} there"
        _Process.refused = RequestError("device=cuda", rule, f"{count} ranks on each host would work")
    else:
        _Process.index = local_rank % count
        torch.cuda.set_device(_Process.index)


def group_backend(devices: Devices) -> str:
    """The backend of the ranks' default group: gloo for the suite's own messages, beside NCCL for peers' on GPUs."""
    import torch

    own_gpus = devices.kind == "cuda" and not devices.shared
    return "cpu:gloo,cuda:nccl" if own_gpus and torch.cuda.is_available() else "gloo"


def device_here() -> torch.device:
    """This rank's device. Raises RequestError if it has none."""
    import torch

    if _Process.refused:
        raise _Process.refused
    return torch.device("cuda", _Process.index) if _Process.devices.kind == "cuda" else torch.device("cpu")


def transport_here(
    plans: Mapping[str, Plan], lane_ctas: int | None = None, options: TransportOptions = DEFAULT_TRANSPORT
) -> Transport:
    """The transport by which plans exchange tensors between all ranks, ready for them. All ranks must call it.

    With NCCL a lane takes `lane_ctas` CTAs at most; None: its share of the GPU.
    """
    from sp_bench.run.gloo import HostTransport
    from sp_bench.run.groups import world

    if _Process.devices.shared:
        transport = HostTransport(world())
    else:
        make = resolve_name(options.kind(on_cpu=_Process.devices.kind == "cpu").made_by)
        transport = make(world(), device_here(), plans, _Process.group_timeout, lane_ctas, options)
    transport.prepare(plans.values())
    return transport


def start_here(clock: Clock) -> Start:
    """A start that lets all ranks begin phases together. All ranks must call it."""
    import torch.distributed as dist

    from sp_bench.measure.start import Start, start_group

    device, timeout, group = device_here(), _Process.group_timeout, None
    if device.type == "cuda" and not _Process.devices.shared and dist.is_initialized() and dist.get_world_size() > 1:
        assert timeout is not None
        group = start_group(device, timeout)
    return Start(clock, device, group)


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's index among the ranks on its host. LOCAL_RANK counts only beside RANK, as torchrun sets both."""
    by_torchrun = environment.get("LOCAL_RANK") if "RANK" in environment else None
    return int(by_torchrun or environment.get("SLURM_LOCALID") or 0)


def device_versions() -> dict[str, str]:
    """The name of this rank's device and, for a GPU, its software and the variables that change what is measured."""
    device = device_here()
    if device.type == "cpu":
        return {"device": "CPU"}
    import torch

    return {"device": torch.cuda.get_device_name(device), **_gpu_versions(), **gpu_environment()}


@cache
def gpu_packages() -> tuple[str, ...]:
    """The packages, beside torch, whose code a point on GPUs may run: those that kernels, folds and peers name."""
    from sp_bench.kernels import packages
    from sp_bench.peers.registry import PEERS

    return tuple(sorted({*packages(), *(peer.distribution for peer in PEERS.values())} - {"torch", ""}))


@cache
def _gpu_versions() -> dict[str, str]:
    """The versions of the driver, of CUDA, cuDNN and NCCL, and of the packages that are installed."""
    import torch
    from torch.cuda import nccl

    drivers = {line.rpartition(", ")[2] for line in gpus_and_driver()}
    versions = {"driver": ", ".join(sorted(drivers)), "cuda": torch.version.cuda or ""}
    versions["cudnn"] = str(torch.backends.cudnn.version() or "")
    if torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, nccl.version()))
    packages = {name: version(name) for name in ("torch", *gpu_packages())}
    return versions | {name: number for name, number in packages.items() if number}
