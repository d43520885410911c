"""What is measured, and what came out; imports no torch, so that the process which asks needn't."""

from __future__ import annotations

from dataclasses import dataclass, field

Samples = list[float]
"""Seconds, or what is done a second, one for each repetition."""


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
