"""The effects of shaped hosts in a simulation: bursts, uneven shares of cores and links, core time of messages.

An idle link lets a burst through at once and owes it to its rate: the burst is carried after the message, so a lane's
consecutive messages get the rate and no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sp_bench.cluster.emulation import Effects, Message, Wire
from sp_bench.cluster.topology import Network
from sp_bench.plan.groups import Exchange, Group
from sp_bench.plan.method import PHASES
from sp_bench.simulate.noise import log_normal

if TYPE_CHECKING:
    from sp_bench.labs.shaped.description import Hosts


class ShapedEffects(Effects):
    """The effects of shaped hosts on the simulated ranks (q,) of one phase."""

    defers = True

    def __init__(
        self, hosts: Hosts, network: Network, simulated: np.ndarray, cores: int | None, seed: int, phase: str
    ) -> None:
        n = network.gpu.size
        self._hosts, self._network, self._simulated = hosts, network, simulated
        self._turns = Turns(hosts.turn_s_of(n, cores), seed, phase)
        self._shares = Shares(hosts.ahead_bytes_of(n), seed, phase)
        self._sharers: dict[tuple[tuple[Group | Exchange, int], ...], list[np.ndarray]] = {}

    def block_weights(self, work_s: np.ndarray) -> np.ndarray | float:
        return self._turns(work_s)

    def on_wire(self, messages: Sequence[Message], *, by_library: bool = False) -> list[Wire]:
        """How the network carries each of the concurrent messages of one transfer, or of one of the library's.

        All messages of the transfer that cross a link share its burst. Each lane has its own burst, so messages of
        several lanes that start together on an idle link gain more than in reality.
        """
        if not messages:  # an all-to-all of one rank
            return []
        carried, hosts = [], self._hosts
        most_bytes_per_s = self._most_bytes_per_s(messages) if by_library else math.inf
        for message, sharers in zip(messages, self._find_sharers(messages), strict=True):
            sent = np.broadcast_to(message.bytes, self._simulated.size)
            core_s_per_byte = hosts.core_s_per_byte + len(message.field_bytes) * hosts.message_core_s / np.maximum(
                message.bytes, 1
            )
            carried.append(
                Wire(
                    weight=np.where(message.inter, self._shares(sent), 1.0),
                    later_bytes=np.where(message.inter, hosts.at_once_bytes(message.bytes, sharers), 0.0),
                    core_s_per_byte=core_s_per_byte * message.inter,
                    most_bytes_per_s=np.where(message.inter, most_bytes_per_s, math.inf),
                )
            )
        return carried

    def _most_bytes_per_s(self, messages: Sequence[Message]) -> np.ndarray | float:
        """The most of its host's link that each message of a library's all-to-all gets, in bytes/s: (q,), or inf."""
        hosts, leaving = self._hosts, sum(message.inter for message in messages)
        if hosts.all_to_all_share == 1:
            return math.inf
        return hosts.all_to_all_share * hosts.payload_bytes_per_s / (hosts.ranks_per_host * np.maximum(leaving, 1))

    def _find_sharers(self, messages: Sequence[Message]) -> list[np.ndarray]:
        """For each of some concurrent messages, (q,): the number of messages on its busiest link."""
        to = tuple(message.to for message in messages)
        if to not in self._sharers:
            everyone = np.arange(self._network.gpu.size)
            links = [self._network.routes(everyone, group.member(everyone, shift)).links for group, shift in to]
            crossing = np.bincount(1 + np.concatenate([crossed.ravel() for crossed in links]))
            crossing[0] = 1  # no link
            self._sharers[to] = [crossing[1 + crossed[self._simulated]].max(axis=1) for crossed in links]
        return self._sharers[to]


class Turns:
    """Random shares of shared cores, which differ from block to block because Linux hands cores over in turns.

    A block of w seconds has w / turn_s turns, so its share has a relative standard deviation of sqrt(turn_s / w), or of
    1 if the block is shorter than a turn. The total of all shares is unchanged.
    """

    def __init__(self, turn_s: float, seed: int, phase: str) -> None:
        self.turn_s = turn_s
        self.generator = np.random.default_rng([seed, 1 + PHASES.index(phase)])

    def __call__(self, work_s: np.ndarray) -> np.ndarray | float:
        """Weights around 1 of blocks of `work_s` seconds, (blocks,); 1 without turns."""
        if not self.turn_s:
            return 1.0
        variance = np.log1p(self.turn_s / np.maximum(work_s, self.turn_s))
        return log_normal(self.generator, variance, work_s.size)


class Shares:
    """Random shares of messages on a link: queues let some messages go ahead of others, by about `ahead_bytes`.

    The logarithm of the share of a message of b bytes has a standard deviation of ahead_bytes / b, or of 1 if the
    message is shorter than ahead_bytes. A message alone on a link gets all of it. Cores without blocks are shared the
    same way.
    """

    def __init__(self, ahead_bytes: float, seed: int, phase: str) -> None:
        self.ahead_bytes = ahead_bytes
        self.generator = np.random.default_rng([seed, 1 + len(PHASES) + PHASES.index(phase)])

    def __call__(self, sent: np.ndarray) -> np.ndarray | float:
        """Weights around 1 of messages of `sent` bytes, (messages,); 1 if ahead_bytes is 0."""
        if not self.ahead_bytes:
            return 1.0
        variance = (self.ahead_bytes / np.maximum(sent, self.ahead_bytes)) ** 2
        return log_normal(self.generator, variance, sent.size)
