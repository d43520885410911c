"""What is timed between shaped hosts to calibrate them, and what came out; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sp_bench.calibrating.setting import Samples

SPREAD_BLOCKS = 4
"""So many blocks in a row tell how evenly ranks get the cores: one may fit between two turns."""


class Pace(NamedTuple):
    """How much is timed in each repetition."""

    message_bytes: tuple[int, ...]
    crowd_s: float
    """For how long all ranks compute at once, and with messages beside: where several share a core, each waits for
    slices of it that the others have (home.py), and only all ranks' blocks together say something."""


FULL, QUICK = Pace((2**17, 2**19, 2**21), 3.0), Pace((2**17, 2**18), 0.3)


def middle(sizes: Iterable[int]) -> int:
    """The size of messages that are sent in pairs."""
    sizes = list(sizes)
    return sorted(sizes)[len(sizes) // 2]


@dataclass(kw_only=True)
class Exchanges:
    """What one rank saw of messages to the next host and from the one before, over links of one rate."""

    idle_s: dict[int, Samples] = field(default_factory=dict)
    """By bytes of a message over links that were idle, with no rank computing."""
    beside_s: dict[int, Samples] = field(default_factory=dict)
    """The same while all ranks compute blocks."""
    alone_blocks_per_s: Samples = field(default_factory=list)
    """Small blocks on rank 0 while the others are idle; empty on other ranks."""
    crowded_blocks_per_s: Samples = field(default_factory=list)
    """The same on every rank, without transfers."""
    rounds_bytes_per_s: dict[int, Samples] = field(default_factory=dict)
    """What this rank sent in executions of hops alone, beside blocks, by the bytes of a message: the shortest and the
    longest."""
    beside_blocks_per_s: dict[int, Samples] = field(default_factory=dict)
    """The same as crowded, beside these."""
    first_of_two: Samples = field(default_factory=list)
    """Of two messages from two hosts at once, beside blocks: when the first had come, over when both had; empty where
    there are fewer than three hosts."""
    beside_spread: Samples = field(default_factory=list)
    """Beside the longest, the variance of the time of SPREAD_BLOCKS in a row over its mean's square; empty where blocks
    are few."""
