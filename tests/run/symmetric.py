"""torch.distributed._symmetric_memory as a fake, between the ranks of a machine that works behind the caller.

Its functions have torch's names and arguments, and its rules: what is exchanged has the same size on all ranks, a pad
has a word for each (channel, rank), a signal is put where the last one has been taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from sp_bench.plan.ops import Plan
from sp_bench.run.symmetric_memory import SymmetricMemory, SymmetricTransport
from tests.run.queued import Block, Event, Machine, Rank, Wires

PAD_BYTES = 2048


@dataclass
class Allocation:
    """The memory of all ranks of a node for one call of `empty`, and a pad for each."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: list[Block]
    pads: dict[tuple[int, int, int], Event]
    """By (rank whose pad it is, channel, rank that signals)."""


@dataclass
class Handle:
    """The result of `rendezvous`."""

    allocation: Allocation
    device: Rank
    rank: int
    world_size: int
    signal_pad_size: int = PAD_BYTES

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int | None = 0) -> Tensor:
        flat = torch.from_numpy(self.allocation.blocks[rank].bytes).view(dtype)
        assert prod(sizes) * dtype.itemsize <= prod(self.allocation.shape) * self.allocation.dtype.itemsize
        return flat[storage_offset : (storage_offset or 0) + prod(sizes)].view(tuple(sizes))

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        assert not timeout_ms
        self._queue("put", dst_rank, channel, self.rank)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        assert not timeout_ms
        self._queue("take", self.rank, channel, src_rank)

    def _queue(self, what: str, of: int, channel: int, by: int) -> None:
        assert 0 <= by < self.world_size
        assert 0 <= of < self.world_size
        assert 4 * (self.world_size * channel + by) < self.signal_pad_size
        flag = self.allocation.pads.setdefault((of, channel, by), Event())
        self.device.current().queue.append((what, flag))


class Module:
    """The module, as one rank sees it."""

    def __init__(self, device: Rank, node: int, made: list[Allocation]) -> None:
        self._device, self._node, self._made, self._count = device, node, made, 0
        self._mine: dict[int, Allocation] = {}

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        (shape,) = size
        assert dtype is not None
        assert device is not None
        if self._count == len(self._made):
            bytes_each = max(prod(shape), 1) * dtype.itemsize
            blocks = [self._device.machine.block(bytes_each) for _ in range(self._node)]
            self._made.append(Allocation(tuple(shape), dtype, blocks, {}))
        allocation = self._made[self._count]
        assert (allocation.shape, allocation.dtype) == (tuple(shape), dtype), "all ranks make the same in one order"
        self._count += 1
        x = torch.from_numpy(allocation.blocks[self._device.rank % self._node].bytes)
        self._mine[x.data_ptr()] = allocation
        return x.view(dtype)[: prod(shape)].view(shape)

    def rendezvous(self, tensor: Tensor, group: str) -> Handle:
        assert group.startswith("of lane ")
        return Handle(self._mine[tensor.data_ptr()], self._device, self._device.rank % self._node, self._node)


class SymmetricMemories:
    """Transports between the ranks of a machine, whose nodes have so many ranks each."""

    memory: type[SymmetricMemory] = SymmetricMemory

    def __init__(self, machine: Machine, node: int) -> None:
        self._node, self._made = node, [[] for _ in range(len(machine.ranks) // node)]

    def transport(self, device: Rank, plans: Iterable[Plan]) -> SymmetricTransport:
        first = device.rank // self._node * self._node
        module = Module(device, self._node, self._made[device.rank // self._node])
        members, here = range(first, first + self._node), torch.device("cpu")
        memory = self.memory(members, device.rank, lambda lane: f"of lane {lane}", here, module)
        memory.connect((), max(len(plan.lanes) for plan in plans))
        remote = Wires(device)
        return SymmetricTransport(None, remote.sent_bytes, remote=remote, memory=memory)
