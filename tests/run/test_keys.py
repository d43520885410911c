"""Exactness with keys unlike queries: more or fewer of them, and values that are narrower than keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sp_bench.methods import REGISTRY
from sp_bench.plan.documents import Documents
from tests.run.matrix import DTYPES, assert_exact, everything
from tests.support.attention_cases import Case, of_each_method, of_one_batch_entry
from tests.support.marks import exhaustive, long
from tests.support.ranks import Ranks


def histories(n: int, tokens: int) -> tuple[int, ...]:
    """Keys before all queries: as many as queries, several times as many and unevenly, one, and none on some ranks."""
    return (n * tokens, 5 * n * tokens + n - 1, 1, n + 1)


def other_sequences(n: int, tokens: int) -> tuple[int, ...]:
    """Keys of another sequence: a quarter of the queries, unevenly fewer, and three times as many and some."""
    return (max(n * tokens // 4, 2 * n), n * tokens - 1, 3 * n * tokens + 1)


def with_other_keys(cases: Iterable[Case]) -> list[Case]:
    """The cases that have them, each on its layouts: masks, dtypes and numbers of keys take turns."""
    found: list[Case] = []
    for i, case in enumerate(cases):
        for j, layout in enumerate(REGISTRY[case.method].layouts):
            causal, dtype = (i + j) % 3 > 0, DTYPES[(i + j // 2) % 3]
            history = histories(case.n, case.tokens)[(i + j) % 4]
            keys = case.seqlen + history if causal else other_sequences(case.n, case.tokens)[(i // 3 + j) % 3]
            found.append(replace(case, layout=layout, causal=causal, dtype=dtype, kv_seqlen=keys))
    return found + of_one_batch_entry(found)


def test_each_method(ranks: Ranks) -> None:
    assert_exact(ranks, of_each_method(with_other_keys(everything(4)), 6))


@pytest.mark.parametrize("n", [1, long(2), long(3), *map(exhaustive, (4, 6, 8))])
def test_every_variant(ranks: Ranks, n: int) -> None:
    cases = with_other_keys(everything(n))
    assert_exact(ranks, cases if n != 3 else of_each_method(cases, 8, turn=1))


@pytest.mark.long
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.sampled_from([1, 2, 3, 4, 6, 8]),
    history=st.integers(1, 150),
    more=st.integers(0, 7),
    narrow=st.booleans(),
    turn=st.integers(0, 30),
)
def test_any_history(ranks: Ranks, n: int, history: int, more: int, narrow: bool, turn: int) -> None:
    """Three variants of any methods, in any layout of theirs."""
    every, found = everything(n), list[Case]()
    for i in range(3):
        case = every[(turn + i * len(every) // 3) % len(every)]
        layouts = REGISTRY[case.method].layouts
        case = replace(case, layout=layouts[turn % len(layouts)], causal=True, dtype="float64", more=more % n)
        found.append(replace(case, kv_seqlen=case.seqlen + history, v_head_dim=8 if narrow else None))
    assert_exact(ranks, found)


def with_narrow_values(cases: Iterable[Case]) -> list[Case]:
    """The cases on a layout of theirs, or with documents, with values of 8, 4 or 12 elements for keys of 16."""
    found = []
    for i, case in enumerate(cases):
        layouts, packed = REGISTRY[case.method].layouts, i % 4 == 3
        pack = Documents((case.seqlen // 3, case.seqlen - case.seqlen // 3), i % 8 == 3) if packed else None
        layout = "auto" if packed else layouts[i % len(layouts)]
        shape = {"layout": layout, "causal": i % 3 > 0, "dtype": DTYPES[i // 2 % 3], "pack": pack}
        found.append(replace(case, **shape, v_head_dim=(8, 4, 12)[i % 3]))
    return found + of_one_batch_entry(found)


@pytest.mark.parametrize("n", [2, exhaustive(4)])
def test_narrow_values(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, of_each_method(with_narrow_values(everything(n)), 5))


def test_narrow_values_and_a_history(ranks: Ranks) -> None:
    cases = of_each_method(with_other_keys(everything(3)), 2, turn=3)
    assert_exact(ranks, [replace(case, v_head_dim=8) for case in cases])


def test_uneven_queries(ranks: Ranks) -> None:
    """Neither side is a multiple of the ranks."""
    cases = [replace(case, more=1) for case in of_each_method(with_other_keys(everything(3)), 4, turn=2)]
    assert_exact(ranks, [replace(case, kv_seqlen=(case.kv_seqlen or 0) + 1) for case in cases])
