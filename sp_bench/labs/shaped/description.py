"""Shaped hosts: what the links between them carry, from which their topology follows and by which they are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from msgspec import Meta

from sp_bench.cluster.emulation import EmulatedHosts
from sp_bench.cluster.topology import Network
from sp_bench.errors import RequestError
from sp_bench.labs.shaped.effects import ShapedEffects
from sp_bench.reading import Count, NotNegative, Positive

OF_CORES = ("byte_core_s", "link_cores", "message_core_s")
"""What messages take of the cores that ranks share."""
MOST_UNEVEN_RANKS = 64
"""Turns on shared cores, and unequal shares of links, are simulated of so many ranks at most: no two are alike then,
and every block or message that begins or ends changes what all others get. More ranks share evenly."""
MOST_AT_ONCE = 0.75
"""Of a message, where it is smaller than a burst: the rest comes only after what is owed for the one before."""


class Hosts(EmulatedHosts, frozen=True, kw_only=True):
    """Hosts that share this machine's cores, each with one link to a switch; leaf switches join over a spine.

    A host is a node of the simulated topology, its link the node's one NIC, and ranks on it talk over its loopback.
    """

    lab: ClassVar[str] = "shaped"
    core_figures: ClassVar[tuple[str, ...]] = OF_CORES

    link_bytes_per_s: Positive
    """Of a host's link in each direction, headers included."""
    burst_bytes: Count
    """What a shaped link that was idle lets through at once, headers included."""
    payload_share: Annotated[float, Meta(gt=0, le=1, examples=[0.95])]
    """Of a link's rate, what messages get."""
    latency_s: NotNegative
    """Before a message's first byte, where ranks have a core each."""
    crowd_latency_s: NotNegative = 0.0
    """In addition, for every rank that a core has beyond its first: the message waits for the core as well."""
    ranks_per_host: Count = 1
    hosts_per_leaf: Count | None = None
    """Consecutive hosts that share a leaf switch and its uplink; None: one switch for all."""
    uplink_bytes_per_s: Positive | None = None
    """Of each leaf switch to the spine in each direction, headers included."""
    uplink_latency_s: NotNegative = 0.0
    """Of going to another leaf, in addition."""
    flow_bytes_per_s: Positive | None = None
    """Most that one message takes, however fast its links: what this machine's cores can carry; None: no limit."""
    byte_core_s: NotNegative = 0.0
    """Seconds of a core that a byte to another host takes from blocks, sending and receiving it."""
    link_cores: NotNegative = 0.0
    """Cores that a link takes from them in addition while its host sends at the link's rate, whatever that is."""
    message_core_s: NotNegative = 0.0
    """Seconds of a core that each message, one tensor, takes in addition: lanes look up what to do, threads are woken,
    and caches used."""
    turn_s: NotNegative = 0.0
    """Where ranks share cores, these are handed over in turns of about so long, so that blocks don't get the same
    (effects.Turns)."""
    ahead_bytes: NotNegative = 0.0
    """By so many bytes one of several messages that share a link is ahead of another (effects.Shares)."""
    transfers_first: bool = True
    """Whether transfers go before blocks on the cores that they share, as a network's hardware needs none. Simulated
    ones always do."""

    @property
    def core_s_per_byte(self) -> float:
        """Seconds of the cores that a byte takes. Of `link_cores` its part at the full rate of the link: one that
        something else holds below that takes less here than it should.
        """
        return self.byte_core_s + self.link_cores / (self.payload_share * self.link_bytes_per_s)

    def at_once_bytes(self, sent: Any, sharers: Any = 1) -> Any:
        """Of messages of so many bytes, what goes through at once where their links were idle.

        A link owes it to its rate and carries nothing else meanwhile: a lane's messages in a row get the rate and no
        more. Of a burst each of the `sharers` gets its part, messages that begin together on a link.
        """
        return np.minimum(self.payload_share * self.burst_bytes / sharers, MOST_AT_ONCE * sent)

    def __post_init__(self) -> None:
        """Raises RequestError for one key of a pair."""
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
        """`turn_s` where ranks crowd the cores; 0 where each has its own, or they are more than MOST_UNEVEN_RANKS."""
        return self.turn_s if cores and cores < ranks <= MOST_UNEVEN_RANKS else 0.0

    def ahead_bytes_of(self, ranks: int) -> float:
        """`ahead_bytes` of up to MOST_UNEVEN_RANKS ranks, 0 of more."""
        return self.ahead_bytes if ranks <= MOST_UNEVEN_RANKS else 0.0

    def effects(
        self, network: Network, simulated: np.ndarray, cores: int | None, seed: int, phase: str
    ) -> ShapedEffects:
        return ShapedEffects(self, network, simulated, cores, seed, phase)

    def least_carried_bytes(self, crossing: np.ndarray, lanes: int) -> np.ndarray:
        return crossing - self.at_once_bytes(crossing, 1 / lanes)

    def network(self) -> Mapping[str, Any]:
        """The sections of a topology that describe the network between hosts, with the rates that messages get."""
        link_bytes_per_s = self.payload_share * self.link_bytes_per_s
        fabric = None
        if self.hosts_per_leaf and self.uplink_bytes_per_s:
            below_bytes_per_s = self.hosts_per_leaf * self.link_bytes_per_s
            fabric = {
                "nodes_per_leaf": self.hosts_per_leaf,
                # An uplink with more than all hosts below it can send is never full.
                "oversubscription": max(1.0, below_bytes_per_s / self.uplink_bytes_per_s),
                "latency_s": self.uplink_latency_s,
            }
        inter = {"bytes_per_s": link_bytes_per_s, "latency_s": self.latency_s, "nics_per_node": 1}
        if self.flow_bytes_per_s:
            inter["flow_bytes_per_s"] = self.flow_bytes_per_s
        return {"gpus_per_node": self.ranks_per_host, "inter": inter, "fabric": fabric}
