"""Layouts with a length that they assign, and strategies that draw them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from sp_bench.plan.layout import LAYOUTS, Layout, Shards

layouts = st.sampled_from(list(LAYOUTS.values()))


def tokens_of(layout: Layout, rank: int, n: int, seqlen: int) -> np.ndarray:
    return np.array(list(chain(*layout.positions(rank, n, seqlen))), int)


def places(shards: Shards, rank: int) -> np.ndarray:
    """The positions of the tokens that a rank owns."""
    return np.array(list(chain(*shards.positions(rank))), int)


class Case(NamedTuple):
    """A layout, ranks that share its chunks or don't, and a length that it takes."""

    layout: Layout
    chunks: int
    seqlen: int

    @property
    def n(self) -> int:
        return self.chunks * self.layout.head_parallel

    def chunk(self, index: int) -> np.ndarray:
        """The tokens of a chunk, as one rank would own them."""
        return tokens_of(replace(self.layout, head_parallel=1), index, self.chunks, self.seqlen)


@st.composite
def cases(draw: st.DrawFn, most_chunks: int = 12) -> Case:
    layout = replace(draw(layouts), head_parallel=draw(st.integers(1, 4)))
    chunks = draw(st.integers(1, most_chunks))
    least = chunks * max(layout.pieces, layout.head_parallel)
    return Case(layout, chunks, least + draw(st.integers(0, 5 * least)))
