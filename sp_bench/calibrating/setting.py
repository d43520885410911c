"""What is measured, and what came out; imports no torch, so that the process which asks needn't."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

SPREAD_BLOCKS = 4
"""So many blocks in a row tell how evenly ranks get the cores: one may fit between two turns."""

Samples = list[float]
"""Seconds, or what is done a second, one for each repetition."""


def middle(sizes: Iterable[int]) -> int:
    """The size of messages that are sent in pairs."""
    sizes = list(sizes)
    return sorted(sizes)[len(sizes) // 2]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes and counts of a calibration."""

    device: str
    kernel: str
    dtypes: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    sizes: tuple[int, ...]
    """Tokens: full blocks of every pair of them are measured, causal ones of each."""
    launch_tokens: int
    """Of a block that is nearly nothing but its launch."""
    memory_tokens: int
    """Of what is folded and copied: enough that launching them is nothing, and more than caches hold."""
    repetitions: int
    message_bytes: int
    """Of a large message; a tiny one has a few bytes."""
    exchange_bytes: tuple[int, ...]
    """Of messages between shaped hosts."""
    crowd_s: float
    """For how long all ranks of such hosts compute at once, and with messages beside: where several share a core, each
    waits for slices of it that the others have (hosts/inside.py), and only all ranks' blocks together say something."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What torch says of the GPU."""

    name: str
    sms: int
    memory_bytes: int
    software: str
    """Versions of what its kernels come with."""


@dataclass(kw_only=True)
class Costs:
    """What one rank's kernels and memory took."""

    kernel: str = ""
    blocks_s: dict[tuple[str, str, int, int], Samples] = field(default_factory=dict)
    """By dtype, phase and mask (forward_full), queries, keys."""
    launch_s: Samples = field(default_factory=list)
    """A block of `launch_tokens` and one head."""
    fold_s: Samples = field(default_factory=list)
    fold_bytes: int = 0
    """Read and written in one."""
    copy_s: Samples = field(default_factory=list)
    copy_bytes: int = 0
    """Read and written in one."""


@dataclass(kw_only=True)
class Links:
    """What one rank saw of the links."""

    pair_tiny_s: Samples = field(default_factory=list)
    """Half a round trip between ranks 0 and 1, with no other transfer; empty on other ranks."""
    pair_large_s: Samples = field(default_factory=list)
    ring_tiny_s: Samples = field(default_factory=list)
    """All ranks send to the next one and receive from the one before."""
    ring_large_s: Samples = field(default_factory=list)
    alone_s: Samples = field(default_factory=list)
    """A block on every rank, without transfers."""
    beside_s: Samples = field(default_factory=list)
    """The same while every rank sends large messages round the ring."""


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
