"""A cluster: its nodes, links and devices, as conf/cluster describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sp_bench.machine import cores_here
from sp_bench.plan import CostProfile, Problem
from sp_bench.simulate.costs import DeviceCosts
from sp_bench.simulate.values import count, number, section


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of link: what a GPU gets out of it in each direction, once set up."""

    bytes_per_s: float
    latency_s: float

    @classmethod
    def build(cls, path: str, config: Any) -> Self:
        """The link that a conf/cluster file has at `path`. Raises RequestError for values that make no sense."""
        config = section(path, config, ("bytes_per_s", "latency_s"))
        return cls(
            bytes_per_s=number(f"{path}.bytes_per_s", config["bytes_per_s"]),
            latency_s=number(f"{path}.latency_s", config["latency_s"], zero=True),
        )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of `gpus_per_node` GPUs behind a full switch, and one NIC for each GPU on a non-blocking fabric.

    Ranks fill the nodes in order.
    """

    name: str
    this_machine: bool
    """Whether its ranks are processes of this machine, so that points on it are measured."""
    gpus_per_node: int | None
    """None: all ranks are on one node."""
    cores: int | None
    """CPU cores that all ranks share, where ranks have no device of their own."""
    intra: Link
    """NVLink through a switch, for each GPU and direction."""
    inter: Link
    """The NIC of each GPU, for each direction."""
    device: DeviceCosts
    sources: Mapping[str, str]
    """Where the numbers are from."""

    @classmethod
    def build(cls, config: Any) -> Self:
        """The cluster of a conf/cluster file. Raises RequestError for a key or value that makes no sense."""
        required = ("name", "gpus_per_node", "intra", "inter", "device")
        config = section("cluster", config, required, ("this_machine", "cores", "sources"))
        per_node, cores = config["gpus_per_node"], config.get("cores")
        if cores == "auto":
            cores = cores_here()
        return cls(
            name=str(config["name"]),
            this_machine=config.get("this_machine") is True,
            gpus_per_node=None if per_node is None else count("cluster.gpus_per_node", per_node),
            cores=None if cores is None else count("cluster.cores", cores),
            intra=Link.build("cluster.intra", config["intra"]),
            inter=Link.build("cluster.inter", config["inter"]),
            device=DeviceCosts.build(config["device"]),
            sources=config.get("sources") or {},
        )

    def nodes(self, gpus: int) -> int:
        """How many nodes that many GPUs take."""
        return -(-gpus // (self.gpus_per_node or gpus))

    def node_of(self, rank: np.ndarray) -> np.ndarray:
        """The node of each rank."""
        return rank // self.gpus_per_node if self.gpus_per_node else np.zeros_like(rank)

    def slowdown(self, ranks: int) -> float:
        """How much longer a rank computes since it shares its cores."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def block_s(self, problem: Problem, phase: str) -> np.ndarray:
        """Seconds of one block without its fold, for q chunk below, equal to, above kv chunk: (3,)."""
        return self.device.block_s(problem, phase) * self.slowdown(problem.n)

    def fold_s(self, problem: Problem, tensor: str, *, first: bool = False, arriving: bool = False) -> float:
        """Seconds of folding one chunk's partial into its accumulator."""
        return self.device.fold_s(problem, tensor, first=first, arriving=arriving) * self.slowdown(problem.n)

    def cast_s(self, problem: Problem, tensor: str, *, wire: bool) -> float:
        """Seconds of casting an accumulator to its wire dtype, or to the compute dtype of a result."""
        return self.device.cast_s(problem, tensor, wire=wire) * self.slowdown(problem.n)

    def copy_s(self, problem: Problem, moved_bytes: float) -> float:
        """Seconds of copying so many bytes on a rank's device."""
        return self.device.copy_s(moved_bytes) * self.slowdown(problem.n)

    def profile(self, problem: Problem) -> CostProfile:
        """What a schedule may know of this cluster."""
        one_node = self.nodes(problem.n) == 1

        def block_s(phase: str, *folded: str) -> float:
            return float(self.block_s(problem, phase).max()) + sum(self.fold_s(problem, t) for t in folded)

        return CostProfile(
            forward_block_s=block_s("forward", "o"),
            backward_block_s=block_s("backward", "dq", "dkv"),
            node_size=problem.n if one_node or self.gpus_per_node is None else self.gpus_per_node,
            intra_latency_s=self.intra.latency_s,
            intra_bytes_per_s=self.intra.bytes_per_s,
            inter_latency_s=self.inter.latency_s,
            inter_bytes_per_s=self.inter.bytes_per_s,
        )
