"""Masks against their definition by token positions: what a block computes, on every layout and for every length."""

from __future__ import annotations

from itertools import chain, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.plan.layout import LAYOUTS, Positions, Shards
from sp_bench.plan.mask import CAUSAL, FULL, MASKS, Mask, WholeMask, mask_named
from sp_bench.plan.regions import Region, RegionKind
from sp_bench.point import resolve
from sp_bench.point.choose import choose
from sp_bench.point.masks import described
from tests.support.layouts import Case, cases
from tests.support.regions import inside, times_computed

masks = st.sampled_from(list(MASKS.values()))


def seen(mask: Mask, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The (query, key) pairs that a mask lets through, by positions."""
    q, k = queries[:, None], keys[None, :]
    return {"full": q >= 0 * k, "causal": k <= q}[mask.name]


@given(masks, cases(most_chunks=7))
def test_blocks_compute_each_unmasked_pair_once(mask: Mask, case: Case) -> None:
    """For every pair of ranks: between the whole chunks that their tokens are of."""
    blocks, step = mask.blocks(case.layout, case.n, case.seqlen), case.layout.head_parallel
    for i, j in product(range(case.n), repeat=2):
        queries, keys = case.chunk(i // step), case.chunk(j // step)
        kind = blocks.of(i, j)
        wanted = seen(mask, queries, keys)
        np.testing.assert_array_equal(times_computed(blocks.regions_of(kind), len(queries), len(keys)), wanted)
        assert blocks.pairs[kind] == wanted.sum()
        rows = np.flatnonzero(wanted.any(axis=1))
        first, last = (rows[0], rows[-1]) if rows.size else (0, len(queries) - 1)
        assert blocks.rows_seen[kind].start <= first
        assert blocks.rows_seen[kind].stop == last + 1


@given(st.sampled_from([CAUSAL, FULL]), cases(most_chunks=6), st.integers(0, 40))
def test_blocks_with_other_keys_compute_each_unmasked_pair_once(mask: Mask, case: Case, more: int) -> None:
    """Causal: behind a history, of which some chunks may have nothing. Full: of any other length that fits."""
    least = case.chunks * max(case.layout.pieces, case.layout.head_parallel)
    kv_seqlen = more + (case.seqlen if mask == CAUSAL else least)
    history = mask.history(case.seqlen, kv_seqlen)
    blocks, step = mask.blocks(case.layout, case.n, case.seqlen, kv_seqlen), case.layout.head_parallel
    shards = Shards.of(case.layout, case.n, kv_seqlen, history)
    total = 0
    for i, j in product(range(case.chunks), repeat=2):
        queries, keys = case.chunk(i) + history, np.array([*chain(*shards.chunk_positions(j))], int)
        kind, wanted = blocks.of(i * step, j * step), seen(mask, queries, keys)
        np.testing.assert_array_equal(times_computed(blocks.regions_of(kind), len(queries), len(keys)), wanted)
        assert blocks.pairs[kind] == wanted.sum()
        total += wanted.sum()
        for side, seen_there in ((False, np.asarray(wanted.any(1))), (True, np.asarray(wanted.any(0)))):
            part = blocks.parts(keys=side)[kind]
            over = round((part.share - _stretch(seen_there)) * len(seen_there), 9) if wanted.any() else 0
            assert over in (0, 1), "all that is seen, and of a strict block a row that sees nothing"
            assert part.sliced or not wanted.any() or part.share == 1.0
    exact = mask.pairs(case.seqlen, kv_seqlen)
    assert total == exact + (case.seqlen / 2 if mask == CAUSAL else 0), "MFU counts half of the square"
    assert history == (more if mask == CAUSAL else 0)


def _stretch(seen: np.ndarray) -> float:
    """The share of rows from the first to the last that is seen."""
    at = np.flatnonzero(seen)
    return (at[-1] + 1 - at[0]) / len(seen)


@given(masks, cases())
def test_classes_are_few_and_arithmetic(mask: Mask, case: Case) -> None:
    """Arrays of ranks have the same classes as single ranks."""
    blocks, ranks = mask.blocks(case.layout, case.n, case.seqlen), np.arange(case.n)
    table = blocks.of(ranks[:, None], ranks)
    assert table.shape == (case.n, case.n)
    assert [[blocks.of(i, j) for j in range(case.n)] for i in range(case.n)] == table.tolist()
    assert table.max() < blocks.classes <= 12


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_says_whether_it_is_causal(mask: WholeMask) -> None:
    """As records say it: no query sees a key behind its own position."""
    ids = np.arange(64)
    assert mask.causal == (not (seen(mask, ids, ids) & (ids[None, :] > ids[:, None])).any())
    assert described(mask) == {"mask": mask.name, "causal": mask.causal}


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_balanced_layouts_are_all_that_give_equal_work(mask: WholeMask, n: int) -> None:
    """`auto` simulates these alone. Of layouts with the same blocks, as all have under a full mask, one is enough."""
    blocks = {name: mask.blocks(layout, n, 64 * n) for name, layout in LAYOUTS.items()}
    ranks = np.arange(n)
    work = {name: np.array(b.pairs)[b.of(ranks[:, None], ranks)].sum(axis=1) for name, b in blocks.items()}
    even = {name for name, pairs in work.items() if pairs.max() <= 1.05 * pairs.mean()}
    regions = {name: [blocks[name].regions_of(kind) for kind in range(blocks[name].classes)] for name in even}
    assert set(mask.balanced) <= even
    assert all(any(regions[name] == regions[one] for one in mask.balanced) for name in even - set(mask.balanced))
    assert mask.layout("auto").name == mask.balanced[0]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_auto_tries_every_balanced_layout(mask: WholeMask) -> None:
    with Composer() as composer:
        keys = ("method=ring", f"mask={mask.name}", "gpus=4", "seqlen=4k", "cluster=h100_ndr400")
        choice = choose(resolve(composer.compose(keys)))
    tried = choice.candidates or [{"layout": choice.problem.layout.name}]
    assert [one["layout"] for one in tried] == list(mask.balanced)


def test_causal_has_three_classes_and_full_one() -> None:
    """As the header of mask.py has them, where all chunks are alike."""
    found = {}
    for name, layout in LAYOUTS.items():
        blocks = CAUSAL.blocks(layout, 4, 64)
        assert [blocks.of(1, 2), blocks.of(2, 2), blocks.of(2, 1)] == [0, 1, 2]
        found[name] = tuple(blocks.regions_of(kind) for kind in range(blocks.classes))
        blocks = FULL.blocks(layout, 4, 64)
        assert blocks.classes == 1
        assert blocks.regions_of(0) == (Region(RegionKind.FULL, range(16), range(16)),)
    whole, first, second = range(16), range(8), range(8, 16)
    causal, full = (Region(kind, whole, whole) for kind in (RegionKind.CAUSAL, RegionKind.FULL))
    assert found == {
        "contiguous": ((), (causal,), (full,)),
        "striped": ((Region(RegionKind.STRICT, whole, whole),), (causal,), (causal,)),
        "zigzag": (
            (Region(RegionKind.FULL, second, whole),),
            (causal,),
            (Region(RegionKind.FULL, whole, first),),
        ),
    }


runs = st.builds(
    lambda start, size, step: range(start, start + size * step, step),
    st.integers(0, 40), st.integers(1, 8), st.shared(st.integers(1, 4), key="step"),
)  # fmt: skip


@given(runs, runs)
def test_causal_regions_of_any_two_runs(queries: range, keys: range) -> None:
    """Wherever they begin and however long they are: what packed or uneven sequences need."""
    regions = CAUSAL.regions((queries,), (keys,))
    wanted = seen(CAUSAL, np.array(queries), np.array(keys))
    np.testing.assert_array_equal(times_computed(regions, len(queries), len(keys)), wanted)
    assert all(region.pairs > 0 for region in regions)
    for region in regions:
        assert region.kind is RegionKind.FULL or len(region.q) == len(region.kv), "kernels need square ones"


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_causal_regions_of_chunks_in_several_pieces(queries: list[int], keys: list[int]) -> None:
    def pieces(sizes: list[int], gap: int) -> Positions:
        starts = np.cumsum([0, *(size + gap for size in sizes)])
        return tuple(range(int(start), int(start) + size) for start, size in zip(starts, sizes, strict=False))

    q, kv = pieces(queries, 3), pieces(keys, 1)
    regions = CAUSAL.regions(q, kv)
    at = [np.concatenate([np.array(run) for run in runs]) for runs in (q, kv)]
    np.testing.assert_array_equal(times_computed(regions, len(at[0]), len(at[1])), seen(CAUSAL, *at))


@pytest.mark.parametrize("name", ["striped", "zigzag"])
def test_causal_work_is_balanced(name: str) -> None:
    """Striped differs by at most half a row for each block; zigzag not at all."""
    n, tokens = 8, 16
    blocks = CAUSAL.blocks(LAYOUTS[name], n, n * tokens)
    work = [sum(blocks.pairs[blocks.of(i, j)] for j in range(n)) for i in range(n)]
    assert max(work) - min(work) == (tokens * (n - 1) if name == "striped" else 0)


@given(st.sampled_from(list(RegionKind)), st.integers(0, 7), st.integers(0, 3))
def test_plain_regions_are_not_strict(kind: RegionKind, tokens: int, start: int) -> None:
    region = Region(kind, range(start, start + tokens), range(start, start + tokens))
    plain = region.plain
    assert plain.kind is (RegionKind.CAUSAL if kind is RegionKind.STRICT else kind)
    whole, wanted = (np.zeros((start + tokens, start + tokens), bool) for _ in range(2))
    for filled, one in ((whole, plain), (wanted, region)):
        if len(one.q):
            filled[one.q.start : one.q.stop, one.kv.start : one.kv.stop] = inside(one)
    np.testing.assert_array_equal(whole, wanted)
    assert plain.pairs == region.pairs == inside(region).sum()


def test_names() -> None:
    assert CAUSAL.layout("auto").name == "striped"
    assert FULL.layout("auto").name == "contiguous"
    for name in LAYOUTS:
        assert CAUSAL.layout(name) is LAYOUTS[name]
    with pytest.raises(RequestError, match="method.layout=zigzig: there is no such layout; did you mean zigzag"):
        CAUSAL.layout("zigzig")
    assert {name: mask_named(name) for name in MASKS} == dict(MASKS)
    with pytest.raises(RequestError, match="mask=casual: there is no such mask; did you mean causal"):
        mask_named("casual")
