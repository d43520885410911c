"""Layouts against masks made from token positions alone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.errors import RequestError
from sp_bench.plan import LAYOUTS, Layout, Mask, Part, Region, layout_named, window

layouts = st.sampled_from(list(LAYOUTS.values()))


def tokens_of(layout: Layout, chunk: int, n: int, seqlen: int) -> np.ndarray:
    return np.array(list(chain(*layout.positions(chunk, n, seqlen))), int)


def dense(mask: Mask, rows: int, columns: int) -> np.ndarray:
    """Which (query, key) pairs of a rectangle a mask lets through, by its definition."""
    q, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    return {Mask.FULL: q >= 0 * k, Mask.CAUSAL: k <= q, Mask.STRICT: k < q}[mask]


def times_computed(regions: tuple[Region, ...], tokens: int) -> np.ndarray:
    """How often the regions compute each (query, key) pair of a block."""
    times = np.zeros((tokens, tokens), int)
    for region in regions:
        inside = times[region.q.slice(tokens), region.kv.slice(tokens)]
        inside += dense(region.mask, *inside.shape)
    return times


@given(layouts, st.integers(1, 24), st.integers(1, 6))
def test_positions_partition_the_sequence(layout: Layout, n: int, piece: int) -> None:
    seqlen = layout.pieces * n * piece
    chunks = [tokens_of(layout, chunk, n, seqlen) for chunk in range(n)]
    assert all(len(chunk) == seqlen // n for chunk in chunks)
    assert all((np.diff(chunk) > 0).all() for chunk in chunks), "a chunk's tokens must ascend"
    assert sorted(np.concatenate(chunks)) == list(range(seqlen))


def test_positions_by_hand() -> None:
    def by_name(name: str) -> list[list[int]]:
        return [tokens_of(LAYOUTS[name], chunk, 2, 8).tolist() for chunk in (0, 1)]

    assert by_name("contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert by_name("striped") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert by_name("zigzag") == [[0, 1, 6, 7], [2, 3, 4, 5]]


@given(layouts, st.integers(1, 8), st.integers(1, 4))
def test_regions_are_the_mask_between_positions(layout: Layout, n: int, piece: int) -> None:
    """For every pair of chunks: each pair of tokens once where the key is not later than the query, else never."""
    seqlen, tokens = layout.pieces * n * piece, layout.pieces * piece
    chunks = [tokens_of(layout, chunk, n, seqlen) for chunk in range(n)]
    for i, q in enumerate(chunks):
        for j, k in enumerate(chunks):
            causal = layout.regions(i, j, causal=True)
            np.testing.assert_array_equal(times_computed(causal, tokens), k[None, :] <= q[:, None])
            assert sum(region.pairs(tokens) for region in causal) == (k[None, :] <= q[:, None]).sum()
            assert (times_computed(layout.regions(i, j, causal=False), tokens) == 1).all()


class Shared(NamedTuple):
    """A layout whose chunks are shared, and sizes that it takes."""

    layout: Layout
    chunks: int
    n: int
    seqlen: int

    def whole(self, chunk: int) -> np.ndarray:
        """The tokens of a chunk, as one rank would own them."""
        return tokens_of(replace(self.layout, shared=1), chunk, self.chunks, self.seqlen)


@st.composite
def shared_layouts(draw: st.DrawFn) -> Shared:
    shared, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    layout = replace(draw(layouts), shared=shared)
    unit = math.lcm(layout.pieces * chunks, shared * chunks)
    return Shared(layout, chunks, shared * chunks, unit * draw(st.integers(1, 3)))


@given(shared_layouts())
def test_ranks_that_share_a_chunk_hold_it_together(case: Shared) -> None:
    """Each an equal run of it, in order; all ranks together the sequence."""
    case.layout.refuse(case.n, case.seqlen)
    ranks = [tokens_of(case.layout, rank, case.n, case.seqlen) for rank in range(case.n)]
    assert all(len(tokens) == case.seqlen // case.n for tokens in ranks)
    assert sorted(np.concatenate(ranks)) == list(range(case.seqlen))
    for chunk in range(case.chunks):
        owners = ranks[chunk * case.layout.shared : (chunk + 1) * case.layout.shared]
        np.testing.assert_array_equal(np.concatenate(owners), case.whole(chunk))


@given(shared_layouts())
def test_regions_of_shared_chunks_are_the_mask_between_them(case: Shared) -> None:
    """For every pair of ranks: between the whole chunks that their tokens are of."""
    for i, j in product(range(case.n), repeat=2):
        q, k = (case.whole(rank // case.layout.shared) for rank in (i, j))
        causal, full = (times_computed(case.layout.regions(i, j, causal=c), len(q)) for c in (True, False))
        np.testing.assert_array_equal(causal, k[None, :] <= q[:, None])
        assert (full == 1).all()


def test_shared_positions_by_hand() -> None:
    """A run may lie in both of zigzag's pieces."""
    together = replace(LAYOUTS["zigzag"], shared=3)
    assert [tokens_of(together, rank, 6, 24).tolist() for rank in (0, 1, 2)] == [
        [0, 1, 2, 3],
        [4, 5, 18, 19],
        [20, 21, 22, 23],
    ]
    assert together.positions(1, 6, 24) == (range(4, 6), range(18, 20))


