"""One execution of a plan on one rank: the tensors that it holds, its times, and the memory seen on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from sp_bench.plan.ops import Chunk
from sp_bench.run.buffers import Buffers
from sp_bench.run.devices import Clock
from sp_bench.run.holdings import Holdings, LiveBytes
from sp_bench.run.partials import Sums, Tensors


@dataclass
class Spent:
    """Time breakdown of one execution, in seconds on the compute stream (that of the blocks)."""

    kernels_s: float = 0.0
    """Time in block kernels."""
    folds_s: float = 0.0
    """Time in folds of block results and of partials that peers sent."""
    blocks_s: float = 0.0
    """Time in blocks and folds, launch overhead included."""
    waits_s: float = 0.0
    """Time waiting for transfers and, on a GPU, for the caller to queue the next operation."""
    caller_s: float = 0.0
    """Time of the calling thread: on a GPU the time to queue all work, on a CPU the whole execution."""


class Sinks(NamedTuple):
    """Scores that each row's softmax has besides those of keys."""

    scores: Tensor
    """By head, in the dtype of statistics: (H,)."""
    gradient: Tensor
    """Their gradient (H,), to which a backward adds that of the outputs that this rank has by heads."""

    @classmethod
    def of(cls, scores: Tensor) -> Self:
        """The sinks with nothing in their gradient."""
        return cls(scores, torch.zeros_like(scores))


WAITS, KERNELS, FOLDS, REST = "waits_s", "kernels_s", "folds_s", "rest_s"
"""The purposes of a lap: fields of Spent, and the rest of blocks and folds, of which a device has none."""


@dataclass
class Marks:
    """The ends of laps, by what they were spent on. On a GPU, synchronize before reading them."""

    clock: Clock
    pairs: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)
    caller_s: float = 0.0

    def spent(self) -> Spent:
        """The time breakdown; all but the caller's time is 0 of an execution that was not timed."""
        sums = {name: sum(self.clock.seconds(start, end) for start, end in pairs) for name, pairs in self.pairs.items()}
        blocks_s = sum(sums.get(name, 0.0) for name in (KERNELS, FOLDS, REST))
        sums.pop(REST, None)
        return Spent(**sums, blocks_s=blocks_s, caller_s=self.caller_s)


class Execution:
    """One execution: its holdings, its marks, and the memory seen on the way."""

    def __init__(
        self,
        inputs: Mapping[Chunk, Tensors],
        sums: Sums,
        buffers: Buffers,
        clock: Clock,
        *,
        timed: bool,
        on_host: bool,
        live: LiveBytes | None = None,
        sinks: Sinks | None = None,
        held: Tensors = (),
    ) -> None:
        """`timed` marks where laps end: on a GPU by events, `on_host` by its clock. `live` records the memory held.

        Each row's softmax has `sinks` besides the scores of keys. `held` are keys and values that all ranks hold.
        """
        self.sinks, self.held = sinks, held
        self.holdings, self.marks = Holdings(inputs, sums), Marks(clock)
        self.live, self._buffers = live, buffers
        self._mark: Callable[[], Any] | None = clock.mark if timed else None
        self._on_host = on_host
        self._last: Any = clock.mark() if timed else None

    def lap(self, name: str) -> None:
        """Mark the time since the last lap as spent on that."""
        if self._mark is not None and (self._on_host or name is not REST):
            start, self._last = self._last, self._mark()
            self.marks.pairs.setdefault(name, []).append((start, self._last))

    def see(self, *results: torch.Tensor) -> None:
        """Record the memory held now, if live bytes are being tracked."""
        if self.live is not None:
            self.live.see([*self.holdings.tensors(), *self._buffers.tensors(), *results])

    def close(self) -> None:
        """Let go of all tensors, as the traceback of an error may keep the execution."""
        del self.holdings


Perform = Callable[[Execution], None]
"""Performs an operation of a plan: at once on a CPU, queued on the current stream on a GPU."""
