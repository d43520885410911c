"""Blocks alone and transfers alone, and the memory that an execution takes, for every method and variant."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sp_bench import account
from sp_bench.lower import GLOO
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.run.executor import Action
from tests.run import jobs
from tests.support.attention_cases import Case, of_each_method, of_one_batch_entry
from tests.support.marks import exhaustive
from tests.support.problems import all_methods, splittable_problem
from tests.support.ranks import Ranks

Found = dict[Case, list[jobs.Parts]]


def cases(n: int) -> list[Case]:
    """Every method in every variant; from case to case another dtype, number of key heads, mask and layout."""
    every = []
    for i, method in enumerate(all_methods(splittable_problem(n))):
        options = tuple((k, v) for k, v in vars(method).items() if k != "layout")
        layout = ("striped", "contiguous", "zigzag")[i % 3]
        layout = layout if layout in method.layouts else method.layouts[0]
        dtype, kv_heads = ("float32", "bfloat16")[i % 2], 2 * n // (1 + i // 2 % 2)
        every.append(
            Case(
                n=n, method=method.name, options=options, layout=layout, causal=i % 4 != 3, heads=2 * n,
                kv_heads=kv_heads, dtype=dtype,
            )
        )  # fmt: skip
    in_place = of_one_batch_entry(every)
    return every + [replace(case, dtype=dtype) for case in in_place for dtype in ("float32", "bfloat16")]


@pytest.fixture(
    scope="module",
    params=["a variant of each method", exhaustive((1, 4)), exhaustive((9,))],
    ids=str,
)
def found(ranks: Ranks, request: pytest.FixtureRequest) -> Found:
    if isinstance(request.param, str):
        wanted = [*of_each_method(cases(1)), *of_each_method(cases(4), 2)]
    elif request.param == (9,):
        wanted = of_each_method(cases(9), 4)
    else:
        wanted = [case for n in request.param for case in cases(n)]
    answers = ranks.run(jobs.run_parts, wanted)
    return {case: [answer[case] for answer in answers[: case.n]] for case in wanted}


def test_blocks_alone_send_nothing_and_transfers_alone_send_everything(found: Found) -> None:
    for case, ranks in found.items():
        plans = [case.built.plan(case.problem, phase, COMPUTE_BOUND) for phase in PHASES]
        pairs = np.sum([account.pairs(plan, case.problem) for plan in plans], axis=0)
        for parts, computed in zip(ranks, pairs, strict=True):  # on some layouts a rank's blocks are all empty
            assert parts.sent[Action.COMPUTE] == {}, case
            assert parts.sent[Action.COMMUNICATION] == parts.sent[Action.EVERYTHING], case
            assert bool(parts.sent[Action.EVERYTHING]) == (case.n > 1), case
            assert parts.kernels_s[Action.COMMUNICATION] == 0.0, case
            assert (parts.kernels_s[Action.COMPUTE] > 0.0) == (computed > 0), case


def test_parts_leave_nothing_behind(found: Found) -> None:
    assert [d for ranks in found.values() for parts in ranks for d in parts.differ_after] == []


def test_buffers_are_the_plans_and_memory_is_within_what_they_say(found: Found) -> None:
    """Exactly the buffers; of the rest, the plans' figure is for lanes as late as the waits allow."""
    shares = []
    for case, ranks in found.items():
        plans = [case.built.plan(case.problem, phase, COMPUTE_BOUND) for phase in PHASES]
        expected = account.peak_bytes(plans, case.problem, GLOO)
        for parts in ranks:
            assert parts.buffer_bytes == account.buffer_bytes(plans, case.problem, GLOO), case
            assert parts.live_bytes <= expected, case
            shares.append(parts.live_bytes / expected)
    assert min(shares) > 0.6
    assert max(shares) == 1.0
