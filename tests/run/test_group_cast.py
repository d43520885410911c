"""Group casts, and hybrid context parallelism, on real ranks, against torch's attention in fp64 with a dense mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sp_bench import account
from sp_bench.lower import GLOO
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.documents import Chunked, Documents, Packed, Window
from sp_bench.plan.method import PHASES
from tests.run import jobs
from tests.run.matrix import TRADES, assert_exact, everything
from tests.support.attention_cases import DTYPES, Case
from tests.support.marks import exhaustive, long
from tests.support.packs import packs
from tests.support.ranks import Ranks

UNEVEN = Documents((13, 40, 2, 30, 5, 7, 22, 150, 4, 28))
METHODS = ("group_cast", "hybrid_cp")
LAYOUTS = ("auto", "contiguous", "zigzag")


def cases_of(n: int, turn: int, pack: Packed | None = None) -> list[Case]:
    """Every variant; layouts, masks, dtypes, key heads and batches take turns."""
    found = []
    for place, case in enumerate(case for case in everything(n) if case.method in METHODS):
        here = turn + place
        layout = LAYOUTS[here % 3] if not pack or pack.seqlen >= 2 * n else "auto"
        case = replace(case, layout=layout, causal=here % 2 == 0, dtype=DTYPES[here % 3], batch=1 + here % 2)
        found.append(replace(case, pack=pack, more=0 if pack else here % n))
    return found


@pytest.mark.parametrize("n", [1, 2, long(3), long(4), exhaustive(6), exhaustive(8)])
def test_whole_sequences(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, [case for turn in range(3) for case in cases_of(n, turn)])


@pytest.mark.long
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pack=packs(cached=True), n=st.sampled_from([2, 3, 4, 5, 6, 8]), turn=st.integers(0, 5))
def test_any_pack(ranks: Ranks, pack: Packed, n: int, turn: int) -> None:
    assert_exact(ranks, cases_of(n, turn, pack)[turn % 4 :: 4])


def test_ranks_without_tokens_send_and_return_nothing(ranks: Ranks) -> None:
    """No queries come back to them where these travel, and they still have an output to exchange."""
    packs = Documents((3, 1)), Chunked((1, 1, 1, 1), causal=False)
    cases = [case for pack in packs for case in cases_of(6, 0, pack) if {*TRADES} <= {*case.options}]
    assert len(cases) > 4
    assert_exact(ranks, cases)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunks_and_sub_groups_of_any_size(ranks: Ranks, chunk: int) -> None:
    packs = Documents((13, 1, 2, 30, 5, 7, 22)), Window((61,), causal=False, left=20, right=3)
    options = (("ulysses", 1), ("stages", 2), ("chunk", chunk))
    cases = [Case(n=4, method="group_cast", layout="balanced", pack=p, options=options) for p in packs]
    tokens = (("rank_tokens", chunk),)
    cases += [Case(n=n, method="hybrid_cp", layout="hybrid", pack=p, options=tokens) for p in packs for n in (3, 4)]
    assert_exact(ranks, cases)


@pytest.mark.parametrize("n", [long(4), exhaustive(5), exhaustive(8)])
def test_memory_is_what_the_rank_with_most_of_it_holds(ranks: Ranks, n: int) -> None:
    """With rows in order, sums of their gradients and results of kernels; buffers are as large on all ranks."""
    every = [
        case for pack in (None, UNEVEN, Documents((300,))) for turn in range(3) for case in cases_of(n, turn, pack)
    ]
    dtypes = ("float32", "bfloat16")
    cases = [replace(case, more=0, tokens=32, dtype=dtypes[i % 2]) for i, case in enumerate(every)]
    cases = [*dict.fromkeys(cases[:: 1 if n > 4 else 3])]
    assert {case.method for case in cases} == {*METHODS}
    answers = ranks.run(jobs.run_parts, cases)
    for case in cases:
        plans = [case.built.plan(case.problem, phase, COMPUTE_BOUND) for phase in PHASES]
        expected = account.peak_bytes(plans, case.problem, GLOO)
        held = [answer[case].live_bytes for answer in answers[:n]]
        assert 0.8 * expected < max(held) <= expected, case
