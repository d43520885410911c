"""Casts: the rows that a chunk's queries see of others, and the work of a call with all that are there."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from sp_bench.plan import DKV, DOWN, KV, Chunk, Group, GroupCast, GroupReduce, Problem, Q
from sp_bench.plan.assignments import ASSIGNMENTS
from sp_bench.plan.cast_rows import most_rows, rows_moved
from sp_bench.plan.casts import Casts, casts
from sp_bench.plan.documents import Packed
from sp_bench.plan.intervals import regions_of_runs
from sp_bench.plan.layout import LAYOUTS, Shards
from sp_bench.plan.mask import CAUSAL, FULL
from sp_bench.plan.patterns import divisors
from sp_bench.plan.regions import RegionKind
from sp_bench.plan.runs import Runs
from tests.support.layouts import places, tokens_of
from tests.support.packs import packs
from tests.support.regions import regions_by_query, times_computed
from tests.support.seen import seen

names = st.sampled_from([*LAYOUTS, *ASSIGNMENTS])


@given(packs(cached=True), names, st.integers(1, 5), st.data())
def test_a_call_computes_what_its_queries_see_of_the_rows_there(
    mask: Packed, name: str, n: int, data: st.DataObject
) -> None:
    """By the definition of the mask: rows in order of position, each pair once, and the sizes of its regions."""
    visible, layout = seen(mask), mask.layout(name)
    chunks = [tokens_of(layout, i, n, mask.seqlen) for i in range(n)]
    keys = mask.keys(layout, n)
    found = Casts(mask, Shards(layout, n, (mask.seqlen,)), keys, 0)
    assert_computes(found, visible, chunks, [places(keys, i) for i in range(n)], data)


@given(st.sampled_from([*LAYOUTS]), st.integers(1, 5), st.integers(0, 30), st.integers(0, 40), st.booleans(), st.data())
def test_a_call_computes_what_its_queries_see_of_other_keys(
    name: str, n: int, more: int, others: int, causal: bool, data: st.DataObject
) -> None:
    """The keys are a history, assigned on its own, and the new tokens, or another sequence, longer or shorter."""
    seqlen = 2 * n + more
    keys = seqlen + others if causal else 2 * n + others
    shape = {"heads": 1, "kv_heads": 1, "head_dim": 8, "layout": LAYOUTS[name]}
    problem = Problem(n=n, seqlen=seqlen, kv_seqlen=keys, mask=CAUSAL if causal else FULL, **shape)
    found, history = casts(problem), keys - seqlen if causal else 0
    positions = np.arange(seqlen) + history
    visible = positions[:, None] >= np.arange(keys) if causal else np.ones((seqlen, keys), bool)
    q, kv = (
        [np.concatenate([[], *map(list, side.positions(i))]).astype(int) for i in range(n)]
        for side in (problem.queries, problem.keys)
    )
    assert_computes(found, visible, q, kv, data)
    assert_alike(found, data)


def assert_alike(found: Casts, data: st.DataObject) -> None:
    """The short way for a whole sequence finds the same as the one for a pack of one document, block by block."""
    one_by_one, chunks = Casts(found.pack, found.of_queries, found.of_keys, found.ahead), found.chunks
    np.testing.assert_array_equal(found.counts, one_by_one.counts)
    members = data.draw(st.permutations(range(chunks)))[: data.draw(st.integers(1, chunks))]
    queries, relays = np.arange(chunks), data.draw(st.sampled_from(divisors(chunks)))
    several = (queries[:, None] + members) % chunks
    np.testing.assert_array_equal(found.counts_for(relays), one_by_one.counts_for(relays))
    for i, j in itertools.product(range(chunks), repeat=2):
        np.testing.assert_array_equal(found.rows(i, j, relays), one_by_one.rows(i, j, relays))
    (works, of), (each, _) = (casts.works(queries, several, relays) for casts in (found, one_by_one))
    assert len(of) == len(each) == chunks
    for i in range(chunks):
        for work, wanted in zip(works[of[i]], each[i], strict=True):
            np.testing.assert_array_equal(np.stack(work.sizes), np.stack(wanted.sizes))
            assert work[1:] == wanted[1:]


def assert_computes(found: Casts, visible: np.ndarray, queries: list, chunks: list, data: st.DataObject) -> None:
    """Any chunk's queries and some key chunks make a call; `visible` is of all queries and keys: (queries, keys)."""
    n = len(chunks)
    own = data.draw(st.integers(0, n - 1))
    members = tuple(data.draw(st.lists(st.integers(0, n - 1), min_size=1, unique=True)))
    keys = found.keys(own, members)
    rows = [chunks[member][visible[np.ix_(queries[own], chunks[member])].any(axis=0)] for member in members]
    assert [*map(len, rows)] == found.counts[own, [*members]].tolist()
    if members == (own,) and len(rows[0]):
        rows = [chunks[own]]
    assert keys.counts == tuple(map(len, rows))
    positions = np.concatenate(rows)[keys.order]
    assert (np.diff(positions) > 0).all()
    wanted = visible[np.ix_(queries[own], positions)]
    np.testing.assert_array_equal(times_computed(keys.regions, *wanted.shape), wanted)
    ((forward, backward),) = found.works(np.array([own]), np.array([members]))[0]
    for work in (forward, backward):
        assert work.sizes.pairs.sum() == wanted.sum()
        assert (work.q_rows, work.kv_rows) == (wanted.any(axis=1).sum(), wanted.any(axis=0).sum())
    sizes = forward.sizes
    assert sizes.q_tokens.tolist() == [len(region.plain.q) for region in keys.regions]
    assert ((sizes.kind == 0) == [region.kind is RegionKind.FULL for region in keys.regions]).all()


