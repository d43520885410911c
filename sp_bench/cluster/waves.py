"""How much of a device a kernel's thread blocks fill: the multiprocessors that have nothing left wait for the longest.

A multiprocessor takes the next thread block of the grid when one of its own has ended. Thread blocks of a full block
are equally long. Those of a causal one have all lengths up to the longest, in an order that the kernel chooses.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

CausalOrder = Literal["longest_first", "ascending", "ascending_forward"]
ALONE = 0.6
"""The share of a multiprocessor's rate that a thread block gets alone where two fit: between half and all of it. Chosen
with the rates of one GPU at 5 heads in ring-flash-attention's README: 133 TFLOP/s on an A100, which has 205 at 32."""
ROUNDS = 12
"""So many times all places of a device: what comes before fills the device, and only the end is followed one by one."""


@dataclass(frozen=True, kw_only=True)
class Waves:
    """The thread blocks of a kernel on a device."""

    sms: int
    """How many multiprocessors the device has."""
    tile_tokens: int
    """The tokens of a thread block: queries forward, keys backward."""
    causal_order: CausalOrder = "longest_first"
    """Over all heads, or (`ascending`) head by head: forward from the first queries on, which are the shortest thread
    blocks, backward from the first keys on, which are the longest. `ascending_forward` is so forward alone."""
    per_sm: int = 1
    """Thread blocks of causal blocks that a multiprocessor has at once, forward."""

    def late(self, rate: str) -> bool:
        """Whether heads end with their longest thread blocks."""
        return rate == "forward_causal" and self._by_heads("forward")

    def _by_heads(self, phase: str) -> bool:
        """Whether causal thread blocks of a phase go head by head."""
        return self.causal_order == "ascending" or self.causal_order == f"ascending_{phase}"

    def fill(self, rate: str, tokens: int, batch_heads: int) -> float:
        """The share of the multiprocessors' time that is used by a block of `tokens` queries (keys backward) of
        batch x heads; `rate` is one of kernel_table.RATES.
        """
        phase, mask = rate.split("_")
        if mask == "full" or not self._by_heads(phase):
            return float(self.fills(rate, tokens, batch_heads))
        tiles, longest = math.ceil(tokens / self.tile_tokens), tokens / self.tile_tokens
        ascending = phase == "forward"
        taken = _head_by_head(tiles, batch_heads, self.sms, self.per_sm if ascending else 1, ascending)
        return self._causal_work(tokens, batch_heads) / (taken * longest / tiles)

    def fills(self, rate: str, tokens, batch_heads):
        """The fill of many blocks. Thread blocks of causal ones in a call follow on those of others, in any order."""
        tiles, longest = np.ceil(tokens / self.tile_tokens), tokens / self.tile_tokens
        if rate.endswith("full"):
            return batch_heads * longest / self.sms / np.ceil(batch_heads * tiles / self.sms)
        taken = np.maximum(longest, batch_heads * tiles * (longest + 1) / 2 / self.sms)
        return self._causal_work(tokens, batch_heads) / taken

    def _causal_work(self, tokens, batch_heads):
        """The pairs of causal blocks for each multiprocessor, in those of a full thread block."""
        return batch_heads * tokens * (tokens + 1) / 2 / self.tile_tokens**2 / self.sms


def _share(m: int, per_sm: int) -> float:
    return min(ALONE, 1 / m) if per_sm > 1 else 1.0


@lru_cache(maxsize=4096)
def _head_by_head(tiles: int, heads: int, sms: int, per_sm: int, ascending: bool) -> float:
    """When the last thread block of causal blocks ends, in times of one of length 1 at a multiprocessor's full rate."""
    followed = min(heads, math.ceil(ROUNDS * sms * per_sm / tiles) + 1)
    lengths = range(1, tiles + 1) if ascending else range(tiles, 0, -1)
    before = (heads - followed) * tiles * (tiles + 1) / 2 / sms
    return before + _makespan([*lengths] * followed, sms, per_sm)


def _makespan(lengths: Sequence[int], sms: int, per_sm: int) -> float:
    """When the last of the thread blocks ends that start in this order."""
    places = sms * per_sm
    free_at = [(length * per_sm, place) for place, length in enumerate(lengths[:places])]
    heapq.heapify(free_at)
    begun = 0.0
    for length in lengths[places:]:
        begun, place = free_at[0]
        heapq.heapreplace(free_at, (begun + length * per_sm, place))
    left: dict[int, list[float]] = {}
    for end, place in free_at:
        left.setdefault(place % sms, []).append((end - begun) / per_sm)
    return begun + max(_drained(sorted(each), per_sm) for each in left.values())


def _drained(work: Sequence[float], per_sm: int) -> float:
    """How long a multiprocessor takes for its last thread blocks, from what is left of each, the least first."""
    taken, done = 0.0, 0.0
    for i, each in enumerate(work):
        taken += (each - done) / _share(len(work) - i, per_sm)
        done = each
    return taken
