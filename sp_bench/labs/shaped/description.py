"""The description of shaped hosts: their links, from which they are made and their topology follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from msgspec import Meta

from sp_bench.cluster.emulation import EmulatedHosts
from sp_bench.cluster.topology import Network
from sp_bench.errors import RequestError
from sp_bench.labs.shaped.effects import ShapedEffects
from sp_bench.reading import Count, NotNegative, Positive, figure

_SECONDS = figure(0, 1, "seconds of each message")
OF_CORES = ("byte_core_s", "link_cores", "message_core_s")
"""Figures of the core time that messages take from the ranks on shared cores."""
MOST_UNEVEN_RANKS = 64
"""The most ranks for which turns on shared cores and unequal shares of links are simulated. No two ranks are alike
then, and each block or message that begins or ends changes the shares of all others. More ranks share evenly."""
MOST_AT_ONCE = 0.75
"""The largest fraction of a message that a burst carries: the rest waits for the debt of the message before."""


class Hosts(EmulatedHosts, frozen=True, kw_only=True):
    """Hosts that share this machine's cores. Each has one link to a leaf switch; a spine joins the leaf switches.

    A host is a node of the simulated topology, with its link as the only NIC. Ranks on a host talk over its loopback.
    """

    lab: ClassVar[str] = "shaped"
    core_figures: ClassVar[tuple[str, ...]] = OF_CORES

    link_bytes_per_s: Annotated[Positive, figure(1e4, 1e11, "bytes/s of each host's link, in each direction")]
    """The rate of a host's link in each direction, headers included."""
    burst_bytes: Annotated[Count, figure(1e3, 1e8, "bytes of an idle link")]
    """The bytes that an idle shaped link lets through at once, headers included."""
    payload_share: Annotated[float, Meta(gt=0, le=1, examples=[0.95]), figure(0.1, 1, "of a link's rate")]
    """The fraction of a link's rate that messages get."""
    latency_s: Annotated[NotNegative, _SECONDS]
    """The time before a message's first byte, if each rank has its own core."""
    crowd_latency_s: Annotated[NotNegative, _SECONDS] = 0.0
    """Added latency for every rank on a core beyond its first: the message waits for the core too."""
    ranks_per_host: Annotated[Count, figure(1, 1024, "ranks of each host")] = 1
    hosts_per_leaf: Annotated[Count, figure(1, 4096, "hosts of each leaf switch")] | None = None
    """The number of consecutive hosts that share a leaf switch and its uplink; None: one switch for all."""
    uplink_bytes_per_s: Annotated[Positive, figure(1e4, 1e12, "bytes/s of a leaf, in each direction")] | None = None
    """The rate of each leaf switch's uplink in each direction, headers included."""
    uplink_latency_s: Annotated[NotNegative, _SECONDS] = 0.0
    """Added latency of messages to another leaf."""
    flow_bytes_per_s: Annotated[Positive, figure(1e4, 1e12, "bytes/s of one message")] | None = None
    """The highest rate of a message on any link, which this machine's cores limit; None: no limit."""
    all_to_all_share: Annotated[float, Meta(gt=0, le=1, examples=[0.7]), figure(0.05, 1, "of messages' rate")] = 1.0
    """The fraction of the rate of messages that gloo's all-to-alls get, of which it makes reduce-scatters too.

    It posts the sends to half of a rank's peers before the receives from them, whose notices then wait behind what is
    sent. Simulated messages of an all-to-all get at most so much of their part of the host's link; other lanes get what
    is left."""
    byte_core_s: Annotated[NotNegative, figure(0, 1e-6, "core seconds of each byte")] = 0.0
    """Core seconds that a byte to another host takes from blocks, to send and to receive it."""
    link_cores: Annotated[NotNegative, figure(0, 8, "cores of each host's link")] = 0.0
    """Cores that a link takes in addition while its host sends at the link's rate, at any rate."""
    message_core_s: Annotated[NotNegative, figure(0, 0.1, "core seconds of each message")] = 0.0
    """Core seconds that each message, one tensor, takes in addition: lanes look up operations, threads wake up, and
    caches fill."""
    turn_s: Annotated[NotNegative, figure(0, 1, "seconds of each turn")] = 0.0
    """The length of the turns in which ranks share cores. Turns give blocks unequal shares (effects.Turns)."""
    ahead_bytes: Annotated[NotNegative, figure(0, 1e9, "bytes of each message")] = 0.0
    """Bytes by which one of several messages that share a link is ahead of another (effects.Shares)."""
    transfers_first: bool = True
    """Whether transfers have priority over blocks on shared cores, since a network's hardware needs no cores.
    Simulated transfers always have it."""

    @property
    def payload_bytes_per_s(self) -> float:
        """The rate that messages get of a host's link, in each direction."""
        return self.payload_share * self.link_bytes_per_s

    @property
    def core_s_per_byte(self) -> float:
        """Core seconds of a byte. `link_cores` counts as at the link's full rate, so a message that is slowed by others
        takes less here than in reality.
        """
        return self.byte_core_s + self.link_cores / self.payload_bytes_per_s

    def at_once_bytes(self, sent: Any, sharers: Any = 1) -> Any:
        """The bytes of a message that an idle link carries at once. `sharers` messages starting together share it.

        The link owes these bytes to its rate and carries nothing else meanwhile, so a lane's consecutive messages get
        the rate and no more.
        """
        return np.minimum(self.payload_share * self.burst_bytes / sharers, MOST_AT_ONCE * sent)

    def __post_init__(self) -> None:
        """Raise RequestError if only one of hosts_per_leaf and uplink_bytes_per_s is set."""
        if (self.hosts_per_leaf is None) != (self.uplink_bytes_per_s is None):
            rule = f"goes with uplink_bytes_per_s, which is {self.uplink_bytes_per_s}"
            raise RequestError(f"hosts_per_leaf={self.hosts_per_leaf}", rule, "both or neither would work")

    def crowd_latency_s_of(self, ranks_per_core: float) -> float:
        return self.crowd_latency_s * (ranks_per_core - 1)

    @property
    def messages_take_cores(self) -> bool:
        return bool(self.core_s_per_byte or self.message_core_s)

    @property
    def even(self) -> Self:
        return self.replace(turn_s=0.0, ahead_bytes=0.0)

    def is_even(self, ranks: int, cores: int | None) -> bool:
        return not self.turn_s_of(ranks, cores) and not self.ahead_bytes_of(ranks)

    def turn_s_of(self, ranks: int, cores: int | None) -> float:
        """`turn_s` if ranks share cores; 0 if each has its own, or there are more than MOST_UNEVEN_RANKS."""
        return self.turn_s if cores and cores < ranks <= MOST_UNEVEN_RANKS else 0.0

    def ahead_bytes_of(self, ranks: int) -> float:
        """`ahead_bytes` for up to MOST_UNEVEN_RANKS ranks, 0 for more."""
        return self.ahead_bytes if ranks <= MOST_UNEVEN_RANKS else 0.0

    def effects(
        self, network: Network, simulated: np.ndarray, cores: int | None, seed: int, phase: str
    ) -> ShapedEffects:
        return ShapedEffects(self, network, simulated, cores, seed, phase)

    def least_wire_bytes(self, crossing: np.ndarray, lanes: int) -> np.ndarray:
        return crossing - self.at_once_bytes(crossing, 1 / lanes)

    def network(self) -> Mapping[str, Any]:
        """The Topology keys of the network between hosts, with the rates that messages get."""
        fabric = None
        if self.hosts_per_leaf and self.uplink_bytes_per_s:
            below_bytes_per_s = self.hosts_per_leaf * self.link_bytes_per_s
            fabric = {
                "nodes_per_leaf": self.hosts_per_leaf,
                # An uplink faster than all hosts below it together is never full.
                "oversubscription": max(1.0, below_bytes_per_s / self.uplink_bytes_per_s),
                "latency_s": self.uplink_latency_s,
            }
        inter = {"bytes_per_s": self.payload_bytes_per_s, "latency_s": self.latency_s, "nics_per_node": 1}
        if self.flow_bytes_per_s:
            inter["flow_bytes_per_s"] = self.flow_bytes_per_s
        return {"gpus_per_node": self.ranks_per_host, "inter": inter, "fabric": fabric}
