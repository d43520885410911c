"""The network of a cluster: its links, and which of them a transfer between two ranks crosses.

GPUs are numbered over all nodes: those of node 0, then those of node 1, ... A link has one direction: a full-duplex
cable is two links. Each class of links has one block of numbers, so that a route is arithmetic on arrays. The blocks,
in this order where a cluster has them, with g GPUs to a node:

| class | of each | number in its block |
|---|---|---|
| pair | GPU to each of its node (full_mesh) | from * g + to % g |
| wire | GPU to its neighbours (torus) | Torus.hops |
| port out, port in | GPU (switch, pcie_tree) | GPU |
| uplink out, uplink in | PCIe switch (pcie_tree) | GPU // gpus_per_switch |
| socket out, socket in | socket (pcie_tree) | GPU // gpus_per_socket |
| nic out, nic in | NIC | GPU // GPUs that share one |
| leaf out, leaf in | leaf switch, to the spine and back | GPU // (g * nodes_per_leaf) |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from sp_bench.cluster.tiers import SECONDS, Crossing, FullMesh, Inter, Intra, Level, PcieTree, Switch, Torus, climb
from sp_bench.errors import RequestError
from sp_bench.plan.patterns import divisors
from sp_bench.reading import FINITE, Count, Natural, NotNegative, Section, figure, read

MAX_LINKS = 20_000_000
"""As many as fit a few GB of memory."""


class Fabric(Section, frozen=True, kw_only=True):
    """A fat tree: consecutive nodes share a leaf switch with uplinks to a non-blocking spine."""

    nodes_per_leaf: Annotated[Count, figure(1, 4096, "nodes of each leaf switch")]
    oversubscription: Annotated[
        float, Meta(ge=1, le=FINITE, examples=[1]), figure(1, 64, "times the rate of a leaf's uplinks")
    ] = 1.0
    """Bandwidth of the NICs below a leaf over that of its uplinks."""
    latency_s: Annotated[NotNegative, SECONDS] = 0.0
    """Added latency of a transfer to another leaf."""


GPUS = Meta(
    description="block, cyclic, or a list of different GPUs, counted over all nodes", examples=["block", [0, 2, 1, 3]]
)
Placement = Annotated[Literal["block", "cyclic"] | tuple[Natural, ...], GPUS]


class Topology(Section, frozen=True, kw_only=True):
    """Equal nodes of GPUs, the NICs and the fabric between them, and the GPU that each rank is on."""

    gpus_per_node: Annotated[Count, figure(1, 10_000, "GPUs of each node, or of a torus")] | None
    """None: all ranks are on one node."""
    intra: Intra
    inter: Inter | None = None
    """None: there is only one node."""
    fabric: Fabric | None = None
    """None: the fabric is non-blocking."""
    placement: Placement = "block"
    """block: ranks fill node after node; cyclic: rank r is on node r % nodes; list: rank r is on GPU placement[r]."""

    @classmethod
    def build(cls, config: Any, path: str = "cluster.network") -> Topology:
        """The topology of a section; `path` names it in errors. Raises RequestError for an invalid key or value."""
        return read(cls, config, path)

    def __post_init__(self) -> None:
        """Raises RequestError for keys that don't fit each other."""
        g, intra, fabric, placement = self.gpus_per_node, self.intra, self.fabric, self.placement
        nics = self.inter.nics_per_node if self.inter else None
        if g is None and (type(intra) is not Switch or nics or fabric or not isinstance(placement, str)):
            rule = "must be a number beside a fabric, nics_per_node, a list of GPUs, or an intra.kind other than switch"
            raise RequestError("gpus_per_node=null", rule, "gpus_per_node=8 would work")
        if isinstance(intra, PcieTree):
            _check_divides("intra.gpus_per_switch", intra.gpus_per_switch, "gpus_per_node", g)
            _check_divides("intra.gpus_per_socket", intra.gpus_per_socket, "gpus_per_node", g)
            _check_divides("intra.gpus_per_switch", intra.gpus_per_switch, "gpus_per_socket", intra.gpus_per_socket)
        if isinstance(intra, Torus) and math.prod(intra.shape) != g:
            rule, works = f"must have gpus_per_node={g} GPUs", f"gpus_per_node={math.prod(intra.shape)} would work"
            raise RequestError(f"intra.shape={list(intra.shape)}", rule, works)
        _check_divides("inter.nics_per_node", nics, "gpus_per_node", g)
        if fabric and not self.inter:
            raise RequestError("fabric", "joins NICs, which inter gives", "both or neither would work")
        if not isinstance(placement, str) and len(set(placement)) < len(placement):
            rule, example = f"must be {GPUS.description}", "placement=[0, 2, 1, 3] would work"
            raise RequestError(f"placement={list(placement)}", rule, example)

    def place(self, n: int) -> np.ndarray:
        """The GPU of each of n ranks: (n,). Raises RequestError if `placement` lists fewer GPUs."""
        ranks = np.arange(n)
        if self.placement == "block" or self.gpus_per_node is None:
            return ranks
        if self.placement == "cyclic":
            nodes = -(-n // self.gpus_per_node)
            return ranks % nodes * self.gpus_per_node + ranks // nodes
        if len(self.placement) < n:
            rule = f"the cluster's placement lists {len(self.placement)} GPUs"
            raise RequestError(f"gpus={n}", rule, f"gpus={len(self.placement)} would work")
        return np.array(self.placement[:n])

    def neighbours(self, n: int) -> int:
        """How many consecutive ranks are on one node; 1 if ranks don't fill node after node."""
        if isinstance(self.placement, str):
            return (self.gpus_per_node or n) if self.placement == "block" else 1
        node = self.place(n) // (self.gpus_per_node or n)
        together = int((node == node[0]).sum())
        return together if np.array_equal(node, np.repeat(node[::together], together)[:n]) else 1

    def crowded_bytes_per_s(self, n: int) -> tuple[float, float]:
        """(inside a node, across nodes): bytes/s that a rank gets if all ranks send one transfer at once."""
        g, intra, inter = self.gpus_per_node or n, self.intra, self.inter
        inside = min(intra.bytes_per_s / (max(g - 1, 1) if isinstance(intra, FullMesh) else 1), intra.flow_bytes_per_s)
        if inter is None:
            return inside, inside
        shared = inter.bytes_per_s * (inter.nics_per_node or g) / g
        return inside, min(shared / (self.fabric.oversubscription if self.fabric else 1), inter.flow_bytes_per_s)

    @property
    def shares_links(self) -> str:
        """The links that several GPUs have together, in words; empty where each has its own port and NIC."""
        intra, nics = self.intra, self.inter.nics_per_node if self.inter else None
        shared = [f"intra.kind={type(intra).__struct_config__.tag}"] if type(intra) is not Switch else []
        shared += [f"inter.nics_per_node={nics}"] if nics and nics < (self.gpus_per_node or nics + 1) else []
        return ", ".join(shared + (["fabric"] if self.fabric and self.fabric.oversubscription > 1 else []))

    def between(self, g: int) -> list[Level]:
        """The shared links between nodes of g GPUs, from the NICs up."""
        if not self.inter:
            return []
        nics = self.inter.nics_per_node or g
        levels = [Level("nic", g // nics, self.inter.bytes_per_s)]
        if self.fabric:
            below = self.fabric.nodes_per_leaf
            rate = below * nics * self.inter.bytes_per_s / self.fabric.oversubscription
            levels.append(Level("leaf", below * g, rate))
        return levels

    def network(self, n: int) -> Network:
        """The links of n ranks. Raises RequestError if the cluster has too few GPUs, or the network too many links."""
        gpu, g = self.place(n), self.gpus_per_node or n
        # Of a list, all GPUs have links, so that the first ranks of it share those of all.
        last = max(self.placement) if isinstance(self.placement, tuple) else int(gpu.max())
        gpus = (last // g + 1) * g
        if gpus > g and not self.inter:
            raise RequestError(f"gpus={n}", f"the cluster is one node of {g}, without NICs", f"gpus={g} would work")
        blocks = {}
        if isinstance(self.intra, FullMesh):
            blocks["pair"] = gpus * g, self.intra.bytes_per_s / max(g - 1, 1)
        if isinstance(self.intra, Torus):
            blocks["wire"] = gpus * self.intra.wires, self.intra.bytes_per_s
        for level in [*self.intra.levels(), *self.between(g)]:
            both = f"{level.name} out", f"{level.name} in"
            blocks |= dict.fromkeys(both, (-(-gpus // level.gpus), level.bytes_per_s))
        counts, rates = zip(*blocks.values(), strict=True)
        if sum(counts) > MAX_LINKS:
            rule = f"this network has {sum(counts):,} links; at most {MAX_LINKS:,} are simulated"
            raise RequestError(f"gpus={n}", rule, "fewer GPUs would work")
        return Network(
            topology=self,
            gpus_per_node=g,
            gpu=gpu,
            first_link=dict(zip(blocks, np.cumsum((0, *counts)).tolist(), strict=False)),
            link_class=np.repeat(np.arange(len(blocks), dtype=np.int8), counts),
            link_bytes_per_s=np.repeat(rates, counts),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """The routes of F transfers. A transfer from a rank to itself crosses no link, and must have no bytes."""

    latency_s: np.ndarray
    """Seconds until the first byte arrives: (F,)."""
    links: np.ndarray
    """(F, P) The links that each crosses, in order. Entries of -1, anywhere in a row, are no link."""
    rate_cap: np.ndarray
    """(F,) Limit in bytes per second of each transfer; inf for no limit."""
    inter: np.ndarray
    """(F,) Whether it crosses nodes."""


KNOWN = 512
"""How many sets of routes a network keeps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """The L links of n ranks, and the routes between ranks."""

    topology: Topology
    gpus_per_node: int
    gpu: np.ndarray
    """(n,) The GPU of each rank."""
    first_link: dict[str, int]
    """The number of the first link of each class."""
    link_class: np.ndarray
    """(L,) The class of each link, as an index into the keys of first_link."""
    link_bytes_per_s: np.ndarray
    """The rate of each link: (L,)."""
    _known: dict[bytes, Routes] = field(default_factory=dict, init=False, repr=False)

    def node_of(self, rank: np.ndarray) -> np.ndarray:
        """The node of each rank."""
        return self.gpu[rank] // self.gpus_per_node

    def routes_to(self, target: np.ndarray) -> Routes:
        """The routes from every rank to its `target`, (n,); the last few hundred that were asked for are kept."""
        key = target.tobytes()
        if key not in self._known:
            if len(self._known) >= KNOWN:
                self._known.clear()
            routes = self._known[key] = self.routes(np.arange(target.size), target)
            for array in (routes.latency_s, routes.links, routes.rate_cap, routes.inter):
                array.flags.writeable = False
        return self._known[key]

    def routes(self, source: np.ndarray, target: np.ndarray) -> Routes:
        """The routes from source to target ranks: (F,) each."""
        intra, inter, fabric, g = self.topology.intra, self.topology.inter, self.topology.fabric, self.gpus_per_node
        a, b = self.gpu[source], self.gpu[target]
        apart = a // g != b // g
        near = ~apart & (a != b)
        latency_s, rate_cap = np.where(near, intra.latency_s, 0.0), np.where(near, intra.flow_bytes_per_s, math.inf)
        inside = [("pair", a * g + b % g)] if isinstance(intra, FullMesh) else climb(intra.levels(), a, b)
        if isinstance(intra, Torus):
            inside = [("wire", wire) for wire in intra.hops(a, b)]
        across = []
        if inter:
            latency_s[apart], rate_cap[apart] = inter.latency_s, inter.flow_bytes_per_s
            across = self._across(a, b)
        if fabric:
            gpus_per_leaf = g * fabric.nodes_per_leaf
            latency_s += np.where(a // gpus_per_leaf != b // gpus_per_leaf, fabric.latency_s, 0.0)
        # A flow takes one of the two paths, and has -1 on the other.
        both = zip_longest(self._numbers(inside, near), self._numbers(across, apart), fillvalue=-1)
        links = np.stack([np.maximum(one, other) for one, other in both], axis=1)
        return Routes(latency_s=latency_s, links=links, rate_cap=rate_cap, inter=apart)

    def moved(self, move: np.ndarray) -> np.ndarray | None:
        """The permutation of links, (L,), if every rank r takes the place of rank move[r]; None if links would differ.

        It is found only in uniform cases: GPUs that share a link must move to GPUs that share one, and on a PCIe tree,
        where a NIC is on the switch of one of its GPUs, a GPU must keep its place in the node.
        """
        to = np.arange((int(self.gpu.max()) // self.gpus_per_node + 1) * self.gpus_per_node)
        to[self.gpu] = self.gpu[move]
        g, topology = self.gpus_per_node, self.topology
        if isinstance(topology.intra, Torus):
            return None
        if isinstance(topology.intra, PcieTree) and not np.array_equal(to % g, np.arange(to.size) % g):
            return None
        moved = np.arange(self.link_bytes_per_s.size)
        for level in [Level("node", g, 1.0), *topology.intra.levels(), *topology.between(g)]:
            blocks = to // level.gpus
            first = blocks[:: level.gpus]
            if not np.array_equal(np.repeat(first, level.gpus)[: to.size], blocks):
                return None
            for name in (f"{level.name} out", f"{level.name} in"):
                if name in self.first_link:
                    start = self.first_link[name]
                    moved[start : start + first.size] = start + first
        if "pair" in self.first_link:
            pairs = self.first_link["pair"] + to[:, None] * g + to.reshape(-1, g)[np.arange(to.size) // g] % g
            moved[self.first_link["pair"] :][: pairs.size] = pairs.ravel()
        return moved if np.array_equal(self.link_bytes_per_s[moved], self.link_bytes_per_s) else None

    def crowding(self, inter: np.ndarray, at_once: int) -> np.ndarray:
        """How many times each of `at_once` concurrent transfers of a GPU loads its links, (F,), given which cross
        nodes (PcieTree.crowding).
        """
        intra = self.topology.intra
        exponent = intra.crowding if isinstance(intra, PcieTree) else 0.0
        return np.where(inter, 1.0, float(max(at_once, 1)) ** exponent)

    def alone_bytes_per_s(self, routes: Routes, *, capped: bool = True) -> np.ndarray:
        """Bytes/s of each transfer without any other, (F,); inf from a rank to itself.

        A collective has more channels than a message, and is not `capped` as one.
        """
        rates = np.append(self.link_bytes_per_s, math.inf)[routes.links].min(axis=1)  # -1 stands for inf
        return np.minimum(rates, routes.rate_cap) if capped else rates

    def _across(self, a: np.ndarray, b: np.ndarray) -> list[Crossing]:
        """The links that flows from GPU a to GPU b of another node cross, in order."""
        intra, (nic, *leaf) = self.topology.intra, self.topology.between(self.gpus_per_node)
        path = climb([nic, *leaf], a, b)
        if not isinstance(intra, PcieTree):
            return path
        (port, *above), nic_a, nic_b = intra.levels(), a // nic.gpus * nic.gpus, b // nic.gpus * nic.gpus
        port_out, port_in = port.crossings(a, b)
        return [port_out, *climb(above, a, nic_a), *path, *climb(above, nic_b, b), port_in]

    def _numbers(self, path: list[Crossing], crosses: np.ndarray) -> list[np.ndarray]:
        """The link numbers of a path in the network: [(F,), ...], -1 for flows that don't cross it."""
        return [np.where(crosses & (place >= 0), self.first_link[name] + place, -1) for name, place in path]


def _check_divides(path: str, part: int | None, name: str, whole: int | None) -> None:
    """Raise RequestError if `part` doesn't divide `whole`."""
    if part and whole and whole % part:
        choices = ", ".join(map(str, divisors(whole)))
        raise RequestError(f"{path}={part}", f"must divide {name}={whole}", f"{choices} would work")
