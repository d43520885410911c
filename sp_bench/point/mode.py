"""The mode of a point: measured on this machine's GPUs or CPUs, single ranks measured alone, or simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.launch import Launch
from sp_bench.machine import CPUS, Devices, gpus_here, torch_has_cuda
from sp_bench.reading import read

Asked = Literal["auto", "measure", "simulate", "alone"]
"""Values of the key `mode`."""
AskedDevice = Literal["auto", "cpu", "cuda"]
"""Values of the key `device`."""
_NCCL_NAME = Meta(
    pattern="^(?!NCCL_)[A-Z0-9_]+$",
    description="the name of a variable of NCCL, in capitals, without NCCL_",
    examples=["NCHANNELS_PER_NET_PEER"],
)
NcclSettings = dict[Annotated[str, _NCCL_NAME], int | float | str]
"""Values of the key `nccl`."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a point gets its numbers, and the devices of its ranks."""

    name: str
    """The mode in the record. measure: all ranks run. alone: ranks run in turn, without peers. simulate: none."""
    why: str
    """The reason for the mode."""
    devices: Devices = field(default=CPUS)
    """The devices of measured ranks."""
    alone: tuple[int, ...] = ()
    """The ranks of mode=alone."""


def resolve_mode(
    config: Mapping[str, Any], gpus: int, cluster: Cluster, launch: Launch | None, *, of_a_peer: bool
) -> Mode:
    """The mode of a composed config. Raises RequestError if this machine or launch can't serve it.

    A launch in the future is taken to have the devices that are asked for: GPUs unless device=cpu.
    """
    asked = read(Asked, config["mode"], "mode")
    device = read(AskedDevice, config["device"], "device")
    settings = nccl_settings(config["nccl"])
    if asked == "simulate":
        return Mode(name="simulate", why="mode=simulate asks for it")
    if asked == "alone":
        return _alone(config["alone"], gpus, launch, device, settings, of_a_peer=of_a_peer)
    obstacle = _without_gpus(launch.ranks_here if launch else gpus, cluster, launch)
    if device == "cuda" and obstacle:
        raise RequestError("device=cuda", obstacle, "device=cpu, or mode=simulate, would work")
    on_gpus = device != "cpu" and not obstacle
    devices = Devices(kind="cuda", nccl=settings) if on_gpus else CPUS
    if launch:
        launch.refuse(gpus)
        _refuse_to_join(launch, cluster, obstacle, devices)
        what = "GPUs" if on_gpus else "CPUs"
        why = f"{launch.by} has started them, and they compute on their hosts' {what}"
        return Mode(name="measure", why=why, devices=devices)
    present = gpus_here()
    has = _has(present)
    if on_gpus:
        return Mode(name="measure", why=f"{has}, and ranks are processes with one each", devices=devices)
    if cluster.this_machine:
        return Mode(name="measure", why=f"cluster={cluster.name} is this machine, and ranks are processes on its CPU")
    if present >= gpus and obstacle:
        has += f", but {obstacle}"
    if asked == "measure":
        asks = f"{has}, and the point asks for {gpus} {cluster.device.name}"
        raise RequestError(f"mode=measure on cluster={cluster.name}", asks, "cluster=local or mode=simulate would work")
    return Mode(name="simulate", why=has)


def alone_ranks(given: Any, gpus: int) -> tuple[int, ...]:
    """The ranks that mode=alone executes. Raises RequestError unless `given` is a list of ranks below `gpus`."""
    ranks = [rank for rank in given if type(rank) is int and rank >= 0] if isinstance(given, Sequence) else []
    if not ranks or len(ranks) < len(given):
        raise RequestError(f"alone={given}", "must be a list of ranks", "alone=[0] would work")
    if len(set(ranks)) < len(ranks):
        raise RequestError(f"alone={ranks}", "names a rank twice", f"alone={sorted(set(ranks))} would work")
    if max(ranks) >= gpus:
        rule = f"rank {max(ranks)} is not among {gpus} ranks"
        raise RequestError(f"alone={ranks}", rule, f"ranks from 0 to {gpus - 1} would work")
    return tuple(ranks)


def _alone(
    given: Any, gpus: int, launch: Launch | None, device: str, settings: Mapping[str, str], *, of_a_peer: bool
) -> Mode:
    """mode=alone: one process, a rank at a time. It runs on a CPU only with device=cpu, since it takes long."""
    ranks = alone_ranks(given, gpus)
    if of_a_peer:
        raise RequestError("mode=alone", "only plans can be executed without a rank's peers", "mode=measure would work")
    if launch:
        rule = f"it takes one process, and {launch.by} has started {launch.n}"
        raise RequestError("mode=alone", rule, "one task, or mode=measure, would work")
    has_gpu = gpus_here() > 0
    obstacle = "" if has_gpu and torch_has_cuda() else _NO_CUDA if has_gpu else _has(0)
    if device != "cpu" and obstacle:
        raise RequestError("mode=alone", obstacle, "device=cpu would work")
    devices = CPUS if device == "cpu" else Devices(kind="cuda", nccl=settings)
    what = "a core" if device == "cpu" else "a GPU"
    why = f"mode=alone has it by itself on {what}, with copies for transfers"
    return Mode(name="alone", why=why, devices=devices, alone=ranks)


_NO_CUDA = "this torch was built without CUDA"


def _has(gpus: int) -> str:
    return f"this machine has {gpus} GPU{'' if gpus == 1 else 's'}"


def nccl_settings(given: Any) -> dict[str, str]:
    """NCCL's environment variables, named without NCCL_. Raises RequestError for an invalid name or value."""
    settings = read(NcclSettings, {} if given is None else given, "nccl")
    return {name: str(value) for name, value in sorted(settings.items())}


def _without_gpus(ranks_here: int, cluster: Cluster, launch: Launch | None) -> str:
    """Why a point's ranks can't have a GPU each; empty if they can, as far as this process knows."""
    if cluster.hosts:
        return f"the hosts of cluster={cluster.name} have CPUs only"
    if launch and launch.future:
        return ""
    present = gpus_here()
    # A launcher may show each process only one GPU.
    if present < (min(ranks_here, 1) if launch else ranks_here):
        return f"{_has(present)}, and its ranks need {ranks_here}, one each"
    return "" if torch_has_cuda() else _NO_CUDA


def _refuse_to_join(launch: Launch, cluster: Cluster, obstacle: str, devices: Devices) -> None:
    """Raise RequestError if a launch's ranks can't be those of the cluster."""
    rule = ""
    if cluster.hosts:
        rule = f"its hosts are made for ranks that are started on them, and {launch.by} has started these"
    elif not cluster.this_machine and devices.kind == "cpu":
        rule = f"ranks of {launch.by} are on CPUs" + (f": {obstacle}" if obstacle else "")
    if rule:
        raise RequestError(f"cluster={cluster.name}", rule, "cluster=local, or mode=simulate, would work")
