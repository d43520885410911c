"""What the ranks of a pool compute on: told to each rank's process before it joins a group. Imports no torch.

One GPU belongs to one rank: the one of the rank's number on its host or, where a launch shows each of its processes a
GPU of its own, that one. Host-side messages (barriers, samples, agreement) stay on gloo; transfers between GPUs go by
NCCL or, where ranks share a GPU, which NCCL refuses, through the memory of their host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from sp_bench.errors import RequestError

if TYPE_CHECKING:
    import torch

    from sp_bench.run.transport import Transport

PREFIX = "NCCL_"


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What all ranks of a pool have."""

    kind: str = "cpu"
    """cpu or cuda."""
    nccl: Mapping[str, str] = field(default_factory=dict)
    """Settings of NCCL, for all methods alike: the names of its environment variables without NCCL_."""
    shared: bool = False
    """Whether several ranks have one GPU. Tests do that; no point is measured so."""


CPUS = Devices()


class _Here:
    """What this process has."""

    devices: Devices = CPUS
    index: int = 0
    patience: timedelta | None = None
    refused: RequestError | None = None


def settle(devices: Devices, number: int, patience: timedelta) -> None:
    """In a rank's process, before it joins a group. `number` is the rank's on its host, `patience` its groups'.

    What is in the way is raised by `device_here`, so that the pool can say it.
    """
    _Here.devices, _Here.patience = devices, patience
    if devices.kind == "cpu":
        return
    os.environ |= {PREFIX + name: value for name, value in devices.nccl.items()}
    import torch

    count = torch.cuda.device_count()
    if not count:
        _Here.refused = RequestError("device=cuda", "torch finds no GPU on this host", "device=cpu would work")
    elif number >= count and count > 1 and not devices.shared:
        rule = f"rank {number} of its host has no GPU: torch finds {count} there"
        _Here.refused = RequestError("device=cuda", rule, f"{count} ranks on each host would work")
    else:
        _Here.index = number % count
        torch.cuda.set_device(_Here.index)


def device_here() -> torch.device:
    """This rank's. Raises RequestError where it has none."""
    import torch

    if _Here.refused:
        raise _Here.refused
    return torch.device("cuda", _Here.index) if _Here.devices.kind == "cuda" else torch.device("cpu")


def transport_here(plans: Mapping) -> Transport:
    """How plans by phase exchange tensors between all ranks of the pool. All ranks must call it."""
    import torch.distributed as dist

    from sp_bench.run.nccl import nccl_transport
    from sp_bench.run.transport import GlooTransport, HostTransport

    everybody = dist.group.WORLD
    assert everybody is not None
    if _Here.devices.kind == "cpu":
        return GlooTransport(everybody)
    if _Here.devices.shared:
        return HostTransport(everybody)
    return nccl_transport(everybody, device_here(), plans, _Here.patience)


def local_number(environment: Mapping[str, str] = os.environ) -> int:
    """Which of the ranks on its host a launch's process is. A LOCAL_RANK without RANK is none of torchrun's."""
    of_torchrun = environment.get("LOCAL_RANK") if "RANK" in environment else None
    return int(of_torchrun or environment.get("SLURM_LOCALID") or 0)


def described() -> dict[str, str]:
    """This rank's device, and what drives it, for records."""
    device = device_here()
    if device.type == "cpu":
        return {"device": "CPU"}
    import torch
    from torch.cuda import nccl

    found = {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda or ""}
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found
