"""A cluster: its nodes, links and devices, as conf/cluster describes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from sp_bench.errors import RequestError, unknown_key
from sp_bench.plan import CostProfile, Problem
from sp_bench.simulate.costs import DeviceCosts


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of link: what a GPU gets out of it in each direction, once set up."""

    bytes_per_s: float
    latency_s: float

    @classmethod
    def build(cls, name: str, config: Mapping[str, Any]) -> Self:
        """The link that a conf/cluster file has under `name`. Raises RequestError for values that make no sense."""
        for key, value in config.items():
            if key not in ("bytes_per_s", "latency_s"):
                raise unknown_key(f"cluster.{name}.{key}", [f"cluster.{name}.{f.name}" for f in fields(cls)])
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise RequestError(f"cluster.{name}.{key}={value}", "must be a number of at least 0", "47e9 would work")
        if config["bytes_per_s"] == 0:
            raise RequestError(f"cluster.{name}.bytes_per_s=0", "a link must move bytes", "47e9 would work")
        return cls(bytes_per_s=float(config["bytes_per_s"]), latency_s=float(config["latency_s"]))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of `gpus_per_node` GPUs behind a full switch, and one NIC for each GPU on a non-blocking fabric.

    Ranks fill the nodes in order.
    """

    name: str
    gpus_per_node: int | None
    """None: all ranks are on one node."""
    intra: Link
    """NVLink through a switch, for each GPU and direction."""
    inter: Link
    """The NIC of each GPU, for each direction."""
    device: DeviceCosts
    sources: Mapping[str, str]
    """Where the numbers are from."""
    cores: int | None = None
    """CPU cores that all ranks share, where ranks have no device of their own."""

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> Self:
        """The cluster of a conf/cluster file. Raises RequestError for a key or value that makes no sense."""
        known = {f.name for f in fields(cls)}
        for key in config:
            if key not in known:
                raise unknown_key(f"cluster.{key}", [f"cluster.{name}" for name in known])
        return cls(
            name=config["name"],
            gpus_per_node=config["gpus_per_node"],
            intra=Link.build("intra", config["intra"]),
            inter=Link.build("inter", config["inter"]),
            device=DeviceCosts.build(config["device"]),
            sources=config.get("sources", {}),
            cores=os.cpu_count() if config.get("cores") == "auto" else config.get("cores"),
        )

    def __post_init__(self) -> None:
        if self.gpus_per_node is not None and self.gpus_per_node < 1:
            raise RequestError(f"cluster.gpus_per_node={self.gpus_per_node}", "must be at least 1", "8 would work")

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

    def profile(self, problem: Problem) -> CostProfile:
        """What a schedule may know of this cluster."""
        one_node = self.nodes(problem.n) == 1
        return CostProfile(
            forward_block_s=float(self.block_s(problem, "forward").max()),
            backward_block_s=float(self.block_s(problem, "backward").max()),
            node_size=problem.n if one_node or self.gpus_per_node is None else self.gpus_per_node,
            intra_latency_s=self.intra.latency_s,
            intra_bytes_per_s=self.intra.bytes_per_s,
            inter_latency_s=self.inter.latency_s,
            inter_bytes_per_s=self.inter.bytes_per_s,
        )
