"""Decode steps on real ranks: each row over the cache of its sequence, which all ranks share by tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sp_bench.methods import REGISTRY
from tests.run.decode_jobs import Case, find_errors
from tests.support.marks import exhaustive
from tests.support.ranks import Ranks

METHODS = sorted(method.name for method in REGISTRY.values() if method.takes_caches)
AT_MOST = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2e-2}


def assert_exact(ranks: Ranks, cases: Iterable[Case]) -> None:
    """Every rank's rows are those of dense attention in fp64, and the bytes are the closed form's."""
    wanted = list(cases)
    answers = ranks.run(find_errors, wanted)
    for case in wanted:
        errors = [answer[case] for answer in answers[: case.n]]
        assert max(error.relative for error in errors) <= AT_MOST[case.dtype], case
        assert sum(error.sent for error in errors) == pytest.approx(sum(error.counted for error in errors)), case


def cases(n: int, count: int) -> list[Case]:
    """Batches of sequences of any lengths, of each method: dtypes, new tokens and groups of heads take turns."""
    draw, found = random.Random(n), []
    for i, (name, _) in enumerate(product(METHODS, range(count))):
        new = (1, 1, 2, 3)[i % 4]
        heads, kv_heads = ((4, 2), (8, 1), (6, 6), (6, 2))[i // 2 % 4]
        lengths = tuple(draw.randint(max(n, new), 90) for _ in range(draw.randint(1, 7)))
        dtype, narrow = ("float32", "float64", "bfloat16")[i % 3], (None, 8)[i % 5 == 4]
        found.append(Case(n, name, lengths, new, heads, kv_heads, v_head_dim=narrow, dtype=dtype))
    return found


@st.composite
def steps(draw: st.DrawFn) -> Case:
    """Any step: caches of any lengths in runs or pages, whole or their ends, heads that share, with sinks or none."""
    n, new = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    heads, kv_heads = draw(st.sampled_from([(4, 2), (8, 1), (3, 3)]))
    shape = {"new": new, "heads": heads, "kv_heads": kv_heads, "sinks": draw(st.booleans()), "dtype": "float64"}
    lengths = st.lists(st.integers(max(n, new), 90), min_size=1, max_size=5)
    kind = draw(st.sampled_from(["whole", "pages", "window", "chunk"]))
    if kind == "pages":
        page = draw(st.integers(1, 6))
        lengths = st.lists(st.integers(max(n * page, new), 90), min_size=1, max_size=5)
        return Case(n, draw(methods), tuple(draw(lengths)), **shape, page=page)
    if kind == "chunk":
        chunk, into = draw(st.integers(new, 60)), draw(st.integers(0, 3))
        length = into * chunk + draw(st.integers(1, chunk))
        if min(length, (length - new) % chunk + new) >= max(n, new):
            return Case(n, draw(methods), (length,) * draw(st.integers(1, 3)), **shape, chunk=chunk)
    left = draw(st.integers(0, 60)) if kind == "window" else None
    return Case(n, draw(methods), tuple(draw(lengths)), **shape, left=left)


methods = st.sampled_from(METHODS)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps())
def test_any_step(ranks: Ranks, case: Case) -> None:
    assert_exact(ranks, [case])


@pytest.mark.parametrize("n", [2, 3, *map(exhaustive, (1, 4, 5, 6, 8))])
def test_sequences_of_any_lengths(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, cases(n, 5))


@pytest.mark.parametrize("n", [3, *map(exhaustive, (1, 2, 4, 8))])
def test_sinks_windows_and_chunks(ranks: Ranks, n: int) -> None:
    """A score more in each softmax, once a row, whoever merges it; several new tokens have windows of their own, or
    are in several chunks.
    """
    wanted = [case._replace(sinks=True, left=(None, 20, 5)[i % 3]) for i, case in enumerate(cases(n, 3))]
    paged = [Case(n, name, (70, 50), 1, 8, 2, page=4, left=30, sinks=True) for name in METHODS]
    in_place = [Case(n, name, (n * 70,), 1, 8, 2, page=64, sinks=True, in_place=True) for name in METHODS]
    chunked = [
        Case(n, name, (length,) * 2, new, 8, 2, chunk=60, sinks=new > 1)
        for name in METHODS
        for length, new in ((95, 1), (120, 1), (122, 4), (200, 2))
    ]
    assert_exact(ranks, [*wanted, *paged, *in_place, *chunked])


@pytest.mark.parametrize("form", ["library", "messages"])
def test_collectives(ranks: Ranks, form: str) -> None:
    options = (("collectives", form),)
    assert_exact(ranks, [Case(4, name, (33, 8, 50), options=options) for name in ("dcp", "helix")])


@pytest.mark.parametrize("n", [6, *map(exhaustive, (4, 8))])
def test_trees_of_two_levels(ranks: Ranks, n: int) -> None:
    """Groups may have any size that divides n: neither needs to be a power of two."""
    wanted = [
        Case(n, "tree", lengths, new, 8, 2, dtype=dtype, options=(("inner", inner),))
        for inner in (inner for inner in range(1, n) if n % inner == 0)
        for lengths, new, dtype in (((33, 9, 50), 1, "float64"), ((71,), 3, "bfloat16"))
    ]
    assert_exact(ranks, wanted)


@pytest.mark.parametrize("n", [2, 3, *map(exhaustive, (1, 4, 8))])
def test_caches_in_pages(ranks: Ranks, n: int) -> None:
    """Pools have large numbers where no key is, and pages in any order. New tokens may be on several ranks."""
    draw, wanted = random.Random(n), []
    for i, name in enumerate(METHODS):
        page, new = (1, 4, 7)[i % 3], (1, 3)[i % 2]
        lengths = tuple(draw.randint((n - 1) * page + max(new, 1), 90) for _ in range(3))
        wanted += [Case(n, name, lengths, new, page=page), Case(n, name, (60, 60), 1, 8, 1, page=page)]
    latent = {"heads": 8, "kv_heads": 1, "head_dim": 24, "v_head_dim": 16, "latent": True}
    assert_exact(ranks, [*wanted, Case(n, "helix", (33, 50), page=4, **latent)])


@pytest.mark.parametrize("n", [3, *map(exhaustive, (1, 2, 4, 8))])
def test_pages_that_a_kernel_reads_as_they_lie(ranks: Ranks, n: int) -> None:
    """Nothing of them is copied; last pages are of any sizes, and new tokens may be on several ranks."""
    draw, wanted = random.Random(n), []
    for i, name in enumerate(METHODS):
        page, new = (64, 100)[i % 2], (1, 3)[i // 2 % 2]
        lengths = tuple(draw.randint((n - 1) * page + new, 5 * n * page) for _ in range(3))
        shape = {"heads": 8, "kv_heads": (2, 1)[i % 2], "dtype": ("float32", "bfloat16", "float64")[i % 3]}
        wanted.append(Case(n, name, lengths, new, page=page, in_place=True, **shape))
        wanted.append(Case(n, name, (2 * n * page + 1,), new, page=page, in_place=True, **shape))
    latent = {"heads": 8, "kv_heads": 1, "head_dim": 24, "v_head_dim": 16, "latent": True}
    wanted += [Case(n, name, (n * 70, n * 150 + 3), page=64, in_place=True, **latent) for name in METHODS]
    narrow = Case(n, "helix", (n * 70, n * 150 + 3), page=64, v_head_dim=8)  # padded, so copied
    assert_exact(ranks, [*wanted, narrow])


def test_latent_keys(ranks: Ranks) -> None:
    """Values are a part of the keys, and no tensor of their own."""
    shape = {"heads": 8, "kv_heads": 1, "head_dim": 24, "v_head_dim": 16, "latent": True}
    assert_exact(ranks, [Case(3, name, (33, 8, 50), dtype=dtype, **shape) for name in METHODS for dtype in AT_MOST])


def test_one_long_sequence(ranks: Ranks) -> None:
    """A single user: the heads that share a key head are all the rows there are, fewer than ranks or not."""
    shapes = [(heads, kv_heads) for heads, kv_heads in ((8, 1), (3, 1), (4, 4))]
    assert_exact(ranks, [Case(4, name, (1021,), heads=h, kv_heads=k) for name in METHODS for h, k in shapes])
