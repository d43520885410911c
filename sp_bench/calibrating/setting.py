"""The measurements of a calibration and their results. Imports no torch: the asking process needs none."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

ALL_PAIRS = 16
"""Up to so many ranks all pairs are measured; beyond, each rank with the next and with the first."""
Samples = list[float]
"""Seconds, or rates per second, one value for each repetition."""


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
    """Block sizes in tokens. Full blocks are measured for every pair of them, causal blocks for each."""
    launch_tokens: int
    """Tokens of a block whose time is nearly all launch."""
    memory_tokens: int
    """Tokens of the tensors that are folded and copied: too many for caches, or for launches to matter."""
    repetitions: int
    message_bytes: int
    """The size of a large message. A tiny one has a few bytes."""
    sustained_s: float = 0.0
    """Seconds for which a block is computed again and again before it is timed."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, as torch describes it."""

    name: str
    sms: int
    memory_bytes: int
    software: str
    """The versions of CUDA and cuDNN."""


@dataclass(kw_only=True)
class Costs:
    """The measured times of one rank's kernels and memory."""

    kernel: str = ""
    blocks_s: dict[tuple[str, str, int, int], Samples] = field(default_factory=dict)
    """Seconds of a block by (dtype, phase and mask such as forward_full, queries, keys)."""
    launch_s: Samples = field(default_factory=list)
    """Seconds of a block of `launch_tokens` and one head."""
    fold_s: Samples = field(default_factory=list)
    fold_bytes: int = 0
    """Bytes that a fold reads and writes."""
    sum_s: Samples = field(default_factory=list)
    sum_bytes: int = 0
    """Bytes that adding a gradient to its accumulator and a cast read and write."""
    products_s: dict[str, Samples] = field(default_factory=dict)
    """Seconds of a matrix product by dtype: `product_shape` rows, inputs and outputs."""
    product_shape: tuple[int, int, int] = (0, 0, 0)
    layers_s: dict[tuple[str, int], Samples] = field(default_factory=dict)
    """Seconds of a decoder's layer without its attention by (phase, tokens), in the first dtype."""
    copy_s: Samples = field(default_factory=list)
    copy_bytes: int = 0
    """Bytes that a copy reads and writes."""


@dataclass(kw_only=True)
class Links:
    """The times that one rank measured on the links."""

    pair_tiny_s: Samples = field(default_factory=list)
    """Half a round trip of a tiny message between ranks 0 and 1, with no other transfer; empty on other ranks."""
    pair_large_s: Samples = field(default_factory=list)
    ring_tiny_s: Samples = field(default_factory=list)
    """A tiny message while every rank sends to the next and receives from the one before."""
    ring_large_s: Samples = field(default_factory=list)
    alone_s: Samples = field(default_factory=list)
    """A block, while every rank computes one and nothing is sent."""
    beside_s: Samples = field(default_factory=list)
    """A block, while every rank computes and sends large messages round the ring."""


def pairs_of(n: int) -> list[tuple[int, int]]:
    """The pairs of ranks that are measured: all of few ranks, a chain and a star of many."""
    if n <= ALL_PAIRS:
        return list(itertools.combinations(range(n), 2))
    return sorted({(rank, rank + 1) for rank in range(n - 1)} | {(0, rank) for rank in range(1, n)})
