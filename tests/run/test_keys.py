"""Exactness with more or fewer keys than queries: a history before them, and cross-attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from sp_bench.methods import REGISTRY
from tests.run.matrix import DTYPES, assert_exact, everything
from tests.support.attention_cases import Case, of_each_method, of_one_batch_entry
from tests.support.marks import exhaustive
from tests.support.ranks import Ranks

OF_QUERIES = ("group_cast", "hybrid_cp")
"""The methods that cast rows of tokens which are queries and keys."""


def histories(n: int, tokens: int) -> tuple[int, ...]:
    """Keys before all queries: as many as queries, several times as many and unevenly, one, and none on some ranks."""
    return (n * tokens, 5 * n * tokens + n - 1, 1, n + 1)


def other_sequences(n: int, tokens: int) -> tuple[int, ...]:
    """Keys of another sequence: a quarter of the queries, unevenly fewer, and three times as many and some."""
    return (max(n * tokens // 4, 2 * n), n * tokens - 1, 3 * n * tokens + 1)


def with_other_keys(cases: Iterable[Case]) -> list[Case]:
    """The cases that have them, each on its layouts: masks, dtypes and numbers of keys take turns."""
    found: list[Case] = []
    for i, case in enumerate(case for case in cases if case.method not in OF_QUERIES):
        for j, layout in enumerate(REGISTRY[case.method].layouts):
            causal, dtype = (i + j) % 3 > 0, DTYPES[(i + j // 2) % 3]
            history = histories(case.n, case.tokens)[(i + j) % 4]
            keys = case.seqlen + history if causal else other_sequences(case.n, case.tokens)[(i // 3 + j) % 3]
            found.append(replace(case, layout=layout, causal=causal, dtype=dtype, kv_seqlen=keys))
    return found + of_one_batch_entry(found)


def test_each_method(ranks: Ranks) -> None:
    assert_exact(ranks, of_each_method(with_other_keys(everything(4)), 6))


@pytest.mark.parametrize("n", [1, 2, 3, *map(exhaustive, (4, 6, 8))])
def test_every_variant(ranks: Ranks, n: int) -> None:
    cases = with_other_keys(everything(n))
    assert_exact(ranks, cases if n != 3 else of_each_method(cases, 8, turn=1))


def test_uneven_queries(ranks: Ranks) -> None:
    """Neither side is a multiple of the ranks."""
    cases = [replace(case, more=1) for case in of_each_method(with_other_keys(everything(3)), 4, turn=2)]
    assert_exact(ranks, [replace(case, kv_seqlen=(case.kv_seqlen or 0) + 1) for case in cases])
