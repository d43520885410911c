"""Sighted: counts and rows of queries that see keys, against the mask by positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.plan import intervals
from sp_bench.plan.assignments import ASSIGNMENTS
from sp_bench.plan.documents import Packed
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.sighted import sighted
from tests.support.packs import packs
from tests.support.seen import seen


def places(positions) -> list[int]:
    return [token for run in positions for token in run]


@given(
    packs(cached=True),
    st.sampled_from([*LAYOUTS, *ASSIGNMENTS]),
    st.integers(1, 6),
    st.sampled_from([intervals._WIDTHS, (np.int8, np.int64)]),
)
def test_all_queries_that_see_a_key_are_found(mask: Packed, name: str, n: int, widths: tuple[type, ...]) -> None:
    blocks = mask.blocks(mask.layout(name), n, mask.seqlen)
    assert isinstance(blocks, PackBlocks)
    of_queries = [places(blocks.queries.chunk_positions(chunk)) for chunk in range(n)]
    of_keys = [places(blocks.keys.chunk_positions(chunk)) for chunk in range(n)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "_WIDTHS", widths)
        of_chunks = sighted(mask, blocks._runs, blocks._key_runs)
    visible = seen(mask)
    for q, queries in enumerate(of_queries):
        for kv, keys in enumerate(of_keys):
            each = visible[np.ix_(queries, keys)]
            assert of_chunks.pairs[q, kv] == each.sum() and of_chunks.queries[q, kv] == each.any(axis=1).sum()
            runs = [*zip(*(x.tolist() for x in of_chunks.rows(q, kv)), strict=True)]
            rows = [row + i for _, row, tokens in runs for i in range(tokens)]
            assert rows == np.flatnonzero(each.any(axis=1)).tolist()
            positions = [start + i for start, _, tokens in runs for i in range(tokens)]
            assert positions == mask.query_positions[queries][rows].tolist()
