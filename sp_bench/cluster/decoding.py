"""The work of a decode step's kernel call: its reads of caches, and the tiles of its matrix products.

A call reads the keys and values of every sequence once, for all of its rows, and takes as long as that or as its matrix
products, whichever is longer. These are of tiles of rows, of which a sequence fills one or more. A long cache is cut
into parts that several multiprocessors compute, which a second kernel puts together (FlashDecoding, Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sp_bench.plan.caches import CacheBlocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import KV, OUT, Q

KERNELS = 2
"""Launches of a call: one for the parts of caches, one that puts them together."""
ROWS_OF_A_TILE = 64
"""Rows that a kernel for decoding multiplies at once, filled or not: those of Hopper's matrix instructions."""


def work(problem: Problem, queries: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes that are moved, FLOPs) of a call for the rows of some chunks, of all sequences: (n,) each, by the chunk of
    keys that they see."""
    blocks = problem.blocks
    assert isinstance(blocks, CacheBlocks), "only a decode step has caches"
    rows, seen = blocks.work(queries)
    row_bytes = problem.token_bytes(Q.fields[0], wire=False) + problem.token_bytes(OUT.fields[0], wire=False)
    key_bytes = sum(problem.token_bytes(field, wire=False) for field in KV.fields)
    read = seen.sum(axis=0)
    moved = read * key_bytes + (read > 0) * rows.sum() * row_bytes
    tiles = -(-rows // ROWS_OF_A_TILE) * ROWS_OF_A_TILE
    return moved, 2.0 * (tiles @ seen) * problem.kv_heads * (problem.head_dim + problem.value_dim)
