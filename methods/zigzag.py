"""Zigzag Ring Attention: Ring Attention on pairs of pieces from both ends, so that a causal mask leaves equal work.

Source: Zhu, "Balancing computation with zigzag blocking", 2024 (ring-flash-attention, issue 2).
Rank i owns the pieces i and 2n-1-i of 2n. Its block with KV chunk j is the whole chunk against KV's first half if
i > j, its second half against the whole KV chunk if i < j, and causal if i = j.

Volume, backward and buffers are Ring's (methods/ring.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sp_bench.methods.ring import Ring


@dataclass(frozen=True, kw_only=True)
class Zigzag(Ring):
    """Ring Attention on the zigzag layout."""

    name: ClassVar[str] = "zigzag"
    colour: ClassVar[str] = "#ca9161"
    marker: ClassVar[str] = "D"
    citation: ClassVar[str] = "Zhu 2024"
    layouts: ClassVar[tuple[str, ...]] = ("zigzag",)

    layout: str = "zigzag"
