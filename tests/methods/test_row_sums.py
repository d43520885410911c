"""Backward plans that send rowsum(dO * O) in place of O: what they send, and what the proof refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sp_bench import account
from sp_bench.check import check, check_all
from sp_bench.errors import RequestError
from sp_bench.methods import build
from sp_bench.plan import Plan
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import PlanError, RowSums
from sp_bench.plan.tensors import Q
from tests.support.problems import splittable_problem

VARIANTS: list[tuple[str, dict[str, Any], int]] = [
    ("mesh", {"tile": (4, 2)}, 3),
    ("mesh", {"tile": (2, 2), "ulysses": 2}, 1),
    ("pass_q", {}, 7),
]
"""(method, options, how many chunks of OdOQ each rank sends) on 8 ranks."""


@pytest.mark.parametrize(("name", "options", "hops"), VARIANTS)
def test_a_chunk_less_travels_for_each_row_of_the_tile(name: str, options: dict[str, Any], hops: int) -> None:
    asked = splittable_problem(8)
    whole, summed = (build(name, {**options, "row_sums": on}) for on in (False, True))
    unit = asked.chunk_bytes(Q, wire=True)
    for phase in PHASES:
        problem = summed.assigned(asked)
        full, less = (account.volume(m.plan(asked, phase, COMPUTE_BOUND), problem) for m in (whole, summed))
        assert less.total_bytes == summed.bytes_sent(asked, phase)
        backward = phase == "backward"
        assert full.payload_bytes - less.payload_bytes == backward * hops * unit
        assert less.statistic_bytes - full.statistic_bytes == backward * hops * asked.heads * asked.queries.most * 4
    check_all({phase: summed.plan(asked, phase, COMPUTE_BOUND) for phase in PHASES}, summed.assigned(asked))


def test_with_one_row_there_is_nothing_to_sum() -> None:
    asked = splittable_problem(4)
    for name, options, n in (("mesh", {"tile": (1, 4)}, 4), ("pass_q", {}, 1)):
        plan = build(name, {**options, "row_sums": True}).plan(replace(asked, n=n), "backward", COMPUTE_BOUND)
        assert not any(isinstance(op, RowSums) for op in plan.ops)


def edited(plan: Plan, number: int, **changes: object) -> Plan:
    """The plan with one of its RowSums changed."""
    index = [i for i, op in plan if isinstance(op, RowSums)][number]
    op = replace(plan.ops[index], **changes)  # pyright: ignore[reportArgumentType]
    return replace(plan, ops=(*plan.ops[:index], op, *plan.ops[index + 1 :]))


def test_row_sums_of_other_chunks_are_refused() -> None:
    asked = splittable_problem(4)
    plan = build("pass_q", {"row_sums": True}).plan(asked, "backward", COMPUTE_BOUND)
    sums = [op for op in plan.ops if isinstance(op, RowSums)]
    with pytest.raises(PlanError, match="the parts are of different chunks"):
        check(edited(plan, 2, parts=sums[1].parts), asked)
    with pytest.raises(PlanError, match="only odoq makes a doq, and only doq an odoq"):
        check(edited(plan, 0, parts=(plan.inputs[1],)), asked)


@pytest.mark.parametrize("name", ["mesh", "pass_q"])
def test_row_sums_are_true_or_false(name: str) -> None:
    with pytest.raises(RequestError, match="method.row_sums=yes: must be true or false; .* would work"):
        build(name, {"row_sums": "yes"})


def test_what_is_put_back_takes_memory() -> None:
    """O of a row while its blocks run; its receive buffers are smaller by one field, and hold a statistic more."""
    asked = splittable_problem(16)
    whole, summed = (
        account.peak_bytes([build("pass_q", {"row_sums": on}).plan(asked, "backward", COMPUTE_BOUND)], asked)
        for on in (False, True)
    )
    assert 0 < summed < whole + asked.chunk_bytes(Q, wire=False)
