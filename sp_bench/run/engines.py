"""The engines of attentions whose shapes change from call to call: few are kept, and they share their memory."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable

import torch

from sp_bench.run.buffers import Arena
from sp_bench.run.engine import Engine
from sp_bench.run.transport import Key

MOST = 16
"""Engines that are kept: those of the masks of a model's layers, for a few shapes."""


class Engines:
    """The engines used last, by what they were made for, and the memory that they use in turn."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Engine] = OrderedDict()
        self._alive: weakref.WeakSet[Engine] = weakref.WeakSet()
        """Those kept, and those that a backward still needs."""
        self._sent: Counter[Key] = Counter()
        """Bytes sent by engines that are gone."""
        self._arenas: dict[torch.device, Arena] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __deepcopy__(self, memo: dict) -> Engines:
        return Engines(self._most)  # of process groups and streams there are no copies

    def get(self, key: Hashable) -> Engine | None:
        """The engine of this key, if there is one."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: Hashable, made: Engine) -> Engine:
        """Keep a new engine; the one unused longest goes if there are too many."""
        self._kept[key] = made
        self._alive.add(made)
        weakref.finalize(made, self._sent.update, made.transport.sent_bytes)
        if len(self._kept) > self._most:
            _, gone = self._kept.popitem(last=False)
            gone.close()
        return made

    def arena(self, device: torch.device) -> Arena:
        """The memory of the engines on a device."""
        if device not in self._arenas:
            self._arenas[device] = Arena(device)
        return self._arenas[device]

    @property
    def nbytes(self) -> int:
        """Bytes of the shared memory."""
        return sum(arena.nbytes for arena in self._arenas.values())

    @property
    def sent_bytes(self) -> Counter[Key]:
        """Bytes this rank has sent so far, by (lane, tensor, field)."""
        return sum((engine.transport.sent_bytes for engine in self._alive), self._sent.copy())
