"""Packs of documents on real ranks, every method and dealing, against torch's attention in fp64 with a dense mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sp_bench.methods import REGISTRY
from sp_bench.plan.documents import Chunked, Documents, Packed, Window
from sp_bench.plan.layout import DEALERS
from tests.run.test_exactness import assert_exact, everything, key_heads
from tests.support.attention_cases import BOUNDS, Case
from tests.support.marks import exhaustive
from tests.support.packs import packs
from tests.support.ranks import Ranks

PACKS = (
    Documents((13, 1, 2, 30, 5, 7, 22)),  # over several ranks, in mid-stripe, of one token
    Documents((3, 50, 4), causal=False),
    Documents((2, 3)),  # less tokens than most numbers of ranks
    Documents((41, 9, 16), causal=True, left=6),
    Documents((33, 30), causal=False, left=2, right=9),
    Window((57,), causal=True, left=0),
    Window((61,), causal=False, left=20, right=3),
    Chunked.of(16, 70),
)


def cases_of(n: int, pack: Packed) -> list[Case]:
    """Every method in every variant, on every dealing that takes the pack; dtypes and key heads take turns."""
    found = []
    for case in everything(n):
        for layout in REGISTRY[case.method].dealings():
            turn, heads = len(found), key_heads(case.heads)
            kv_heads = case.kv_heads if case.method in ("all_gather", "mesh") else heads[turn % len(heads)]
            dealt = replace(case, layout=layout, pack=pack, dtype=[*BOUNDS][turn % 3], kv_heads=kv_heads)
            if pack.seqlen >= 2 * n or layout in DEALERS:  # others have a token in every piece
                found.append(dealt)
    return found


def some_cases_of(n: int, pack: Packed, turn: int) -> list[Case]:
    """Each method once or more, on dealings that go on from pack to pack."""
    return cases_of(n, pack)[turn % 11 :: 11]


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8])
def test_every_method_and_dealing(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, (case for turn, pack in enumerate(PACKS) for case in some_cases_of(n, pack, 3 * turn)))


@pytest.mark.parametrize("n", [exhaustive(n) for n in (2, 3, 4, 6, 8)])
def test_the_matrix(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, (case for pack in PACKS for case in cases_of(n, pack)))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pack=packs(), n=st.sampled_from([1, 2, 3, 4, 6, 8]), turn=st.integers(0, 10))
def test_any_pack(ranks: Ranks, pack: Packed, n: int, turn: int) -> None:
    assert_exact(ranks, some_cases_of(n, pack, turn))
