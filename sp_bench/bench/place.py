"""Where a point runs: measured on this machine's GPUs or CPUs, or simulated, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sp_bench.bench.values import choice
from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.machine import gpus_here, torch_has_cuda
from sp_bench.measure.devices import CPUS, Devices
from sp_bench.measure.launch import Launch


@dataclass(frozen=True, kw_only=True)
class Place:
    """The mode of a point, why it is that one, and on what its ranks compute if it is measured."""

    mode: str
    why: str
    devices: Devices = field(default=CPUS)

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self.devices.kind


def place_of(
    config: Mapping[str, Any], gpus: int, cluster: Cluster, launch: Launch | None, *, of_a_peer: bool
) -> Place:
    """Where the point of a composed config runs. Raises RequestError where it is asked to run and can't."""
    mode = choice("mode", config["mode"], ("auto", "measure", "simulate"))
    device = choice("device", config["device"], ("auto", "cpu", "cuda"))
    settings = nccl_settings(config["nccl"])
    if mode == "simulate":
        if cluster.alone:
            rule = f"one rank of {gpus} alone is there to be measured"
            raise RequestError(f"mode=simulate on cluster={cluster.name}", rule, "cluster=h100_ndr400 would work")
        return Place(mode=mode, why="mode=simulate asks for it")
    if cluster.alone and of_a_peer:
        rule = "only plans can be executed without a rank's peers"
        raise RequestError(f"cluster={cluster.name}", rule, "cluster=local would work")
    ranks_here = 1 if cluster.alone else launch.ranks_here if launch else gpus
    obstacle = _without_gpus(ranks_here, cluster, launch, of_a_peer)
    if device == "cuda" and obstacle:
        raise RequestError("device=cuda", obstacle, "device=cpu, or mode=simulate, would work")
    on_gpus = device != "cpu" and not obstacle
    devices = Devices(kind="cuda", nccl=settings) if on_gpus else CPUS
    if cluster.alone:
        return _alone(cluster, launch, device, obstacle, devices)
    if launch:
        launch.refuse(gpus)
        _refuse_to_join(launch, cluster, obstacle, devices)
        what = "GPUs" if on_gpus else "CPUs"
        return Place(
            mode="measure",
            why=f"{launch.by} has started them, and they compute on their hosts' {what}",
            devices=devices,
        )
    here = gpus_here()
    has = f"this machine has {here} GPU{'' if here == 1 else 's'}"
    if on_gpus:
        return Place(mode="measure", why=f"{has}, and ranks are processes with one each", devices=devices)
    if cluster.this_machine:
        return Place(mode="measure", why=f"cluster={cluster.name} is this machine, and ranks are processes on its CPU")
    if here >= gpus and obstacle:
        has += f", but {obstacle}"
    if mode == "measure":
        asks = f"{has}, and the point asks for {gpus} {cluster.device.name}"
        raise RequestError(f"mode=measure on cluster={cluster.name}", asks, "cluster=local or mode=simulate would work")
    return Place(mode="simulate", why=has)


def nccl_settings(given: Any) -> dict[str, str]:
    """NCCL's variables by their names without NCCL_. Raises RequestError for what can be none."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError(
            f"nccl={given}", "must be a section of settings", "nccl={NCHANNELS_PER_NET_PEER: 4} would work"
        )
    for name, value in given.items():
        if not re.fullmatch(r"[A-Z0-9_]+", str(name)) or str(name).startswith("NCCL_"):
            rule = "must be the name of a variable of NCCL, in capitals, without NCCL_"
            raise RequestError(f"nccl.{name}", rule, "nccl={NCHANNELS_PER_NET_PEER: 4} would work")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise RequestError(f"nccl.{name}={value}", "must be a number or a text", f"nccl={{{name}: 1}} would work")
    return {str(name): str(value) for name, value in sorted(given.items())}


def _without_gpus(ranks_here: int, cluster: Cluster, launch: Launch | None, of_a_peer: bool) -> str:
    """Why a point's ranks can't have a GPU each; empty if they can, as far as this process sees."""
    here = gpus_here()
    has = f"this machine has {here} GPU{'' if here == 1 else 's'}"
    if of_a_peer:
        return "peers run on CPUs only"
    if cluster.hosts:
        return f"the hosts of cluster={cluster.name} have CPUs only"
    # A launch may show each of its processes one GPU of many.
    if here < (min(ranks_here, 1) if launch else ranks_here):
        return f"{has}, and its ranks need {ranks_here}, one each"
    return "" if torch_has_cuda() else "this torch was built without CUDA"


def _alone(cluster: Cluster, launch: Launch | None, device: str, obstacle: str, devices: Devices) -> Place:
    """One process, a rank at a time; on a CPU only where that was asked for, since it takes long."""
    if launch:
        rule = f"it takes one process, and {launch.by} has started {launch.n}"
        raise RequestError(f"cluster={cluster.name}", rule, "one task, or cluster=local, would work")
    if devices.kind == "cpu" and device != "cpu":
        raise RequestError(f"cluster={cluster.name}", obstacle, "device=cpu would work")
    what = "a GPU" if devices.kind == "cuda" else "a core"
    return Place(
        mode="measure", why=f"cluster={cluster.name} has it alone on {what}, with copies for transfers", devices=devices
    )


def _refuse_to_join(launch: Launch, cluster: Cluster, obstacle: str, devices: Devices) -> None:
    """Raise RequestError for a cluster that ranks which have been started already can't be ranks of."""
    rule = ""
    if cluster.hosts:
        rule = f"its hosts are made for ranks that are started on them, and {launch.by} has started these"
    elif not cluster.this_machine and devices.kind == "cpu":
        rule = f"ranks of {launch.by} are on CPUs" + (f": {obstacle}" if obstacle else "")
    if rule:
        raise RequestError(f"cluster={cluster.name}", rule, "cluster=local, or mode=simulate, would work")