@given(packs(most_documents=12), st.data())
def test_regions_of_runs_are_those_found_query_by_query(mask: Packed, data: st.DataObject) -> None:
    """The same regions in the same order, whichever positions blocks have, and of several blocks at once."""
    some = st.lists(st.booleans(), min_size=mask.seqlen, max_size=mask.seqlen)
    blocks, wanted = list[tuple[Runs, list[Runs]]](), []
    for count in data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)):
        q, *keys = (np.flatnonzero(data.draw(some)) for _ in range(1 + count))
        of_q, *of_keys = (
            Runs(at[np.diff(at, prepend=-2) > 1], at[np.diff(at, append=mask.seqlen + 1) > 1] + 1) for at in (q, *keys)
        )
        first, stop = mask.sees(q)
        blocks.append((of_q, of_keys))
        wanted += [regions_by_query(np.searchsorted(kv, first), np.searchsorted(kv, stop)) for kv in keys]
    assert regions_of_runs(mask, blocks) == wanted


@given(packs(most_documents=12), st.integers(1, 5), st.data())
def test_regions_of_strided_runs_are_those_found_query_by_query(mask: Packed, n: int, data: st.DataObject) -> None:
    """Queries, and keys, of the striped layout."""
    chunks = [data.draw(st.integers(0, min(n, mask.seqlen) - 1)) for _ in range(2)]
    q, kv = (np.arange(chunk, mask.seqlen, n) for chunk in chunks)
    first, stop = mask.sees(q)
    of_q, of_kv = (Runs(each[:1], each[-1:] + 1, n) for each in (q, kv))
    wanted = regions_by_query(np.searchsorted(kv, first), np.searchsorted(kv, stop))
    assert regions_of_runs(mask, [(of_q, [of_kv])]) == [wanted]


@given(packs(cached=True), names, st.integers(1, 5), st.data())
def test_the_most_rows_of_a_rank(mask: Packed, name: str, n: int, data: st.DataObject) -> None:
    """Rows sent and received are counted rank by rank (rows_moved); buffers are as large as the largest."""
    assume(mask.seqlen >= 2 * n)
    shape = {"n": n, "seqlen": mask.seqlen, "kv_seqlen": mask.seqlen + mask.cached_tokens, "mask": mask}
    problem = Problem(**shape, heads=2, kv_heads=1, head_dim=8, layout=mask.layout(name))
    members = tuple(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
    q, kv, dkv = (Chunk(tensor, 0, Group(1, n, DOWN)) for tensor in (Q, KV, DKV))
    for op in (GroupCast("kv", kv, members, q), GroupReduce("dkv", dkv, members, q, 0)):
        each = [rows_moved(op, problem, rank).tolist() for rank in range(n)]
        assert rows_moved(op, problem, np.arange(n)).T.tolist() == each
        way = 1 if isinstance(op, GroupCast) else -1
        arriving = [
            sum(each[int(op.group.member(rank, way * u))][i] for i, u in enumerate(members)) for rank in range(n)
        ]
        assert most_rows(op, problem, sent=True) == max(map(sum, each))
        assert most_rows(op, problem, sent=False) == max(arriving)
