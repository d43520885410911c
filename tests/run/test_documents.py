"""Packs of documents on real ranks, every method and layout, against torch's attention in fp64 with a dense mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sp_bench import SequenceParallelAttention, account, documents
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY
from sp_bench.plan.assignments import ASSIGNMENTS
from sp_bench.plan.documents import Chunked, Documents, Packed, Window
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import named
from tests.run import jobs
from tests.run.matrix import assert_exact, everything, key_heads, measure
from tests.support.attention_cases import BATCH, DTYPES, Case, errors_of, of_each_method, wrong_in
from tests.support.bounds import FLOORS
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
CACHED = (
    Documents((13, 1, 2, 30, 5)).behind([[20], [3, 40], [], [100], [1]]),
    Documents((3, 50, 4), causal=False).behind([[9], [], [70]]),
    Documents((41, 9, 16), left=6).behind([[30], [2], [8, 8]]),
    Window((57,), left=20).behind([[24, 16, 17]]),
    Window((61,), causal=False, left=20, right=3).behind([[300]]),
    Chunked.of(48, 70, cached=(32, 40, 40)),
)
"""Behind histories, some in stretches that were assigned one by one."""

OF_THEIR_HEADS = ("all_gather", "mesh", "tasp")
"""Methods whose variants are for a number of key heads."""
PASSES_QUERIES = ("mesh", "pass_q", "tokenring", "startrail", "burst_attention")
"""Methods with a variant that passes queries, or their partials, on."""


def cases_of(n: int, pack: Packed) -> list[Case]:
    """Every method in every variant, on every layout that takes the pack; dtypes, key heads and batches take turns. In
    a batch of one, runs of rows travel (plan.row_runs).
    """
    found = []
    for case in everything(n):
        for layout in REGISTRY[case.method].all_layouts():
            turn, heads = len(found), key_heads(case.heads)
            kv_heads = case.kv_heads if case.method in OF_THEIR_HEADS else heads[turn % len(heads)]
            assigned = replace(case, layout=layout, pack=pack, dtype=DTYPES[turn % 3], kv_heads=kv_heads)
            assigned = replace(assigned, batch=1 if turn % 4 else BATCH)
            if pack.seqlen >= 2 * n or layout in ASSIGNMENTS:  # others have a token in every piece
                found.append(assigned)
    return list(dict.fromkeys(found))  # some differed in their key heads only


def some_cases_of(n: int, pack: Packed, count: int, turn: int = 0) -> list[Case]:
    """So many of them, apart from each other, and others for another `turn`."""
    cases = cases_of(n, pack)
    return cases[turn % 7 :: -(-len(cases) // count)]


@pytest.mark.long
def test_each_method_on_each_layout(ranks: Ranks) -> None:
    """Once; from one to the next another variant or pack."""
    by_pair: dict[tuple[str, str], list[Case]] = {}
    for case in (case for pack in PACKS for case in cases_of(4, pack)):
        by_pair.setdefault((case.method, case.layout), []).append(case)
    wanted = {(name, layout) for name, m in REGISTRY.items() if name != "reference" for layout in m.all_layouts()}
    assert {*by_pair} == wanted
    assert_exact(ranks, (cases[11 * i % len(cases)] for i, cases in enumerate(by_pair.values())))


@pytest.mark.parametrize("n", [2, 3])
def test_some_methods_and_layouts(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, (case for turn, pack in enumerate(PACKS) for case in some_cases_of(n, pack, 5, turn)))


@pytest.mark.parametrize("n", [3, exhaustive(8)])
def test_what_did_not_come_is_not_read(ranks: Ranks, n: int) -> None:
    """Around the rows of a chunk that have come, its memory is what it was."""
    cases = [case for turn, pack in enumerate((*PACKS, *CACHED)) for case in some_cases_of(n, pack, 5, turn)]
    answers = ranks.run(jobs.find_differences_in_fresh_memory, cases)
    for case in cases:
        assert not wrong_in(case, errors_of(answer[case] for answer in answers[:n])), case


@pytest.mark.parametrize("n", [2, *map(exhaustive, (3, 4, 6, 8))])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_rows_of_queries_and_of_their_partials_travel(ranks: Ranks, n: int, layout: str) -> None:
    """In methods that pass these on: exact, and all that is counted is sent, which is less than whole chunks."""
    by_method = {
        method: [
            replace(case, batch=1)
            for pack in (*PACKS, *CACHED)
            for case in cases_of(n, pack)
            if (case.method, case.layout) == (method, layout)
        ]
        for method in PASSES_QUERIES
    }
    cases = [case for of_method in by_method.values() for case in of_method[:: -(-len(of_method) // 8)]]
    answers = ranks.run(jobs.find_differences_in_fresh_memory, cases)
    for case in cases:
        assert not wrong_in(case, errors_of(answer[case] for answer in answers[:n])), case
    assert_sent_as_counted(ranks, n, cases)
    whole = {case: queries_sent(case, replace(case.problem, whole_chunks=True)) for case in cases}
    sent = {case: queries_sent(case, case.problem) for case in cases}
    assert all(sent[case] <= whole[case] for case in cases)
    assert {case.method for case in cases if sent[case] < whole[case]} >= {"mesh", "pass_q", "tokenring"}


def queries_sent(case: Case, problem: Problem) -> int:
    """Bytes of queries and their partials that all ranks send in both phases."""
    plans = [case.built.plan(problem, phase, case.costs) for phase in PHASES]
    by_key = [each for plan in plans for each in account.volume(plan, problem).by_rank.items()]
    return sum(int(sent.sum()) for (_, tensor, _), sent in by_key if not named(tensor).of_keys)


@pytest.mark.parametrize("n", [exhaustive(n) for n in (2, 3, 4, 6, 8)])
def test_many_methods_and_layouts(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, (case for turn, pack in enumerate(PACKS) for case in some_cases_of(n, pack, 12, turn)))


@pytest.mark.parametrize("n", [2, 3, *map(exhaustive, (4, 6, 8))])
def test_behind_histories(ranks: Ranks, n: int) -> None:
    each = 4 if n < 4 else 12
    assert_exact(ranks, (case for turn, pack in enumerate(CACHED) for case in some_cases_of(n, pack, each, turn)))


def test_keys_of_a_pack_behind_histories_are_sharded_and_gathered() -> None:
    """On one rank; what no query sees is left out, and 0 when it is gathered."""
    attention = SequenceParallelAttention("ring", mask=documents([3, 2], window=(1, 0), histories=[4, 0]))
    keys = torch.arange(1.0, 10.0).view(1, 9, 1, 1)
    assert attention.positions(9, history=4).tolist() == [3, 4, 5, 6, 7, 8]
    own = attention.shard(keys, history=4)
    assert own.flatten().tolist() == [4, 5, 6, 7, 8, 9]
    assert attention.unshard(own, history=4).flatten().tolist() == [0, 0, 0, 4, 5, 6, 7, 8, 9]
    with pytest.raises(RequestError, match="history=3 of 9 tokens: the mask has 5 queries behind .* of 4 tokens"):
        attention.shard(keys, history=3)
    with pytest.raises(RequestError, match="histories of 1 documents: there is one for each of the 2 documents"):
        documents([3, 2], histories=[4])
    q = torch.randn(1, 5, 2, 16)
    out = attention(q, torch.randn(1, 6, 2, 16), torch.randn(1, 6, 2, 16))
    assert out.shape == q.shape
    with pytest.raises(RequestError, match="rank 0 of 1 owns 6 tokens of 6"):
        attention(q, *(torch.randn(1, 9, 2, 16) for _ in range(2)))


@pytest.mark.long
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pack=packs(cached=True), n=st.sampled_from([1, 2, 3, 4, 6, 8]), turn=st.integers(0, 10))
def test_any_pack(ranks: Ranks, pack: Packed, n: int, turn: int) -> None:
    assert_exact(ranks, some_cases_of(n, pack, 3, turn))


def test_what_cancellation_leaves_of_two_tokens_is_no_error(ranks: Ranks) -> None:
    """In bfloat16 with four query heads to a key head, dk of any attention is off by more than 1e-2 there."""
    cases = of_each_method(cases_of(1, Documents((2,))))
    narrow = [replace(case, dtype="bfloat16", kv_heads=1) for case in cases if case.heads == 4]
    assert_exact(ranks, narrow)
    assert any(by_tensor["dk"] > FLOORS["bfloat16"] for by_tensor in measure(ranks, narrow).values())


@pytest.mark.long
@pytest.mark.parametrize("all_variants", [False, exhaustive(True)])
def test_one_document_is_the_causal_run_bit_for_bit(ranks: Ranks, all_variants: bool) -> None:
    """Every method, on its layouts and in every dtype, with the same tokens."""
    for n in (2, 4):
        every = [
            replace(case, layout=layout, dtype=DTYPES[turn % 3], causal=True)
            for turn, case in enumerate(everything(n))
            for layout in REGISTRY[case.method].layouts
        ]
        plain = [_as_packed(case) for case in (every[::5] if all_variants else of_each_method(every, 6 - n, n))]
        packed = [replace(case, pack=Documents((case.seqlen,))) for case in plain]
        answers = ranks.run(jobs.results, [*plain, *packed])
        for one, other in zip(plain, packed, strict=True):
            for answer in answers[:n]:
                assert all(map(torch.equal, answer[one], answer[other])), f"{one}: differs as a pack"


def _as_packed(case: Case) -> Case:
    """The case with the transfers of a pack: point-to-point ones, whose folds have an order, and of whole chunks."""
    there = REGISTRY[case.method].options()
    packed = {name: value for name, value in (("collectives", "messages"), ("trim", False)) if name in there}
    return replace(case, options=tuple({**dict(case.options), **packed}.items()))


def test_short_documents_that_are_assigned_whole_send_nothing(ranks: Ranks) -> None:
    pack = Documents(tuple(range(1, 65)))
    cases = [
        Case(n=8, method=method, layout="whole_documents", pack=pack, options=options)
        for method, options in (("ring", ()), ("pass_q", ()), ("tokenring", ()), ("double_ring", (("inner", 2),)))
    ]
    for answer in ranks.run(jobs.find_sent, cases)[:8]:
        for case, (_, after_both) in answer.items():  # methods in which a rank computes for its own tokens
            assert sum(after_both.values()) == 0, case


@pytest.mark.parametrize("n", [3, exhaustive(8)])
def test_every_rank_sends_what_is_counted(ranks: Ranks, n: int) -> None:
    """By tensor and field: the plan's transfers, less what nobody needs."""
    cases = [case for pack in (*PACKS, *CACHED) for case in some_cases_of(n, pack, 5)]
    assert_sent_as_counted(ranks, n, cases)


def assert_sent_as_counted(ranks: Ranks, n: int, cases: Sequence[Case]) -> None:
    """By lane, tensor and field, in each phase."""
    answers = ranks.run(jobs.find_sent, cases)
    for case in cases:
        forward, backward = (case.built.plan(case.problem, phase, case.costs) for phase in PHASES)
        counted = [account.volume(plan, case.problem) for plan in (forward, backward)]
        for rank, answer in enumerate(answers[:n]):
            after_forward, after_both = (Counter(sent) for sent in answer[case])
            assert +after_forward == Counter(counted[0].of(rank)), f"{case}: rank {rank}, forward"
            assert +(after_both - after_forward) == Counter(counted[1].of(rank)), f"{case}: rank {rank}, backward"
