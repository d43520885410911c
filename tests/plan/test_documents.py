"""Packs of documents: what is computed between chunks, and how documents are assigned."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sp_bench.errors import RequestError
from sp_bench.plan import pair_counts
from sp_bench.plan.assignments import ASSIGNMENTS
from sp_bench.plan.documents import Chunked, Documents, Packed, Window
from sp_bench.plan.layout import LAYOUTS, Shards
from sp_bench.plan.mask import CAUSAL, FULL
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from tests.support.layouts import places, tokens_of
from tests.support.packs import packs
from tests.support.regions import times_computed
from tests.support.seen import places_of_kept, seen, seen_of_all, seen_of_whole

names = st.sampled_from([*LAYOUTS, *ASSIGNMENTS])


def blocks_of(mask: Packed, name: str, n: int) -> PackBlocks:
    blocks = mask.blocks(mask.layout(name), n, mask.seqlen)
    assert isinstance(blocks, PackBlocks)
    return blocks


@given(packs(cached=True), names, st.integers(1, 6))
def test_blocks_compute_each_unmasked_pair_once(mask: Packed, name: str, n: int) -> None:
    blocks = blocks_of(mask, name, n)
    visible, chunks = seen(mask), [tokens_of(blocks.layout, i, n, mask.seqlen) for i in range(n)]
    of_keys = [places(blocks.keys, i) for i in range(n)]
    for i, j in product(range(n), repeat=2):
        wanted = visible[np.ix_(chunks[i], of_keys[j])]
        kind = blocks.of(i, j)
        found = times_computed(blocks.regions_of(kind), *wanted.shape)
        np.testing.assert_array_equal(found, wanted)
        assert blocks.pairs[kind] == wanted.sum()
        assert blocks.computes[kind] == wanted.any()
        of_runs = name != "striped" and all(map(len, chunks))
        more = blocks.keys_seen[kind] - wanted.any(0).sum()
        assert more == 0 if of_runs else more >= 0 or not wanted.any()


@pytest.mark.parametrize("name", [*LAYOUTS, *ASSIGNMENTS])
def test_blocks_keep_nothing_of_every_token(name: str) -> None:
    """A pack's variants have dozens of layouts, which are kept for its next point."""
    tokens, mask = 1 << 16, Documents((1 << 14,) * 4)
    blocks = blocks_of(mask, name, 4)
    assert blocks.pairs.sum() and blocks.keys_seen.sum() and blocks.shapes.pieces.sum()
    kept = [value.size for value in vars(blocks).values() if isinstance(value, np.ndarray)]
    assert kept and max(kept) < tokens // 8


@given(packs(cached=True), names, st.integers(1, 6))
def test_pairs_are_the_same_however_many_runs_are_counted_at_once(mask: Packed, name: str, n: int) -> None:
    blocks = blocks_of(mask, name, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_counts, "RUNS_AT_ONCE", 2)
        np.testing.assert_array_equal(replace(blocks).pairs, blocks.pairs)


@given(packs(cached=True), names, st.integers(1, 4), st.integers(1, 3))
def test_every_key_is_assigned_once(mask: Packed, name: str, chunks: int, degree: int) -> None:
    """By position in each rank's order; those of a rank's own queries, and of histories those that a query sees."""
    layout = replace(mask.layout(name), head_parallel=degree)
    n, queries = chunks * degree, Shards(layout, chunks * degree, (mask.seqlen,))
    keys, seen_somewhere = mask.keys(layout, n), seen_of_all(mask).any(axis=0)
    each, kept = [places(keys, rank) for rank in range(n)], places_of_kept(mask)
    assert sorted(np.concatenate(each).tolist()) == list(range(keys.seqlen)) == list(range(len(kept)))
    if not isinstance(mask, Chunked):  # whose history may have been in other chunks
        assert not np.delete(seen_somewhere, kept).any()
        np.testing.assert_array_equal(seen(mask), seen_of_all(mask)[:, kept])
    for rank in range(n):
        own = mask.query_positions[places(queries, rank)]
        assert (np.diff(each[rank]) > 0).all()
        assert set(own.tolist()) <= set(each[rank].tolist())
        whole = [*chain(*keys.chunk_positions(rank // degree))]
        assert [whole[i] for i in chain(*keys.runs(rank))] == each[rank].tolist()
    assert np.broadcast_to(keys.tokens(np.arange(n)), n).tolist() == [*map(len, each)]
    assert keys.most == max(map(len, each))
    in_chunks = np.broadcast_to(keys.chunk_tokens(np.arange(chunks)), chunks)
    assert keys.largest == in_chunks.max()
    assert in_chunks.sum() == keys.seqlen


def test_a_history_of_documents_by_hand() -> None:
    """Documents of 4 and 2 queries behind 4 and 3 keys, with a window of 3 keys, on two striped ranks."""
    mask = Documents((4, 2), left=2).behind([[4], [3]])
    assert (mask.lengths, mask.queries, mask.seqlen, mask.cached_tokens) == ((6, 4), (4, 2), 6, 7)
    assert mask.query_positions.tolist() == [2, 3, 4, 5, 8, 9]
    keys = mask.keys(LAYOUTS["striped"], 2)
    # Of the histories 0 1 2 3 and 0 1 2 each rank had every other token; seen are the last two.
    assert [places(keys, rank).tolist() for rank in range(2)] == [[0, 2, 4, 7, 8], [1, 3, 5, 6, 9]]
    assert mask.pairs(6, 13) == 18


@given(packs(), names, st.integers(1, 9))
def test_every_token_is_assigned_once(mask: Packed, name: str, n: int) -> None:
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


@given(packs(cached=True), st.data())
def test_parts_of_a_sequence_see_what_it_sees(mask: Packed, data: st.DataObject) -> None:
    """A part has the queries start <= q < stop, behind all tokens before them, whichever way these were assigned."""
    assume(isinstance(mask, Window | Chunked))
    start, stop = sorted(data.draw(st.lists(st.integers(0, mask.seqlen), min_size=2, max_size=2, unique=True)))
    before, cut = mask.cached_tokens + start, data.draw(st.integers(0, 30))
    part = mask.part(start, stop, (min(cut, before), before - min(cut, before)))
    assert (part.seqlen, type(part)) == (stop - start, type(mask))
    unseen = before - part.cached_tokens
    assert unseen in {0, min(cut, before), before}, "whole stretches"
    if mask.causal:
        wanted = seen_of_whole(mask)[start:stop, : mask.cached_tokens + stop]
        np.testing.assert_array_equal(seen_of_whole(part), wanted[:, unseen:])
        assert not wanted[:, :unseen].any()


@given(packs(cached=True), st.integers(1, 40))
def test_scaled(mask: Packed, seqlen: int) -> None:
    small = mask.scaled(min(seqlen, mask.seqlen))
    assert small.seqlen == min(seqlen, mask.seqlen)
    assert (small.causal, type(small)) == (mask.causal, type(mask))
    assert len(small.lengths) <= len(mask.lengths)
    assert small.cached_tokens <= mask.cached_tokens
    small.refuse(small.seqlen, small.seqlen + small.cached_tokens)
    if len(small.lengths) == len(mask.lengths):
        assert bool(small.new) == bool(mask.new)


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
        ((10**20, 1), "a pack of 100000000000000000001 tokens: has more tokens than the 134217728"),
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


def test_assignments_are_for_packs() -> None:
    with pytest.raises(RequestError, match="method.layout=blocks: assigns documents, and mask=causal has none"):
        CAUSAL.layout("blocks")
    with pytest.raises(RequestError, match="did you mean whole_documents"):
        Documents((4,)).layout("whole_document")
