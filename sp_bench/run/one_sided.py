"""Transfers inside a node, which the sender writes into its peer's memory; another transport does the rest.

The protocol of a Pass, on the lane's stream or thread of each rank:

    receiver: FREE to the sender (its buffer may be overwritten) ......... wait for DATA, go on
    sender:   wait for FREE, copy into the receiver's buffer, DATA to the receiver

A receiver says FREE when its lane starts the transfer, or ahead of it, once the plan's waits say that nothing uses the
buffer any more (Lowering.buffer_free). So no buffer is overwritten before all has been read from it, and none is read
before it has been written. Each lane has signals of its own. Per lane and pair of ranks they alternate with the
transfers, which all ranks have in one order, so that they need no numbers.

It can't deadlock: a transfer's FREE is said before its rank waits for anything of that transfer, and DATA needs only
FREE. So the first transfer in plan order that has not ended can always end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench.plan.ops import Pass, Plan
from sp_bench.run.transport import Call, Key, Message, Transport, Turn

FREE, DATA = 0, 1
"""The meanings of a signal: the receiver's buffer may be written to; it has been written."""


class Signal(NamedTuple):
    """A signal between this rank and another."""

    peer: int
    """The rank at the other end."""
    lane: int
    says: int
    """FREE or DATA."""


class PeerMemory(ABC):
    """Memory of the ranks of a node, which all of them can write to, and signals between them.

    On a GPU all methods but `empty` and `connect` queue work on the current stream.
    """

    neighbours: frozenset[int]
    """The other ranks of this rank's node."""

    outside_bytes: int = 0
    """Bytes of a GPU that it has made outside of torch's allocator."""

    @abstractmethod
    def connect(self, incoming: Sequence[Signal], lanes: int) -> None:
        """Prepare for the signals that this rank will wait for. All ranks call it once, before anything else."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that peers can write to. All ranks make the same ones in the same order."""

    @abstractmethod
    def at(self, peer: int, mine: Tensor, like: Tensor, first: int = 0) -> Tensor:
        """The peer's counterpart of `mine`, which `empty` made, from element `first` on, with the shape and dtype of
        `like`.
        """

    @abstractmethod
    def put(self, signal: Signal) -> None:
        """Signal to a peer, after all that this stream has done before."""

    @abstractmethod
    def wait(self, signal: Signal) -> None:
        """Wait for the next such signal of a peer, before all that this stream does after."""


@dataclass
class OneSidedTransport(Transport):
    """Writes to the memory of this node's ranks; `remote` carries what goes to others, and all collectives."""

    remote: Transport = field(kw_only=True)
    """It has the same group, and counts in the same `sent_bytes`."""
    memory: PeerMemory = field(kw_only=True)
    _said_free: set[tuple[int, int]] = field(init=False, repr=False, default_factory=set)
    """(number of the transfer, source) of those that were told that a buffer is free, ahead of the transfer."""

    def prepare(self, plans: Iterable[Plan]) -> None:
        plans = list(plans)
        self.remote.prepare(plans)
        if self.group is not None:
            lanes = max((len(plan.lanes) for plan in plans), default=0)
            self.memory.connect(incoming_signals(plans, dist.get_rank(self.group)), lanes)

    @property
    def makes_memory(self) -> bool:
        return True

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.memory.empty(shape, dtype)

    def prepost(self, turn: Turn, receives: Sequence[Message]) -> None:
        near, far = self._split(turn, receives)
        for source, _ in near:
            if (turn.number, source) not in self._said_free:
                self._said_free.add((turn.number, source))
                self.memory.put(Signal(source, turn.lane, FREE))
        if far and self.remote.kind.preposts:
            self.remote.prepost(turn, far)

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        (near_in, far_in), (near_out, far_out) = self._split(turn, receives), self._split(turn, sends)
        self.prepost(turn, near_in)
        works = self.remote.start(turn, far_in, far_out, counted_as) if far_in or far_out else ()
        for target, tensors in near_out:
            self.count(tensors, counted_as)
            self._write(turn, target, tensors)
        for source, _ in near_in:
            self.memory.wait(Signal(source, turn.lane, DATA))
            self._said_free.discard((turn.number, source))
        for work in works:
            work.wait()

    @property
    def outside_bytes(self) -> int:
        return self.memory.outside_bytes

    @property
    def crosses_nodes(self) -> bool:
        return self.remote.crosses_nodes

    @property
    def communicators(self) -> tuple[str, ...]:
        return self.remote.communicators

    def collective(self, turn: Turn, call: Call) -> None:
        self.remote.collective(turn, call)

    def _write(self, turn: Turn, target: int, tensors: Sequence[Tensor]) -> None:
        self.memory.wait(Signal(target, turn.lane, FREE))
        for mine, x in zip(turn.landing, tensors, strict=True):
            assert x.is_contiguous(), "a copy engine copies memory as it lies"
            in_run = turn.to_row and x.ndim == 4  # of a batch of one: (1, S, ...); statistics are whole
            first = turn.to_row * (x.numel() // x.shape[1]) if in_run else 0
            self.memory.at(target, mine, x, first).copy_(x)
        self.memory.put(Signal(target, turn.lane, DATA))

    def _split(self, turn: Turn, messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        """Messages with ranks of this node that have a buffer of the plan, and all others."""
        near = [m for m in messages if turn.landing and m[0] in self.memory.neighbours]
        return near, [m for m in messages if not (turn.landing and m[0] in self.memory.neighbours)]


def incoming_signals(plans: Iterable[Plan], rank: int) -> list[Signal]:
    """The signals that a rank may wait for in these plans, from ranks of any node."""
    signals = dict[Signal, None]()
    for plan in plans:
        for op in plan.ops:
            if isinstance(op, Pass):
                lane = plan.lanes.index(op.lane)
                ends = (int(op.target(rank)), FREE), (int(op.source(rank)), DATA)
                signals |= {Signal(peer, lane, says): None for peer, says in ends if peer != rank}
    return list(signals)
