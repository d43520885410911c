"""A cluster: its nodes, links and devices, as conf/cluster describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, Self

import msgspec
import numpy as np

from sp_bench.cluster.device import DeviceCosts, DeviceSection
from sp_bench.cluster.emulation import DEFAULT_LAB, Effects, EmulatedHosts, hosts_of
from sp_bench.cluster.stragglers import Stragglers
from sp_bench.cluster.topology import Fabric, Inter, Intra, Network, Placement, Topology
from sp_bench.errors import RequestError
from sp_bench.lower import GLOO, NCCL, TransportKind
from sp_bench.machine import cores_here
from sp_bench.plan.costs import CostProfile
from sp_bench.plan.problem import Problem
from sp_bench.reading import Count, Section, read

NETWORK_KEYS = Topology.__struct_fields__
"""The keys of a conf/cluster file that describe its network."""


class ClusterSection(Section, frozen=True, kw_only=True):
    """A conf/cluster file. Its network (Topology) is given by keys here, or follows from hosts."""

    name: str
    this_machine: bool = False
    cores: Count | Literal["auto"] | None = None
    gpus_per_node: Count | None = None
    intra: Intra | None = None
    inter: Inter | None = None
    fabric: Fabric | None = None
    placement: Placement = "block"
    lab: str = DEFAULT_LAB
    hosts: Any = None
    """Of the laboratory (emulation.EmulatedHosts)."""
    device: DeviceSection
    sources: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of GPUs, what joins them, and what kernels cost on them."""

    name: str
    this_machine: bool
    """Whether its ranks are processes of this machine, so that points on it are measured."""
    cores: int | None
    """CPU cores that all ranks share, where ranks have no device of their own."""
    topology: Topology
    hosts: EmulatedHosts | None = None
    """How a laboratory emulates the nodes on this machine; None: it doesn't, and ranks talk over its loopback."""
    device: DeviceCosts
    sources: Mapping[str, str]
    """Where the numbers are from."""
    stragglers: Stragglers = field(default_factory=Stragglers)

    @classmethod
    def build(cls, config: Any) -> Self:
        """The cluster of a conf/cluster file. Raises RequestError for a key or value that makes no sense."""
        section = read(ClusterSection, config, "cluster")
        hosts = hosts_of(config)
        return cls(
            name=section.name,
            this_machine=section.this_machine,
            cores=cores_here() if section.cores == "auto" else section.cores,
            topology=Topology.build(_network_config(config, hosts), "cluster"),
            hosts=hosts,
            device=DeviceCosts.of(section.device),
            sources=section.sources,
        )

    def refuse(self, gpus: int) -> None:
        """Raise RequestError for a number of GPUs that doesn't fill nodes, or that the network can't join."""
        node = self.topology.gpus_per_node
        if node and gpus > node and gpus % node:
            low = gpus // node * node
            rule = f"nodes of {self.name} have {node} GPUs, and are used whole"
            raise RequestError(f"gpus={gpus}", rule, f"gpus={low} or {low + node} would work")
        self.network(gpus)
        self.stragglers.slow_ranks(gpus)

    def network(self, gpus: int) -> Network:
        """The links and routes of that many ranks."""
        network = _network(self.topology_of(gpus), gpus)
        return self.stragglers.slow_links(network) if self.stragglers.links else network

    def topology_of(self, gpus: int) -> Topology:
        """The topology, with the latency that messages have where that many ranks share the cores."""
        inter, cores = self.topology.inter, self.cores
        if not self.hosts or not inter or not cores or gpus <= cores:
            return self.topology
        latency_s = inter.latency_s + self.hosts.crowd_latency_s_of(gpus / cores)
        return self.topology.replace(inter=inter.replace(latency_s=latency_s))

    def node_of(self, gpus: int) -> np.ndarray:
        """The node of each of that many ranks: (gpus,)."""
        return self.network(gpus).node_of(np.arange(gpus))

    def nodes(self, gpus: int) -> int:
        """How many nodes that many ranks are on."""
        return int(np.unique(self.node_of(gpus)).size)

    def shared_cores(self, ranks: int) -> int | None:
        """The cores that the ranks share, with transfers too; None where each has a device or a core of its own."""
        take = self.hosts and self.hosts.messages_take_cores
        return self.cores if self.cores and (ranks > self.cores or take) else None

    def effects(self, network: Network, simulated: np.ndarray, phase: str) -> Effects:
        """What the machine does to the blocks and messages of the `simulated` ranks (q,) in one phase."""
        if self.hosts is None:
            return Effects()
        return self.hosts.effects(network, simulated, self.cores, self.stragglers.seed, phase)

    def is_even(self, ranks: int) -> bool:
        """Whether no block or message of so many ranks differs from others by chance, but for `stragglers`."""
        return self.hosts is None or self.hosts.is_even(ranks, self.cores)

    @property
    def transport(self) -> TransportKind:
        """How tensors get from rank to rank."""
        return NCCL if self.cores is None else GLOO

    @property
    def even(self) -> Cluster:
        """The same with cores and links that are shared evenly."""
        return replace(self, hosts=self.hosts.even) if self.hosts else self

    def least_compute_s(self, work_s: np.ndarray) -> float:
        """What ranks need at least for the work that each has, alone on a core or device: (n,)."""
        cores = self.shared_cores(work_s.size)
        return max(float(work_s.max()), float(work_s.sum()) / cores if cores else 0.0)

    def profile(self, problem: Problem) -> CostProfile:
        """What a schedule may know of this cluster."""
        topology = self.topology_of(problem.n)
        intra, inter = topology.intra, topology.inter or topology.intra
        intra_rate, inter_rate = self.topology.crowded_bytes_per_s(problem.n)
        crowded = max(1.0, problem.n / (self.shared_cores(problem.n) or problem.n))

        def block_s(phase: str, *folded: str) -> float:
            folds_s = sum(self.device.fold_s(problem, tensor) for tensor in folded)
            return (float(self.device.block_s(problem, phase).max()) + folds_s) * crowded

        return CostProfile(
            forward_block_s=block_s("forward", "o"),
            backward_block_s=block_s("backward", "dq", "dkv"),
            node_size=problem.n if self.nodes(problem.n) == 1 else self.topology.neighbours(problem.n),
            intra_latency_s=intra.latency_s,
            intra_bytes_per_s=intra_rate,
            inter_latency_s=inter.latency_s,
            inter_bytes_per_s=inter_rate,
        )


def _network_config(config: Mapping[str, Any], hosts: EmulatedHosts | None) -> dict[str, Any]:
    """The network that a conf/cluster file describes, in words or by its hosts."""
    network = {key: config[key] for key in NETWORK_KEYS if key in config}
    if hosts is None:
        return network
    for key, value in hosts.network().items():
        if network.get(key) is not None:
            raise RequestError(f"cluster.{key}", "follows from cluster.hosts", f"cluster without {key} would work")
        network[key] = value
    return network


@lru_cache(maxsize=8)
def _network(topology: Topology, gpus: int) -> Network:
    return topology.network(gpus)
