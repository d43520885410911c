"""Rows of a chunk that are left behind where nobody needs them any more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp_bench.check import check
from sp_bench.methods import build
from sp_bench.methods.tokenring import TokenRing
from sp_bench.plan import Chunk, Group, Pass, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import PlanError
from sp_bench.plan.tensors import KV, Q
from sp_bench.plan.transfers import rows_sent
from tests.support.plan_edits import (
    assert_names_what_is_wrong,
    is_reduce,
    with_changed,
)
from tests.support.problems import small_problem, splittable_problem


class Upwards(TokenRing):
    """TokenRing whose Q goes up while rows are left out: the first half of a chunk would be needed last."""

    def _move(self, problem: Problem) -> int:
        return 1


TRIMMED = [(3, 1), (4, 1), (6, 1), (6, 2), (8, 1), (8, 2)]
"""Ranks and nodes of TokenRings of at least three."""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("n", "nodes"), TRIMMED)
def test_rows_that_are_needed_later_are_not_left_behind(n: int, nodes: int, phase: str) -> None:
    problem = small_problem(n, "zigzag")
    check(TokenRing(nodes=nodes).plan(problem, phase, COMPUTE_BOUND), problem)
    check(Upwards(nodes=nodes, trim=False).plan(problem, phase, COMPUTE_BOUND), problem)
    wrong = Upwards(nodes=nodes).plan(problem, phase, COMPUTE_BOUND)
    with pytest.raises(PlanError, match=r"^operation \d+, .*: on rank \d+, (q|odoq)#\d+ lacks rows that "):
        check(wrong, problem)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("n", "nodes"), TRIMMED)
def test_rows_are_told_by_the_right_keys(n: int, nodes: int, phase: str) -> None:
    """All rows that are sent are needed: against keys by which any of them would stay behind, a Pass is refused.

    To send a whole chunk, where fewer rows would do, is wasteful but right.
    """
    problem = small_problem(n, "zigzag")
    plan, lost = TokenRing(nodes=nodes).plan(problem, phase, COMPUTE_BOUND), set()

    def parts(op: Pass) -> list[range]:
        return [rows_sent(op, problem, rank) for rank in range(n)]

    for index, op in plan:
        if not isinstance(op, Pass) or op.against is None:
            continue
        if is_reduce(op) or op.send.index == 0:
            check(with_changed(plan, index, against=None).plan, problem)
        for u in range(n):
            broken = with_changed(plan, index, against=Chunk(KV, u, Group(1, n)))
            wrong = broken.plan.ops[index]
            assert isinstance(wrong, Pass)
            if not any(p == range(2) != w for p, w in zip(parts(op), parts(wrong), strict=True)):
                continue
            lost.add(is_reduce(op))
            with pytest.raises(PlanError) as refused:
                check(broken.plan, problem)
            assert_names_what_is_wrong(str(refused.value), broken if is_reduce(op) else replace(broken, culprit=None))
            said = "has rows that stay behind" if is_reduce(op) else "lacks rows that"
            assert said in str(refused.value)
    assert lost == {False, True}


def test_rows_are_left_out_of_queries_only() -> None:
    problem = small_problem(3, "zigzag")
    plan = build("ring", {}).plan(problem, "backward", COMPUTE_BOUND)
    _, kv = plan.inputs
    for index, op in plan:
        if isinstance(op, Pass):
            with pytest.raises(PlanError, match=rf"^operation {index}, Pass.* no rows of d?kv#\d.* can be left out"):
                check(with_changed(plan, index, against=kv).plan, problem)
    plan = TokenRing().plan(problem, "forward", COMPUTE_BOUND)
    with pytest.raises(PlanError, match=r"^operation 0, Pass.* no rows of q#0 can be left out against q#0"):
        check(with_changed(plan, 0, against=plan.inputs[0]).plan, problem)


def test_rows_that_were_left_behind_are_not_sent_on() -> None:
    """A trimmed hop makes all further ones trimmed: without `against` whole chunks would be sent."""
    problem = splittable_problem(4, "zigzag")
    plan = build("tokenring", {}).plan(problem, "forward", COMPUTE_BOUND)
    hops = [index for index, op in plan if isinstance(op, Pass) and op.tensor is Q]
    for hop in hops[1:]:
        broken = with_changed(plan, hop, against=None).plan
        with pytest.raises(PlanError, match=rf"operation {hop}, .*lacks rows that are to be sent"):
            check(broken, problem)
