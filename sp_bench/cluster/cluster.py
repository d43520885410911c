"""A cluster as conf/cluster describes it: nodes, links and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from sp_bench.cluster.collectives import Algorithm, algorithm
from sp_bench.cluster.device import DeviceCosts
from sp_bench.cluster.device_section import DeviceSection
from sp_bench.cluster.emulation import DEFAULT_LAB, Effects, EmulatedHosts, hosts_of
from sp_bench.cluster.stragglers import Stragglers
from sp_bench.cluster.tiers import Inter, Intra
from sp_bench.cluster.topology import Fabric, Network, Placement, Topology
from sp_bench.errors import RequestError
from sp_bench.lower import DEFAULT_TRANSPORT, TransportKind, TransportOptions
from sp_bench.machine import cores_here
from sp_bench.plan.costs import CostProfile
from sp_bench.plan.memo import keep
from sp_bench.plan.ops import Collective, Plan
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import DKV, DQ, O, Tensor
from sp_bench.reading import Count, Section, figure, implausible, read

NETWORK_KEYS = Topology.__struct_fields__
"""The keys of a conf/cluster file that describe its network."""


class ClusterSection(Section, frozen=True, kw_only=True):
    """A conf/cluster file. The network (Topology) is given by its keys, or follows from `hosts`."""

    name: str
    this_machine: bool = False
    cores: Annotated[Count, figure(1, 10_000, "CPU cores of the machine")] | Literal["auto"] | None = None
    gpus_per_node: Annotated[Count, figure(1, 10_000, "GPUs of each node, or of a torus")] | None = None
    intra: Intra | None = None
    inter: Inter | None = None
    fabric: Fabric | None = None
    placement: Placement = "block"
    lab: str = DEFAULT_LAB
    hosts: Any = None
    """The section of the laboratory (emulation.EmulatedHosts)."""
    launch_order: bool = False
    device: DeviceSection
    caution: str | None = None
    """A warning about the file's figures, which each answer repeats."""
    sources: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of GPUs, the network between them, and the kernel costs of their device."""

    name: str
    this_machine: bool
    """Whether ranks are processes on this machine, so that points are measured."""
    cores: int | None
    """The number of CPU cores that all ranks share; None if each rank has a device."""
    topology: Topology
    hosts: EmulatedHosts | None = None
    """The nodes as a laboratory emulates them on this machine; None: not emulated."""
    device: DeviceCosts
    sources: Mapping[str, str]
    """The sources of the numbers."""
    launch_order: bool = False
    """Whether NCCL's kernels of a rank start in the order of their launches, whatever lane they are of, as on GPUs on
    which this suite measures (NCCL_LAUNCH_ORDER_IMPLICIT=1). Off in published clusters, whose figures are of one lane,
    or of no such order."""
    stragglers: Stragglers = field(default_factory=Stragglers)
    warnings: tuple[str, ...] = ()
    """Figures that are out of their plausible ranges, each in a sentence with its unit."""
    caution: str | None = None
    """A warning about the figures, which each answer repeats."""
    transport_options: TransportOptions = DEFAULT_TRANSPORT
    """The transport, if not the default."""

    @classmethod
    def build(cls, config: Any) -> Cluster:
        """The cluster of a conf/cluster file; those of the last few are kept, as many points are on one cluster.

        Raises RequestError for an invalid key or value.
        """
        key = repr(config), cores_here()
        return _BUILT[key] if key in _BUILT else keep(_BUILT, key, cls._built(config), FEW_BUILT)

    @classmethod
    def _built(cls, config: Any) -> Cluster:
        section = read(ClusterSection, config, "cluster")
        hosts = hosts_of(config)
        warnings = implausible(ClusterSection, config, "cluster")
        if hosts:
            warnings += implausible(type(hosts), config["hosts"], "cluster.hosts")
        return cls(
            name=section.name,
            this_machine=section.this_machine,
            cores=cores_here() if section.cores == "auto" else section.cores,
            topology=Topology.build(_network_config(config, hosts), "cluster"),
            hosts=hosts,
            device=DeviceCosts.of(section.device),
            sources=section.sources,
            launch_order=section.launch_order,
            warnings=tuple(warnings),
            caution=section.caution,
        )

    def notes(self, problem: Problem) -> list[str]:
        """Notes for each simulated time: the file's caution, and what its kernel figures don't cover."""
        return [*([self.caution] if self.caution else []), *self.device.notes(problem)]

    def refuse(self, gpus: int) -> None:
        """Raise RequestError for a number of GPUs that doesn't fill whole nodes or doesn't fit the network."""
        node = self.topology.gpus_per_node
        if node and gpus > node and gpus % node:
            low = gpus // node * node
            rule = f"nodes of {self.name} have {node} GPUs, and are used whole"
            raise RequestError(f"gpus={gpus}", rule, f"gpus={low} or {low + node} would work")
        self.network(gpus)
        self.stragglers.slow_ranks(gpus)

    def network(self, gpus: int, *, idle: bool = False) -> Network:
        """The links and routes of `gpus` ranks. `idle`: while none of them computes on shared cores."""
        network = _network(self.topology if idle else self.topology_of(gpus), gpus)
        return self.stragglers.slow_links(network) if self.stragglers.links else network

    def topology_of(self, gpus: int) -> Topology:
        """The topology, with the added latency of messages if `gpus` ranks share fewer cores."""
        inter, cores = self.topology.inter, self.cores
        if not self.hosts or not inter or not cores or gpus <= cores:
            return self.topology
        latency_s = inter.latency_s + self.hosts.crowd_latency_s_of(gpus / cores)
        return self.topology.replace(inter=inter.replace(latency_s=latency_s))

    def tensor_parts(self, gpus: int, degree: int, *, listed: bool = False) -> tuple[Cluster, ...]:
        """For each place in a tensor-parallel group, the cluster whose ranks are the GPUs there.

        Groups are `degree` consecutive ranks of this cluster. The parts have the same links. `listed` has their GPUs
        listed without groups too, so that the first ranks have the links of all `gpus`.
        """
        if degree == 1 and not listed:
            return (self,)
        placed, node = self.topology.place(gpus), self.topology.gpus_per_node or gpus
        parts = [tuple(placed[place::degree].tolist()) for place in range(degree)]
        topologies = [self.topology.replace(gpus_per_node=node, placement=part) for part in parts]
        return tuple(replace(self, topology=topology) for topology in topologies)

    def node_of(self, gpus: int) -> np.ndarray:
        """The node of each rank: (gpus,)."""
        return self.network(gpus).node_of(np.arange(gpus))

    def nodes(self, gpus: int) -> int:
        """How many nodes `gpus` ranks occupy."""
        return len({*self.node_of(gpus).tolist()})

    def shared_cores(self, ranks: int) -> int | None:
        """How many cores ranks and transfers share; None if each rank has a device or a core to itself."""
        take = self.hosts and self.hosts.messages_take_cores
        return self.cores if self.cores and (ranks > self.cores or take) else None

    def effects(self, network: Network, simulated: np.ndarray, phase: str) -> Effects:
        """The machine's effects on blocks and messages of the `simulated` ranks, (q,), in one phase."""
        if self.hosts is None:
            return Effects()
        return self.hosts.effects(network, simulated, self.cores, self.stragglers.seed, phase)

    def is_even(self, ranks: int) -> bool:
        """Whether blocks and messages have no random differences: no noise, and cores and links shared evenly."""
        return not self.stragglers.jitter and (self.hosts is None or self.hosts.is_even(ranks, self.cores))

    @property
    def transport(self) -> TransportKind:
        """The transport between ranks: if not asked for otherwise, NCCL on devices and gloo on shared cores."""
        kind = self.transport_options.kind(on_cpu=self.cores is not None)
        return replace(kind, adds_narrow=True) if self.device.implementation.adds_narrow else kind

    def starts_in_order(self, plan: Plan) -> bool:
        """Whether transfers of a plan's lanes start in plan order on each rank. Those of one lane do anyway."""
        return self.launch_order and self.transport.in_launch_order and len(plan.lanes) > 1

    def algorithm(self, op: Collective, problem: Problem, sent_bytes: int) -> Algorithm | None:
        """The library's algorithm for a collective in which each rank sends so many bytes (cluster.collectives)."""
        return algorithm(op, problem, self.network(problem.n), self.transport, sent_bytes)

    @property
    def even(self) -> Cluster:
        """This cluster without noise, and with cores and links that are shared evenly."""
        return replace(self, hosts=self.hosts and self.hosts.even, stragglers=self.stragglers.replace(jitter=0.0))

    def least_compute_s(self, work_s: np.ndarray) -> float:
        """A lower bound on the seconds that ranks compute, from each rank's seconds alone on a core or device, (n,)."""
        cores = self.shared_cores(work_s.size)
        return max(float(work_s.max()), float(work_s.sum()) / cores if cores else 0.0)

    def crowding(self, ranks: int) -> float:
        """How many times longer work takes that all ranks do at once: 1 where each has a device or a core."""
        return max(1.0, ranks / (self.shared_cores(ranks) or ranks))

    def neighbours(self, gpus: int) -> int:
        """How many consecutive ranks are on the same node: all of them, if there is one."""
        return gpus if self.nodes(gpus) == 1 else self.topology.neighbours(gpus)

    def profile(self, problem: Problem) -> CostProfile:
        """The costs of this cluster that a schedule may use."""
        topology = self.topology_of(problem.n)
        intra, inter = topology.intra, topology.inter or topology.intra
        intra_rate, inter_rate = self.topology.crowded_bytes_per_s(problem.n)
        crowded = self.crowding(problem.n)

        def block_s(phase: str, *folded: Tensor) -> float:
            folds_s = sum(self.device.fold_s(problem, tensor) for tensor in folded)
            return (float(self.device.block_s(problem, phase).max()) + folds_s) * crowded

        return CostProfile(
            forward_block_s=block_s("forward", O),
            backward_block_s=block_s("backward", DQ, DKV),
            node_size=self.neighbours(problem.n),
            intra_latency_s=intra.latency_s,
            intra_bytes_per_s=intra_rate,
            inter_latency_s=inter.latency_s,
            inter_bytes_per_s=inter_rate,
        )


FEW_BUILT = 8
"""How many clusters are kept."""
_BUILT: dict[tuple[str, int], Cluster] = {}


def _network_config(config: Mapping[str, Any], hosts: EmulatedHosts | None) -> dict[str, Any]:
    """The Topology section of a conf/cluster file: its own keys, or those that follow from its hosts."""
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