@given(layouts, st.integers(1, 4), st.integers(0, 20), st.integers(0, 20))
def test_order_is_that_of_chunks(layout: Layout, shared: int, i: int, j: int) -> None:
    together = replace(layout, shared=shared)
    assert together.order(i, j) == 1 + np.sign(i // shared - j // shared)
    assert together.order(np.array([i, j]), j).tolist() == [together.order(i, j), 1]
    assert together.order(j, np.array([i, j])).tolist() == [together.order(j, i), 1]


@given(layouts, st.booleans(), st.integers(0, 5), st.integers(0, 5))
def test_cases_are_indexed_by_sign(layout: Layout, causal: bool, i: int, j: int) -> None:
    assert layout.cases(causal)[int(np.sign(i - j)) + 1] == layout.regions(i, j, causal)


@pytest.mark.parametrize("name", ["striped", "zigzag"])
def test_causal_work_is_balanced(name: str) -> None:
    """Striped differs by at most half a row for each block; zigzag not at all."""
    n, tokens, layout = 8, 16, LAYOUTS[name]
    work = [sum(r.pairs(tokens) for j in range(n) for r in layout.regions(i, j, causal=True)) for i in range(n)]
    assert max(work) - min(work) == (tokens * (n - 1) if name == "striped" else 0)


@given(st.sampled_from(list(Mask)), st.integers(0, 7), st.data())
def test_window_leaves_only_full_and_causal(mask: Mask, tokens: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 3))
    rows, columns = window(mask, slice(start, start + tokens), slice(start, start + tokens))
    whole = dense(mask, tokens, tokens)
    seen = np.zeros_like(whole)
    inside = seen[max(0, rows.start - start) : max(0, rows.stop - start), : max(0, columns.stop - start)]
    inside[:] = dense(Mask.FULL if mask is Mask.FULL else Mask.CAUSAL, *inside.shape)
    np.testing.assert_array_equal(seen, whole)


@given(st.integers(1, 50))
def test_halves_make_a_whole(half: int) -> None:
    first, second, whole = (part.slice(2 * half) for part in (Part.FIRST, Part.SECOND, Part.WHOLE))
    assert (first.start, first.stop, second.start, second.stop) == (0, half, half, 2 * half)
    assert (whole.start, whole.stop) == (0, 2 * half)
    assert [part.tokens(2 * half) for part in Part] == [2 * half, half, half]


@given(layouts, st.integers(1, 12), st.integers(1, 3), st.integers(1, 100))
def test_uneven_sequences_are_refused_with_the_nearest_that_work(
    layout: Layout, chunks: int, shared: int, seqlen: int
) -> None:
    n, layout = chunks * shared, replace(layout, shared=shared)
    if seqlen % (layout.pieces * chunks) == 0 and seqlen % n == 0:
        layout.refuse(n, seqlen)
        return
    with pytest.raises(RequestError, match=f"^seqlen={seqlen}: the {layout.name} layout .* would work$") as caught:
        layout.refuse(n, seqlen)
    offered = [
        int(word) for word in str(caught.value).partition(";")[2].replace("seqlen=", "").split() if word.isdigit()
    ]
    assert offered and max(offered) > seqlen
    for better in offered:
        layout.refuse(n, better)


def test_names() -> None:
    assert layout_named("auto", causal=True).name == "striped"
    assert layout_named("auto", causal=False).name == "contiguous"
    for name in LAYOUTS:
        assert layout_named(name, causal=True) is LAYOUTS[name]
    with pytest.raises(RequestError, match="method.layout=zigzig: there is no such layout; did you mean zigzag"):
        layout_named("zigzig", causal=True)
