"""Packs of documents: what is computed between chunks, and how documents are dealt."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.errors import RequestError
from sp_bench.plan import intervals
from sp_bench.plan.dealers import DEALERS
from sp_bench.plan.documents import Chunked, Documents, PackBlocks, Packed, Window
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL, FULL
from sp_bench.plan.problem import Problem
from tests.support.dealing import tokens_of
from tests.support.packs import packs
from tests.support.regions import times_computed
from tests.support.seen import seen

names = st.sampled_from([*LAYOUTS, *DEALERS])


def blocks_of(mask: Packed, name: str, n: int) -> PackBlocks:
    blocks = mask.blocks(mask.layout(name), n, mask.seqlen)
    assert isinstance(blocks, PackBlocks)
    return blocks


@given(packs(), names, st.integers(1, 6))
def test_blocks_compute_each_unmasked_pair_once(mask: Packed, name: str, n: int) -> None:
    blocks = blocks_of(mask, name, n)
    visible, chunks = seen(mask), [tokens_of(blocks.layout, i, n, mask.seqlen) for i in range(n)]
    for i, j in product(range(n), repeat=2):
        wanted = visible[np.ix_(chunks[i], chunks[j])]
        kind = blocks.of(i, j)
        found = times_computed(blocks.regions_of(kind), *wanted.shape)
        np.testing.assert_array_equal(found, wanted)
        assert blocks.pairs[kind] == wanted.sum()
        assert blocks.computes[kind] == wanted.any()
        of_runs = name != "striped" and all(map(len, chunks))
        more = blocks.keys_seen[kind] - wanted.any(0).sum()
        assert more == 0 if of_runs else more >= 0 or not wanted.any()


@given(packs(), names, st.integers(1, 6))
def test_pairs_are_the_same_however_many_runs_are_counted_at_once(mask: Packed, name: str, n: int) -> None:
    blocks = blocks_of(mask, name, n)
    limits = mask.sees(np.arange(mask.seqlen))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "RUNS_AT_ONCE", 2)
        found = intervals.pair_counts(blocks.owner, blocks.chunks, *limits)
    np.testing.assert_array_equal(found.ravel(), blocks.pairs)


@given(packs(), names, st.integers(1, 9))
def test_every_token_is_dealt_once(mask: Packed, name: str, n: int) -> None:
    layout = mask.layout(name)
    chunks = [tokens_of(layout, i, n, mask.seqlen) for i in range(n)]
    assert sorted(np.concatenate(chunks)) == list(range(mask.seqlen))
    tokens = np.broadcast_to(layout.tokens(np.arange(n), n, mask.seqlen), n)
    assert [len(chunk) for chunk in chunks] == tokens.tolist()
    assert layout.largest(n, mask.seqlen) == layout.most(n, mask.seqlen) >= tokens.max()
    assert all((np.diff(chunk) > 0).all() for chunk in chunks)


def test_whole_documents_are_not_cut() -> None:
    mask = Documents((5, 1, 9, 3, 3, 8), causal=True)
    blocks = blocks_of(mask, "whole_documents", 3)
    between = blocks.pairs.reshape(3, 3).copy()
    np.fill_diagonal(between, 0)
    assert not between.any()
    assert blocks.remote_tokens == 0


def test_zigzag_documents_balances_each_document() -> None:
    """Each rank has the same pairs of each document whose pieces are equal."""
    mask = Documents((48, 16, 96), causal=True)
    work = blocks_of(mask, "zigzag_documents", 4).pairs.reshape(4, 4).sum(axis=1)
    assert len(set(work.tolist())) == 1


def test_auto_takes_even_work_first_and_little_traffic_second() -> None:
    short = Documents((16,) * 64)
    assert short.layout("auto", 8).name == "contiguous"  # no document is cut there either
    one = Documents((1024,))
    assert one.layout("auto", 8).name == "striped"  # as even as zigzag, and needs no more
    window = Window((1024,), left=15)
    assert window.layout("auto", 8).name == "contiguous"
    assert one.layout("auto", 8, ["contiguous"]).name == "contiguous"


def test_one_document_has_the_regions_of_its_whole_mask() -> None:
    for causal, mask in ((True, CAUSAL), (False, FULL)):
        for name, layout in LAYOUTS.items():
            pack, whole = blocks_of(Documents((64,), causal), name, 4), mask.blocks(layout, 4, 64)
            for i, j in product(range(4), repeat=2):
                assert pack.regions_of(pack.of(i, j)) == whole.regions_of(whole.of(i, j))


def test_the_diagonal_shifts_for_a_document_that_starts_in_mid_stripe() -> None:
    """Documents have 6 and 10 tokens: of 4 striped ranks, rank 1 has tokens 1, 5 | 9, 13, rank 2 has 2 | 6, 10, 14."""
    blocks = blocks_of(Documents((6, 10)), "striped", 4)
    regions = blocks.regions_of(blocks.of(1, 2))
    assert [(r.kind.value, list(r.q), list(r.kv)) for r in regions] == [
        ("causal", [2, 3], [1, 2]),  # 9 sees 6; 13 sees 6, 10
        ("full", [1], [0]),  # 5 sees 2
    ]


@given(packs(), st.integers(1, 40))
def test_scaled(mask: Packed, seqlen: int) -> None:
    small = mask.scaled(min(seqlen, mask.seqlen))
    assert small.seqlen == min(seqlen, mask.seqlen)
    assert (small.causal, type(small)) == (mask.causal, type(mask))
    assert len(small.lengths) <= len(mask.lengths)


def test_pairs_that_mfu_counts() -> None:
    assert Documents((8, 4)).pairs(12) == (64 + 16) / 2
    assert Documents((8, 4), causal=False).pairs(12) == 64 + 16
    assert Window((6,), left=1).pairs(6) == 1 + 5 * 2
    assert Documents((100,)).pairs(100) == CAUSAL.pairs(100)


def test_chunked() -> None:
    assert Chunked.of(8, 20).lengths == (8, 8, 4)
    assert Chunked.of(32, 20).lengths == (20,)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((4, 0), "document 1 has length 0: a document has at least one token"),
        ((-3,), "document 0 has length -3"),
        ((), "a pack of no documents"),
        (
            (5, 6),
            "seqlen=12: the 2 documents .5, 6. must fill it, .* 11 tokens.*; seqlen=11, or one more .* of 1 tokens",
        ),
        ((5, 6, 7), "seqlen=12: .* 18 tokens.*seqlen=18, or the first 3 documents with 1 tokens of the last of them"),
        ((5, 7, 7), "seqlen=12: .*seqlen=19, or the first 2 documents with 7 tokens of the last of them"),
    ],
)
def test_packs_that_make_no_sense(lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Problem(n=2, seqlen=12, heads=2, kv_heads=2, head_dim=8, mask=Documents(lengths), layout=LAYOUTS["contiguous"])


def test_dealers_are_for_packs() -> None:
    with pytest.raises(RequestError, match="method.layout=blocks: deals documents, and mask=causal has none"):
        CAUSAL.layout("blocks")
    with pytest.raises(RequestError, match="did you mean whole_documents"):
        Documents((4,)).layout("whole_document")
