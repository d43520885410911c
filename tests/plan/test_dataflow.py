"""Values and lifetimes against what the plain order of operations demands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from sp_bench.plan import Attend, Fold, receive_next
from sp_bench.plan.dataflow import dataflow
from sp_bench.plan.ops import PlanError, Transfer
from tests.support.problems import Planned, plans
from tests.support.tiny_plans import chunks, tiny, uses


@given(plans())
def test_lifetimes(planned: Planned) -> None:
    """A chunk's values follow each other without overlap, and every use falls into the life of one of them."""
    plan = planned.plan
    flow = dataflow(plan)
    chunks = {chunk for op in plan.ops for chunk in (*op.reads, *op.writes)} | {*plan.starts_with, *plan.ends_with}
    assert flow.first_use.keys() == flow.last_use.keys()
    assert {value.chunk for value in flow.first_use} == chunks
    for chunk in chunks:
        used = uses(plan, chunk)
        values = sorted((value for value in flow.first_use if value.chunk == chunk), key=lambda value: value.version)
        lives = [(flow.first_use[value], flow.last_use[value]) for value in values]
        assert [value.version for value in values] == list(range(len(values)))
        assert all(end < start for (_, end), (start, _) in zip(lives, lives[1:], strict=False))
        assert all(any(start <= index <= end for start, end in lives) for index in used)
        # Only what is there before or after the plan begins or ends where no operation uses it.
        begins, ends = lives[0][0], lives[-1][1]
        assert begins == (0 if chunk in plan.starts_with else min(used))
        assert ends == (len(plan.ops) if chunk in (*plan.starts_with, *plan.ends_with) else max(used))
        assert all(start in used for start, _ in lives[1:]) and all(end in used for _, end in lives[:-1])


@given(plans())
def test_each_receive_and_each_new_sum_is_a_value_of_its_own(planned: Planned) -> None:
    plan = planned.plan
    flow = dataflow(plan)
    there = {*plan.starts_with}
    for index, op in plan:
        for chunk in op.writes:
            assert flow.starts(index, chunk) == (isinstance(op, Transfer) or chunk not in there)
        if isinstance(op, Fold | Transfer):
            there -= {chunk for chunk in op.reads if chunk.tensor.is_partial and chunk not in plan.kept}
        there |= {*op.writes}


def test_errors_name_the_operation() -> None:
    q, kv, o = chunks()
    own, other = Attend(q, kv, o), Attend(q, kv.at(1), o)
    with pytest.raises(PlanError, match=r"operation 1, Attend q#0 x kv#1 into o#0: reads kv#1 before"):
        dataflow(tiny(own, other, receive_next(kv, 0, "kv")))
    with pytest.raises(PlanError, match=r"operation 0, Pass\[kv\] kv#1 -> -1, kv#2 <- \+1: reads kv#1 before"):
        dataflow(tiny(receive_next(kv, 1, "kv"), own))
    over_own = replace(receive_next(kv, 0, "kv"), recv=kv)
    with pytest.raises(PlanError, match=r"operation 1, Pass.* receives over kv#0, which the rank has already"):
        dataflow(tiny(own, over_own))
    with pytest.raises(PlanError, match="its output o#0 was never computed"):
        dataflow(tiny(receive_next(kv, 0, "kv")))


def test_first_operation_may_not_receive_over_an_input() -> None:
    q, kv, o = chunks()
    over_own = replace(receive_next(kv, 0, "kv"), recv=kv)
    with pytest.raises(PlanError, match=r"operation 0, Pass.* receives over kv#0, which the rank has already"):
        dataflow(tiny(over_own, Attend(q, kv, o)))
