"""Padded heads on real ranks: exact for the true heads, with the bytes that plans of padded heads send and hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sp_bench import account
from sp_bench.errors import RequestError
from sp_bench.lower import GLOO
from sp_bench.methods import REGISTRY, build
from sp_bench.plan.documents import Documents
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES, SplitsHeads
from tests.run import jobs
from tests.run.matrix import DTYPES, assert_exact
from tests.support.attention_cases import Case, of_each_method, of_one_batch_entry, relative
from tests.support.marks import exhaustive
from tests.support.ranks import Ranks

METHODS = [name for name, method in REGISTRY.items() if issubclass(method, SplitsHeads)]
OPTIONS = {"upipe": {"stages": "auto"}, "mesh": {"ulysses": "auto"}}
SHAPES = {
    2: ((3, 1), (5, 5), (9, 3)),
    3: ((4, 4), (10, 5), (8, 2), (14, 7)),
    4: ((7, 7), (6, 3), (10, 2), (14, 7)),
    6: ((14, 2), (20, 10)),
    8: ((28, 4), (28, 7), (40, 10), (9, 9)),
}
"""(heads, kv_heads) by ranks, most of which the ranks don't split evenly; of 40 / 10 key heads are copied."""


def padded_cases(n: int) -> list[Case]:
    """Every variant of every method that splits heads where heads are padded: layouts, masks and dtypes take turns."""
    found: list[Case] = []
    for heads, kv_heads in SHAPES[n]:
        whole = Case(n=n, method="ring", heads=heads, kv_heads=kv_heads, tokens=4 if n > 4 else 8).problem
        for name in METHODS:
            method = build(name, {**OPTIONS.get(name, {}), "pad_heads": True})
            layouts = REGISTRY[name].layouts
            for i, one in enumerate(method.candidates(replace(whole, layout=LAYOUTS[layouts[-1]]))):
                if not one.assigned(whole).padded:
                    continue
                turn = len(found)
                case = Case(
                    n=n,
                    method=name,
                    options=tuple((key, getattr(one, key)) for key in one.options() if key not in ("layout", "fuse")),
                    layout=layouts[(i + turn) % len(layouts)],
                    causal=turn % 3 > 0,
                    heads=heads,
                    kv_heads=kv_heads,
                    dtype=DTYPES[turn % 3],
                    tokens=4 if n > 4 else 8,
                )
                found.append(case)
    return found + of_one_batch_entry(found)


def with_documents(cases: Iterable[Case]) -> list[Case]:
    return [
        replace(case, layout="auto", pack=Documents((case.seqlen // 3, case.seqlen - case.seqlen // 3), i % 3 > 0))
        for i, case in enumerate(cases)
    ]


def test_every_method_pads(ranks: Ranks) -> None:
    assert {case.method for case in padded_cases(4)} == {*METHODS} == {
        "group_cast", "loongtrain", "mesh", "ulysses", "ulysses_all_gather", "upipe", "usp"
    }  # fmt: skip


@pytest.mark.parametrize("n", [2, 4, exhaustive(3), exhaustive(6)])
def test_exact(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, of_each_method(padded_cases(n), 6, turn=n))


def test_the_shapes_of_the_issue_on_eight_ranks(ranks: Ranks) -> None:
    """28 heads of 4 or 7 key heads, and 40 of 10, on 8."""
    cases = [
        Case(n=8, method=method, heads=h, kv_heads=k, options=(*options, ("pad_heads", True)), layout="contiguous",
             dtype=dtype, causal=causal, tokens=4)
        for h, k, dtype, causal in ((28, 4, "float32", True), (28, 7, "bfloat16", False), (40, 10, "float32", True))
        for method, options in (("ulysses", ()), ("usp", (("ulysses", 8),)), ("upipe", (("stages", 2),)))
    ]  # fmt: skip
    assert_exact(ranks, cases)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.sampled_from([2, 3, 4, 6, 8]),
    kv_heads=st.integers(1, 9),
    share=st.integers(1, 5),
    method=st.sampled_from(["ulysses", "usp"]),
    causal=st.booleans(),
)
def test_any_heads(ranks: Ranks, n: int, kv_heads: int, share: int, method: str, causal: bool) -> None:
    shape = {"heads": kv_heads * share, "kv_heads": kv_heads, "tokens": 4, "dtype": "float64", "causal": causal}
    layout = REGISTRY[method].layouts[-1]
    options = (*((("ulysses", n),) if method == "usp" else ()), ("pad_heads", True))
    case = Case(n=n, method=method, options=options, layout=layout, **shape)
    try:
        case.built.refuse(case.whole)
    except RequestError:  # a rank would have zeros alone
        assume(False)
    assert_exact(ranks, [case])


@pytest.mark.parametrize("n", [3, exhaustive(4)])
def test_documents(ranks: Ranks, n: int) -> None:
    assert_exact(ranks, of_each_method(with_documents(padded_cases(n)), 3))


@pytest.mark.long
def test_narrow_values_other_keys_and_uneven_shards(ranks: Ranks) -> None:
    cases = of_each_method(padded_cases(4), 3, turn=2)
    narrow = [replace(case, v_head_dim=(8, 4)[i % 2]) for i, case in enumerate(cases)]
    behind = [replace(c, causal=True, kv_seqlen=2 * c.seqlen + 1) for c in cases]
    assert_exact(ranks, [*narrow, *behind, *(replace(case, more=1) for case in cases)])


def test_sinks(ranks: Ranks) -> None:
    cases = of_each_method(padded_cases(4), 4, turn=1)
    most = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1.5e-2}
    answers = ranks.run(jobs.find_differences_with_sinks, cases)
    for case in cases:
        *of_ranks, sinks = zip(*(answer[case] for answer in answers[: case.n]), strict=True)
        for shares in (*of_ranks, sinks[:1]):
            assert relative(shares) <= most[case.dtype], case


def test_ranks_send_and_hold_what_plans_of_padded_heads_say(ranks: Ranks) -> None:
    """By lane, tensor and field, and hold no more than the counted peak of memory, at least 0.6 of it."""
    cases = of_each_method(padded_cases(4), 5, turn=3)
    sent, parts, shares = ranks.run(jobs.find_sent, cases), ranks.run(jobs.run_parts, cases), []
    for case in cases:
        plans = {phase: case.built.plan(case.problem, phase, case.costs) for phase in PHASES}
        for phase, plan in plans.items():
            planned = account.volume(plan, case.problem)
            assert planned.total_bytes == case.built.bytes_sent(case.problem, phase), case
            for rank in range(case.n):
                forward, both = sent[rank][case]
                found = forward if phase == "forward" else {k: v - forward.get(k, 0) for k, v in both.items()}
                assert {k: v for k, v in found.items() if v} == planned.of(rank), f"{case}, rank {rank}, {phase}"
        expected = account.peak_bytes(plans.values(), case.problem, GLOO)
        for each in (answer[case] for answer in parts[: case.n]):
            assert each.buffer_bytes == account.buffer_bytes(plans.values(), case.problem, GLOO), case
            assert each.live_bytes <= expected, case
            assert each.differ_after == [], case
            shares.append(each.live_bytes / expected)
    assert min(shares) > 0.6
