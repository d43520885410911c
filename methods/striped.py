"""Striped Attention: Ring Attention on striped tokens, so that a causal mask leaves all ranks equal work.

Source: Brandon et al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023, section 3: rank i owns
the tokens i, i + n, i + 2n, ...; its block with KV chunk j is causal if i >= j and strictly causal if i < j.

Volume, backward and buffers are Ring's (methods/ring.py). Masks: causal; full, where only the order of tokens differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sp_bench.methods.ring import Ring


@dataclass(frozen=True, kw_only=True)
class Striped(Ring):
    """Ring Attention on the striped layout."""

    name: ClassVar[str] = "striped"
    colour: ClassVar[str] = "#56b4e9"
    marker: ClassVar[str] = "s"
    citation: ClassVar[str] = "Brandon et al. 2023"
    layouts: ClassVar[tuple[str, ...]] = ("striped",)

    layout: str = "striped"
