"""Layouts: every length is assigned, each token to one rank, as evenly as it goes."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.errors import RequestError
from sp_bench.plan.layout import LAYOUTS, Layout, Shards
from tests.support.layouts import Case, cases, layouts, tokens_of


@given(cases())
def test_positions_partition_the_sequence(case: Case) -> None:
    """Ranks that share a chunk hold it together, each a run of it, in order."""
    case.layout.refuse(case.n, case.seqlen)
    ranks = [tokens_of(case.layout, rank, case.n, case.seqlen) for rank in range(case.n)]
    assert all((np.diff(tokens) > 0).all() for tokens in ranks), "a rank's tokens must ascend"
    assert sorted(np.concatenate(ranks)) == list(range(case.seqlen))
    for chunk in range(case.chunks):
        owners = ranks[chunk * case.layout.head_parallel : (chunk + 1) * case.layout.head_parallel]
        np.testing.assert_array_equal(np.concatenate(owners), case.chunk(chunk))


@given(cases())
def test_ranks_own_as_many_tokens_as_positions_say(case: Case) -> None:
    """None more than one token more than another; one rank or an array of them."""
    layout, n, seqlen = case.layout, case.n, case.seqlen
    counted = [len(tokens_of(layout, rank, n, seqlen)) for rank in range(n)]
    assert [layout.tokens(rank, n, seqlen) for rank in range(n)] == counted
    assert np.broadcast_to(layout.tokens(np.arange(n), n, seqlen), n).tolist() == counted
    assert max(counted) - min(counted) <= 1
    alike = isinstance(layout.tokens(np.arange(n), n, seqlen), int)
    assert (seqlen % n == 0) == (min(counted) == max(counted)) == alike
    assert [len(layout.run(rank, n, seqlen)) for rank in range(n)] == counted


@given(cases())
def test_chunks_before_the_boundary_are_alike_and_so_are_the_others(case: Case) -> None:
    """In the length of each piece."""
    lengths = [[len(r) for r in case.layout.ranges(i, case.chunks, case.seqlen)] for i in range(case.chunks)]
    boundary = next(iter(case.layout.boundaries(case.chunks, case.seqlen)), 0)
    assert 0 <= boundary < case.chunks
    assert all(x == lengths[0] for x in lengths[: boundary or case.chunks])
    assert all(x == lengths[-1] != lengths[0] for x in lengths[boundary:] if boundary)
    assert case.layout.largest(case.n, case.seqlen) == max(map(sum, lengths))
    chunks = np.arange(case.chunks)
    counted = np.broadcast_to(case.layout.chunk_tokens(chunks, case.chunks, case.seqlen), case.chunks)
    assert counted.tolist() == [sum(x) for x in lengths]
    ranks = case.layout.tokens(np.arange(case.n), case.n, case.seqlen)
    of_chunks = case.layout.chunk_tokens(chunks, case.chunks, case.seqlen)
    assert case.layout.is_even(case.n, case.seqlen) == (np.ndim(ranks) == np.ndim(of_chunks) == 0)


@given(cases(), st.integers(0, 60))
def test_a_history_is_assigned_on_its_own(case: Case, history: int) -> None:
    """Each rank has its tokens of the history, and behind them those it has without one."""
    alone = Shards.of(case.layout, case.n, case.seqlen)
    shards = Shards.of(case.layout, case.n, history + case.seqlen, history)
    ranks = [np.array([*chain(*shards.positions(rank))], int) for rank in range(case.n)]
    assert sorted(np.concatenate(ranks)) == list(range(history + case.seqlen))
    for rank, tokens in enumerate(ranks):
        own = tokens_of(case.layout, rank, case.n, case.seqlen).tolist()
        assert (tokens[tokens >= history] - history).tolist() == own == [*chain(*alone.positions(rank))]
        assert shards.tokens(rank) == len(tokens) <= shards.most
        runs, chunk = shards.runs(rank), [*chain(*shards.chunk_positions(rank // case.layout.head_parallel))]
        assert [chunk[i] for run in runs for i in run] == tokens.tolist()
        assert shards.chunk_tokens(rank // case.layout.head_parallel) == len(chunk) <= shards.largest
        assert chunk == sorted(chunk)
    assert max(map(len, ranks)) == shards.most
    assert len({len(tokens) for tokens in ranks}) == 1 or not shards.is_even


def test_positions_by_hand() -> None:
    def by_name(name: str, seqlen: int) -> list[list[int]]:
        return [tokens_of(LAYOUTS[name], rank, 2, seqlen).tolist() for rank in (0, 1)]

    assert by_name("contiguous", 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert by_name("striped", 8) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert by_name("zigzag", 8) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert by_name("contiguous", 7) == [[0, 1, 2, 3], [4, 5, 6]]
    assert by_name("striped", 7) == [[0, 2, 4, 6], [1, 3, 5]]
    assert by_name("zigzag", 7) == [[0, 1, 6], [2, 3, 4, 5]]


def test_shared_positions_by_hand() -> None:
    """A run may lie in both of zigzag's pieces."""
    together = replace(LAYOUTS["zigzag"], head_parallel=3)
    assert [tokens_of(together, rank, 6, 24).tolist() for rank in (0, 1, 2)] == [
        [0, 1, 2, 3],
        [4, 5, 18, 19],
        [20, 21, 22, 23],
    ]
    assert together.positions(1, 6, 24) == (range(4, 6), range(18, 20))


@given(layouts, st.integers(1, 12), st.integers(1, 3), st.integers(1, 100))
def test_too_few_tokens_are_refused_with_how_many_would_work(
    layout: Layout, chunks: int, degree: int, seqlen: int
) -> None:
    n, layout = chunks * degree, replace(layout, head_parallel=degree)
    least = chunks * max(degree, layout.pieces)
    if seqlen >= least:
        layout.refuse(n, seqlen)
        return
    message = f"^seqlen={seqlen}: the {layout.name} layout .*; seqlen={least} or more would work$"
    with pytest.raises(RequestError, match=message):
        layout.refuse(n, seqlen)
    layout.refuse(n, least)
