"""Checked plans end in NCCL's launch order, in whatever order ranks get on and however few SMs their lanes take."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from sp_bench.check import check
from sp_bench.lower import lower
from sp_bench.methods import build
from sp_bench.plan import Plan, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import BLOCKS, Transfer
from sp_bench.plan.transfers import peers
from tests.support.marks import long
from tests.support.problems import all_methods, of_each_name, splittable_problem


def hang(plan: Plan, problem: Problem, seed: int, *, sms: int, ordered: bool) -> list[str]:
    """Transfers that never end, if ranks get on in an order drawn at random; each running one takes one of `sms`.

    A transfer starts on a rank after the waits of the plan, those of its lane and, if `ordered`, the start of the
    transfer before it in the plan. It ends once those that it exchanges with have started theirs.
    """
    draw, waits, ranks = random.Random(seed), lower(plan, problem).waits, range(plan.n)
    streams = {stream: [i for i, op in plan if op.stream == stream] for stream in (BLOCKS, *plan.lanes)}
    before = {i: after for order in streams.values() for after, i in zip([None, *order], order, strict=False)}
    transfers = [i for i, op in plan if isinstance(op, Transfer)]
    previous = dict(zip(transfers[1:], transfers, strict=False))
    with_: dict[tuple[int, int], set[int]] = {}
    for i in transfers:
        op = plan.ops[i]
        assert isinstance(op, Transfer)
        for rank in ranks:
            ahead = {int(group.member(rank, shift)) for group, shift in peers(op)}
            behind = {int(group.member(rank, -shift)) for group, shift in peers(op)}
            with_[i, rank] = (ahead | behind) - {rank}
    started, ended, running = set[tuple[int, int]](), set[tuple[int, int]](), dict.fromkeys(ranks, 0)

    def may_start(i: int, rank: int) -> bool:
        first: Iterable[int | None] = (before[i], *(last for _, last in waits[i]))
        if (i, rank) in started or any(last is not None and (last, rank) not in ended for last in first):
            return False
        if i not in with_of or not ordered:
            return i not in with_of or running[rank] < sms
        return running[rank] < sms and (i not in previous or (previous[i], rank) in started)

    with_of = set(transfers)
    todo = {(i, rank) for i, _ in plan for rank in ranks}
    while todo:
        ends = [(i, r) for i, r in todo & started if all((i, other) in started for other in with_.get((i, r), ()))]
        begins = [(i, r) for i, r in todo - started if may_start(i, r)]
        if not ends and not begins:
            return [f"rank {rank}: {plan.ops[i]}" for i, rank in sorted(todo & started)]
        i, rank = draw.choice(sorted(ends) + sorted(begins))
        moves = i in with_of
        if (i, rank) in started:
            ended.add((i, rank))
            todo.remove((i, rank))
            running[rank] -= moves
        else:
            started.add((i, rank))
            running[rank] += moves
    return []


@pytest.mark.parametrize("n", [4, long(6)])
def test_no_checked_plan_deadlocks_under_any_interleaving(n: int) -> None:
    """With an SM for each lane, and with one for all of them."""
    problem = splittable_problem(n)
    for number, method in enumerate(of_each_name(all_methods(problem))):
        for phase in PHASES:
            plan, assigned = method.plan(problem, phase, COMPUTE_BOUND), method.assigned(problem)
            check(plan, assigned)
            for sms in (len(plan.lanes), 1):
                assert not hang(plan, assigned, number, sms=sms, ordered=True), (method, phase, sms)


def test_without_it_too_few_sms_do() -> None:
    problem, method = splittable_problem(4), build("ring", {})
    plan = method.plan(problem, "backward", COMPUTE_BOUND)
    assert any(hang(plan, method.assigned(problem), seed, sms=1, ordered=False) for seed in range(20))
