"""Timings between shaped hosts that calibrate them, and the results. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sp_bench.calibrating.setting import Samples

SPREAD_BLOCKS = 4
"""The consecutive blocks whose time shows how evenly ranks get cores. A single one may fit between two turns."""


class Pace(NamedTuple):
    """How much is timed in each repetition."""

    message_bytes: tuple[int, ...]
    crowd_s: float
    """Seconds for which all ranks compute at once, and beside messages. Ranks that share a core wait for each other's
    time slices (home.py), so only the blocks of all ranks together are meaningful."""


FULL, QUICK = Pace((2**17, 2**19, 2**21), 3.0), Pace((2**17, 2**18), 0.3)


def middle(sizes: Iterable[int]) -> int:
    """The middle one of some message sizes, which pairs of messages have."""
    sizes = list(sizes)
    return sorted(sizes)[len(sizes) // 2]


@dataclass(kw_only=True)
class Exchanges:
    """One rank's times over links of one rate, of messages to the next host and from the one before unless said."""

    idle_s: dict[int, Samples] = field(default_factory=dict)
    """Seconds of a message over idle links while no rank computes, by its bytes."""
    beside_s: dict[int, Samples] = field(default_factory=dict)
    """Seconds of a message over idle links while all ranks compute, by its bytes."""
    alone_blocks_per_s: Samples = field(default_factory=list)
    """The rate of small blocks on rank 0 while the others are idle; empty on other ranks."""
    crowded_blocks_per_s: Samples = field(default_factory=list)
    """The rate of small blocks while all ranks compute, without transfers."""
    rounds_bytes_per_s: dict[int, Samples] = field(default_factory=dict)
    """The rate at which this rank sent in executions of hops, beside blocks, by the bytes of a message: the shortest
    and the longest."""
    beside_blocks_per_s: dict[int, Samples] = field(default_factory=dict)
    """The rate of small blocks beside these executions."""
    first_of_two: Samples = field(default_factory=list)
    """The arrival of the first of two concurrent messages from two hosts over the arrival of both, beside blocks; empty
    with fewer than three hosts."""
    all_to_all_s: dict[int, Samples] = field(default_factory=dict)
    """Seconds of an all-to-all of the library, of several in a row while no rank computes, by the bytes that go to each
    rank; empty with one host."""
    beside_spread: Samples = field(default_factory=list)
    """The variance of the time of SPREAD_BLOCKS consecutive blocks over its mean's square, beside the longest messages;
    empty if there are too few blocks."""
