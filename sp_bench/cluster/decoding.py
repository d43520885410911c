"""The work of a decode step's kernel call: its reads of caches, and the tiles of its matrix products.

A cluster file may have the seconds that calls took by the bytes that they read:

    caches:
      figures: published                      # published, measured, or assumed
      source: where they are from
      head_dim: 128                           # of the heads that were read
      read_s: [[2.1e+6, 4.5e-6], [8.4e+6, 6.3e-6]]  # a launch apart; between points linear in logarithms

A call reads the keys and values of every sequence once, for all of its rows, and takes as long as that or as its matrix
products, whichever is longer. These are of tiles of rows, of which a sequence fills one or more. A long cache is cut
into parts that several multiprocessors compute, which a second kernel puts together (FlashDecoding, Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from sp_bench.plan.caches import CacheBlocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import KV, OUT, Q
from sp_bench.reading import Count, Positive, Section, figure

KERNELS = 2
"""Launches of a call: one for the parts of caches, one that puts them together."""
ROWS_OF_A_TILE = 64
"""Rows that a kernel for decoding multiplies at once, filled or not: those of Hopper's matrix instructions."""


class CacheReads(Section, frozen=True, kw_only=True):
    """The section `caches` of a cluster file's device."""

    figures: Literal["published", "measured", "assumed"]
    source: Any = None
    head_dim: Annotated[Count, figure(8, 1024, "elements of a head")]
    read_s: Annotated[
        list[tuple[Positive, Annotated[Positive, figure(1e-7, 10, "seconds of a call")]]],
        Meta(
            min_length=2,
            description="a list of [bytes, seconds], at least two",
            examples=["[[1e6, 4e-6], [1e9, 3e-4]]"],
        ),
    ]

    def seconds(self, moved_bytes: np.ndarray) -> np.ndarray:
        """Seconds of calls by the bytes that they move: at least those of the smallest known, and beyond the largest at
        its rate; 0 of none.
        """
        known = np.array(sorted(self.read_s))
        least, most = known[0], known[-1]
        inside = np.exp(np.interp(np.log(np.maximum(moved_bytes, least[0])), *np.log(known).T))
        return np.where(moved_bytes > 0, np.maximum(inside, moved_bytes * most[1] / most[0]), 0.0)


def work(problem: Problem, queries: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes that are moved, FLOPs) of a call for the rows of some chunks, of all sequences: (n,) each, by the chunk of
    keys that they see.
    """
    blocks = problem.blocks
    assert isinstance(blocks, CacheBlocks), "only a decode step has caches"
    rows, seen = blocks.work(queries)
    row_bytes = problem.token_bytes(Q.fields[0], wire=False) + problem.token_bytes(OUT.fields[0], wire=False)
    key_bytes = sum(problem.token_bytes(field, wire=False) for field in KV.fields)
    read = seen.sum(axis=0)
    moved = read * key_bytes + (read > 0) * rows.sum() * row_bytes
    tiles = -(-rows // ROWS_OF_A_TILE) * ROWS_OF_A_TILE
    return moved, 2.0 * (tiles @ seen) * problem.kv_heads * (problem.head_dim + problem.value_dim)
