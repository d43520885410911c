"""Caches: regions, counts and bounds of a decode step, against what each row sees key by key."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_bench import account
from sp_bench.check import check_all
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY, build
from sp_bench.plan.caches import CacheBlocks, Caches
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.ops import PlanError
from sp_bench.plan.problem import Problem
from tests.support.problems import cached_problem

METHODS = sorted(method.name for method in REGISTRY.values() if method.takes_caches)


@st.composite
def problems(draw: st.DrawFn, most: int = 6) -> Problem:
    """Sequences of any lengths on 1 to `most` ranks, each rank with some key of each sequence, in runs or in pages."""
    page = draw(st.sampled_from([None, None, 1, 3, 5]))
    n, new, share = draw(st.integers(1, most)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 8]))
    least = max(n, new, (n - 1) * (page or 0) + 1)
    lengths = draw(st.lists(st.integers(least, 40), min_size=1, max_size=6))
    mask = Caches(tuple(lengths), new, share, page, draw(st.none() | st.integers(0, 40)))
    if draw(st.booleans()):  # the end of caches whose new tokens are in several chunks
        length = draw(st.integers(least, least + 60))
        chunked = Caches((length,) * len(lengths), new, share, page).chunked(draw(st.integers(1, 40)))
        mask = chunked if chunked.lengths[0] >= least else mask
    kv_heads = draw(st.integers(1, 3))
    return replace(cached_problem(n, mask, heads=kv_heads, head_dim=8), dtype="float32")


def sees(problem: Problem) -> np.ndarray:
    """Whether each row sees each key, one by one: (rows, keys)."""
    mask = problem.mask
    assert isinstance(mask, Caches)
    seen, row, first = np.zeros((problem.seqlen, problem.keys.seqlen), bool), 0, 0
    for length in mask.lengths:
        for token in range(mask.new):
            stop = length - (mask.new - token - 1)
            start = 0 if mask.left is None else max(stop - 1 - mask.left, 0)
            start = mask.firsts[token] if mask.firsts else start
            for _ in range(mask.share):
                seen[row, first + start : first + stop] = True
                row += 1
        first += length
    return seen


def indices(runs: tuple[range, ...]) -> list[int]:
    return [i for run in runs for i in run]


@given(problems())
def test_regions_are_what_rows_see(problem: Problem) -> None:
    blocks, seen = problem.blocks, sees(problem)
    assert isinstance(blocks, CacheBlocks)
    for q in range(problem.n):
        for kv in range(problem.n):
            rows, keys = indices(problem.queries.positions(q)), indices(problem.keys.positions(kv))
            wanted = seen[np.ix_(rows, keys)]
            found = np.zeros_like(wanted, int)
            for region in blocks.regions_of(blocks.of(q, kv)):
                found[region.q.start : region.q.stop, region.kv.start : region.kv.stop] += 1
            assert (found == wanted).all()
            assert blocks.pairs[blocks.of(q, kv)] == wanted.sum()
            assert blocks.work([q])[1][:, kv].sum() == wanted.any(axis=0).sum()
    assert problem.pairs == seen.sum()


@given(
    length=st.integers(1, 60),
    chunk=st.integers(1, 50),
    new=st.integers(1, 5),
    share=st.integers(1, 3),
    count=st.integers(1, 3),
)
def test_a_new_token_sees_its_chunk_up_to_its_own(length: int, chunk: int, new: int, share: int, count: int) -> None:
    """By positions in the whole sequence; of windows, the caches of layers that see all are what they were."""
    whole = Caches((max(length, new),) * count, new, share)
    mask, keys = whole.chunked(chunk), whole.lengths[0]
    assert mask.unlimited == whole and whole.ends(3).unlimited == whole and whole.unlimited is None
    left_out = keys - mask.lengths[0]
    first, stop = mask.sees(np.arange(mask.seqlen))
    for row in range(mask.seqlen):
        sequence, token = divmod(row, mask.rows)
        position = keys - new + token // share
        before = sequence * mask.lengths[0] - left_out
        assert (first[row] - before, stop[row] - before) == (position // chunk * chunk, position + 1)


@given(problems())
def test_every_key_is_assigned_once(problem: Problem) -> None:
    assigned = [i for rank in range(problem.n) for i in indices(problem.keys.positions(rank))]
    assert sorted(assigned) == list(range(problem.keys.seqlen))
    counts = [int(problem.keys.tokens(rank)) for rank in range(problem.n)]
    mask = problem.mask
    assert isinstance(mask, Caches)
    assert max(counts) - min(counts) <= len(mask.lengths) * (mask.page or 1)
    if mask.page:
        pages = [problem.keys.positions(rank) for rank in range(problem.n)]
        assert max(map(len, pages)) * mask.page == mask.capacity(problem.n)
        before = np.cumsum([0, *mask.lengths])
        for rank, of_rank in enumerate(pages):
            starts = np.array([run.start for run in of_rank])
            sequence = np.searchsorted(before, starts, side="right") - 1
            assert ((starts - before[sequence]) // mask.page % problem.n == rank).all()
    else:
        assert max(counts) == mask.capacity(problem.n)


@settings(max_examples=50)
@given(problems(), st.sampled_from(METHODS))
def test_plans_are_proven_and_send_the_closed_form(problem: Problem, name: str) -> None:
    method = build(name, {})
    assigned = method.assigned(problem)
    plan = method.plan(assigned, "forward", COMPUTE_BOUND)
    check_all({"forward": plan}, assigned)
    sent = account.volume(plan, assigned)
    assert sent.total_bytes == pytest.approx(method.bytes_sent(problem, "forward"))
    assert sent.payload_bytes >= account.lower_bound_bytes(assigned, "forward") * (1 - 1e-12)


def test_published_bytes() -> None:
    """Helix, section 2.1: each GPU sends, of the partial outputs of all B sequences and its heads, all but its own part
    to the others, B * heads * head_dim * (n - 1) / n, whatever the length. vLLM's DCP gathers as much of Q before.
    """
    mask = Caches((2**20,) * 8, share=16)
    problem = cached_problem(8, mask, heads=8, head_dim=128)
    payload = 8 * (16 * 8) * 128 * 2 * 7 / 8
    for name, times in (("helix", 1), ("dcp", 2), ("pass_q", 2)):
        method = build(name, {})
        assigned = method.assigned(problem)
        plan = method.plan(assigned, "forward", COMPUTE_BOUND)
        assert account.volume(plan, assigned).payload_bytes == times * payload


def test_a_plan_without_what_all_ranks_hold_is_refused() -> None:
    mask = Caches((30, 20), share=2)
    problem = cached_problem(4, mask, heads=2, head_dim=8)
    method = build("helix", {})
    plan = method.plan(method.assigned(problem), "forward", COMPUTE_BOUND)
    with pytest.raises(PlanError, match="the plan's inputs"):
        check_all({"forward": plan}, problem)  # of which each rank has its own queries only


@pytest.mark.parametrize(
    ("lengths", "new", "message"),
    [((8, 1), 2, "sequence 1 with 1 keys"), ((3, 9), 1, "a cache of 3 keys: each of gpus=4")],
)
def test_what_is_refused(lengths: tuple[int, ...], new: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Caches(lengths, new).refuse_ranks(4)
