"""The flows of a plan's transfers: what each message takes of which links, after which delay."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from sp_bench.cluster.cluster import Cluster
from sp_bench.cluster.emulation import AS_IT_IS, Effects, Message, Wire
from sp_bench.lower import Lowering
from sp_bench.lower.early import by_messages
from sp_bench.plan.groups import Exchange, Group
from sp_bench.plan.members import members
from sp_bench.plan.ops import Pass, RowCollective, Transfer, TreeReduce
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import Tensor
from sp_bench.plan.transfers import messages, peers
from sp_bench.simulate import collectives
from sp_bench.simulate.noise import Noise
from sp_bench.simulate.rows import CORE_WORK_PER_S, Path
from sp_bench.simulate.symmetry import Quotient
from sp_bench.simulate.transfer_costs import TransferCosts

KEPT_PATHS = 2**17
"""Paths of so many ranks at most are kept of a quotient for the next plan: 20 MB."""

_PATHS: WeakKeyDictionary[Quotient, dict[tuple[Group | Exchange, int, int], Path]] = WeakKeyDictionary()
"""MessageFlows.paths: a method's phases and layouts have the same ones."""


class Flow(NamedTuple):
    """The flows of one message of a transfer, by sender: (n,) each."""

    delay_s: np.ndarray
    sent: np.ndarray | float
    over: Path
    weight: np.ndarray | float
    sends: np.ndarray | bool
    """Whether a rank sends it, and whether it receives one: True for all."""
    receives: np.ndarray | bool
    later_bytes: np.ndarray | None
    """Those of its Wire, (n,); None without any."""


class MessageFlows:
    """The flows of transfers among the ranks that are simulated, (q,) each. Arrays that are the same every time are
    made once.
    """

    def __init__(
        self,
        problem: Problem,
        cluster: Cluster,
        lowering: Lowering,
        costs: TransferCosts,
        quotient: Quotient,
        effects: Effects,
        noise: Noise,
    ) -> None:
        self._problem, self._cluster, self._lowering, self._costs = problem, cluster, lowering, costs
        self._quotient, self._ranks, self._effects, self._noise = quotient, quotient.ranks, effects, noise
        self._network, self._cores = cluster.network(problem.n), cluster.shared_cores(problem.n)
        self.paths = _PATHS.setdefault(quotient, {})
        """By (group, shift, at_once), those found so far, of this plan and of others of these ranks."""
        self._alike: dict[tuple[Group | Exchange, int, Tensor, bool], list[Flow]] = {}
        """The flows of transfers that are the same every time."""

    def of(self, index: int, op: Transfer, hidden_s: np.ndarray | None = None) -> list[Flow]:
        """The flow of each message of the plan's transfer number `index`, of whose latency so much is hidden: (q,).

        A Pass that is the same on all ranks has the same ones every time.
        """
        if hidden_s is not None or self._noise.variance or self._cluster.hosts or not self._costs.is_alike(index, op):
            return self._found(index, op, hidden_s)
        assert isinstance(op, Pass)
        key = (op.group, op.shift, op.tensor, op.send in self._lowering.unsummed)
        if key not in self._alike:
            self._alike[key] = self._found(index, op, None)
        return self._alike[key]

    def path(self, group: Group | Exchange, shift: int, at_once: int = 1) -> Path:
        """The path of every simulated rank's message to the rank `shift` ahead in the group, one of `at_once`."""
        if (group, shift, at_once) not in self.paths:
            target = members(group, shift, self._problem.n)
            path = collectives.path_to(target, self._network, self._quotient, capped=True)
            crowding = self._network.crowding(path.inter, at_once)
            loads = path.loads if np.all(crowding == 1) else path.loads * crowding[:, None]
            self.paths[group, shift, at_once] = path._replace(loads=loads)
        return self.paths[group, shift, at_once]

    def on_wire(self, path: Path, wire: Wire) -> Path:
        """The path of a message at its own rate, with what it takes of the cores that ranks share."""
        if np.any(wire.most_bytes_per_s < path.rate_cap):
            path = path._replace(rate_cap=np.minimum(path.rate_cap, wire.most_bytes_per_s))
        if not self._cores or not np.any(wire.core_s_per_byte):
            return path
        taken = CORE_WORK_PER_S * np.broadcast_to(wire.core_s_per_byte, self._ranks.size)[:, None]
        links = np.hstack([path.links, self.on_cores.links])
        return path._replace(links=links, loads=np.hstack([path.loads, taken * self.on_cores.loads]))

    @cached_property
    def on_cores(self) -> Path:
        """Cores that ranks share are one link, on which work flows at most at a second per second, and fairly."""
        q, kinds = self._ranks.size, np.arange(self._ranks.size)
        caps, loads = np.full(q, CORE_WORK_PER_S), self._quotient.sizes[:, None].astype(float)
        cores = np.full((q, 1), self._quotient.link_bytes_per_s.size)
        return Path(kinds, kinds, np.zeros(q), caps, cores, loads, np.zeros(q, bool), caps)

    def keep_few(self) -> None:
        """Keep no paths for the next plan if there are many."""
        if len(self.paths) * self._ranks.size > KEPT_PATHS:
            _PATHS.pop(self._quotient, None)

    def _found(self, index: int, op: Transfer, hidden_s: np.ndarray | None) -> list[Flow]:
        # Those of a tree come one after another, and what the first has staged is staged for all.
        flows, pairs = [], peers(op)
        at_once = 1 if isinstance(op, TreeReduce) else len(pairs)
        paths = [self.path(*pair, at_once) for pair in pairs]
        sends, receives = self._costs.moves(index, op, self._ranks)
        staged_s = self._costs.staged_s(index, op, self._ranks) * sends
        staged = bool(np.any(staged_s))
        sizes = messages(op, self._problem, self._ranks, self._costs.wanted.get(index))
        each = [Message(*message) for message in zip(pairs, sizes, (path.inter for path in paths), strict=True)]
        by_library = not by_messages(op)
        together = [each[i : i + at_once] for i in range(0, len(each), max(at_once, 1))]
        wires = [wire for some in together for wire in self._effects.on_wire(some, by_library=by_library)]
        for path, message, wire in zip(paths, each, wires, strict=True):
            # The lane casts or packs what it sends before it posts it.
            if isinstance(op, RowCollective):  # no message without rows
                sends = message.bytes > 0
                receives = sends[path.source]
            delay_s, over, sent, later = self._latency_s(path, hidden_s), path, message.bytes, None
            if sends is not True:
                delay_s = delay_s * sends
            if staged:
                delay_s = delay_s + staged_s
            if wire is not AS_IT_IS:
                over, sent = self.on_wire(path, wire), sent - wire.later_bytes
                later = np.asarray(wire.later_bytes) if np.any(wire.later_bytes) else None
            flows.append(Flow(delay_s, sent, over, wire.weight, sends, receives, later))
            staged = staged and not isinstance(op, TreeReduce)
        return flows

    def _latency_s(self, path: Path, hidden_s: np.ndarray | None) -> np.ndarray:
        """(q,) The latency of each rank's message, without what a pipelined start hides of it."""
        latency_s = path.latency_s
        if self._noise.variance:
            latency_s = latency_s * self._noise(self._ranks.size)
        return latency_s if hidden_s is None else np.maximum(latency_s - hidden_s, 0.0)
