"""The tiers of a network, as cluster files have them: links inside a node, by kind, and NICs; and their levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from sp_bench.errors import RequestError
from sp_bench.reading import Count, NotNegative, Positive, Section, figure

Crossing = tuple[str, np.ndarray]
"""(link class, number in its block of the link that each flow crosses, (F,); -1 for none)."""


@dataclass(frozen=True)
class Level:
    """Consecutive GPUs that share one link out, and one in, to all others."""

    name: str
    gpus: int
    """How many GPUs share a link."""
    bytes_per_s: float

    def crossings(self, a: np.ndarray, b: np.ndarray) -> tuple[Crossing, Crossing]:
        """The link out and the link in that flows from GPU a to GPU b cross."""
        out, into = a // self.gpus, b // self.gpus
        same = out == into
        return (f"{self.name} out", np.where(same, -1, out)), (f"{self.name} in", np.where(same, -1, into))


def climb(levels: Sequence[Level], a: np.ndarray, b: np.ndarray) -> list[Crossing]:
    """The links that flows from GPU a to GPU b cross: up the levels where a and b differ, and down again."""
    pairs = [level.crossings(a, b) for level in levels]
    return [out for out, _ in pairs] + [into for _, into in reversed(pairs)]


_A_GPU = "bytes/s of each GPU, in each direction"
_A_NIC = "bytes/s of each NIC, in each direction"
SECONDS = figure(0, 0.05, "seconds")
_RATE = figure(1e7, 5e12, _A_GPU)
FEW = figure(1, 1024, "of a node")


class Tier(Section, frozen=True, kw_only=True):
    """The keys that transfers inside nodes and across nodes have in common."""

    bytes_per_s: Annotated[Positive, _RATE]
    """Bandwidth of each GPU, or of each NIC, in each direction."""
    latency_s: Annotated[NotNegative, SECONDS]
    """Seconds before a transfer's first byte."""
    flow_bytes_per_s: Annotated[Positive, figure(1e6, 5e12, "bytes/s of one transfer")] = math.inf
    """Bandwidth limit of one transfer, such as that of NCCL's channels to one peer."""


class Switch(Tier, frozen=True, kw_only=True, tag_field="kind", tag="switch"):
    """Every GPU has a port on a full switch (NVSwitch)."""

    nvls_bytes_per_s: Annotated[Positive, _RATE] | None = None
    """The rate of a GPU in an all-gather by the switch's multicast (NVLink SHARP); None: it has none."""

    def levels(self) -> list[Level]:
        """The shared links of a node, from its GPUs up."""
        return [Level("port", 1, self.bytes_per_s)]


class FullMesh(Tier, frozen=True, kw_only=True, tag_field="kind", tag="full_mesh"):
    """A cable between any two GPUs of a node (OAM boards, HCCS).

    Each cable has an even share of a GPU's bytes_per_s; traffic to one peer can't use the cables to the others.
    """

    nvls_bytes_per_s: ClassVar[None] = None

    def levels(self) -> list[Level]:
        """An empty list: no link is shared."""
        return []


class PcieTree(Switch, frozen=True, kw_only=True, tag="pcie_tree"):
    """GPUs on PCIe switches, and switches on the host bridge of a socket.

    Transfers inside a switch (PIX) cross only the GPUs' own links. Those inside a socket (PXB, PHB) also cross the
    uplinks of switches, others (SYS) also the links of sockets. A NIC is on the switch of the first GPU that it serves.
    """

    gpus_per_switch: Annotated[Count, FEW]
    uplink_bytes_per_s: Annotated[Positive, figure(1e8, 1e12, "bytes/s of each PCIe switch, in each direction")]
    """Bandwidth of each PCIe switch's uplink, in each direction."""
    gpus_per_socket: Annotated[Count, FEW] | None = None
    """None: all switches are on one host bridge."""
    socket_bytes_per_s: Annotated[Positive, figure(1e8, 2e12, "bytes/s of a socket, in each direction")] | None = None
    """Bandwidth of each socket to the others, in each direction."""
    crowding: Annotated[NotNegative, figure(0, 2, "the exponent of the number of transfers")] = 0.0
    """How much links lose to concurrent flows: each of p transfers that a GPU has under way at once inside its node
    loads their links p**crowding times. CPUs are poor PCIe switches: all-to-alls get a fraction of a ring's rate."""

    def levels(self) -> list[Level]:
        shared = [*super().levels(), Level("uplink", self.gpus_per_switch, self.uplink_bytes_per_s)]
        if self.gpus_per_socket and self.socket_bytes_per_s:
            shared.append(Level("socket", self.gpus_per_socket, self.socket_bytes_per_s))
        return shared

    def __post_init__(self) -> None:
        """Raises RequestError for keys that don't fit each other."""
        if (self.gpus_per_socket is None) != (self.socket_bytes_per_s is None):
            rule = f"goes with socket_bytes_per_s, which is {self.socket_bytes_per_s}"
            raise RequestError(f"gpus_per_socket={self.gpus_per_socket}", rule, "both or neither would work")


class Torus(Tier, frozen=True, kw_only=True, tag_field="kind", tag="torus"):
    """Cables of bytes_per_s each way join each GPU to its two neighbours in every dimension (TPU pods)."""

    shape: Annotated[tuple[Annotated[Count, figure(1, 1024, "GPUs of each dimension")], ...], Meta(min_length=1)]
    """GPUs in each dimension; consecutive ones differ in the last."""
    wrap: bool = True
    """Whether the last GPU of each row is joined to its first; a mesh has no such cables."""

    nvls_bytes_per_s: ClassVar[None] = None

    def levels(self) -> list[Level]:
        """An empty list: no link is shared by the GPUs below it."""
        return []

    @property
    def wires(self) -> int:
        """How many links each GPU sends on: one in either direction of each dimension."""
        return 2 * len(self.shape)

    def hops(self, a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
        """The links that flows from GPU a to GPU b of the same node cross, (F,) each, -1 for none: dimension by
        dimension, the shorter way round.

        GPUs of a node count the last of D dimensions fastest. Link 2 (D g + d) + s leaves GPU g along dimension d,
        upwards (s = 0) or downwards (1).
        """
        shape, node = self.shape, math.prod(self.shape)
        links, first = [], self.wires * (a // node * node)
        at = list(np.unravel_index(a % node, shape))
        for dimension, (size, target) in enumerate(zip(shape, np.unravel_index(b % node, shape), strict=True)):
            distance = target - at[dimension]
            if self.wrap:
                distance = (distance + size // 2) % size - size // 2
            way = np.sign(distance)
            for _ in range(size // 2 if self.wrap else size - 1):
                node_at = np.ravel_multi_index(at, shape)
                moves = at[dimension] != target
                links.append(np.where(moves, first + 2 * (len(shape) * node_at + dimension) + (way < 0), -1))
                at[dimension] = (at[dimension] + moves * way) % size
        return links


Intra = Switch | FullMesh | PcieTree | Torus
"""The network inside a node, by `kind`; switch if there is none."""


class Inter(Tier, frozen=True, kw_only=True):
    """The NICs of a node. With fewer NICs than GPUs, consecutive GPUs share one."""

    bytes_per_s: Annotated[Positive, figure(1e6, 2e11, _A_NIC)]
    nics_per_node: Annotated[Count, FEW] | None = None
    """None: one NIC per GPU."""
