"""Errors of broken plans, on plans small enough to read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp_bench import account
from sp_bench.check import check
from sp_bench.methods import build
from sp_bench.plan import Attend, Chunk, Fold, Group, Op, Pass, Plan, Problem, Steps, receive_next
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import PlanError
from sp_bench.plan.tensors import DQ, KV, ODOQ, O, Q, Tensor
from tests.support.plan_edits import (
    ring_of_three,
    with_op,
    without,
)
from tests.support.problems import small_problem
from tests.support.typed import of_kind


def test_messages_name_rank_block_and_chunk() -> None:
    plan, problem = ring_of_three()
    *rest, last = plan.ops
    assert str(last) == "Attend q#0 x kv#2 into o#0"
    with pytest.raises(PlanError, match="^the end of the plan: o#0 of rank 2 lacks its block with chunk 0$"):
        check(replace(plan, ops=tuple(rest)), problem)
    with pytest.raises(PlanError, match=r"^operation 5, Attend q#0 x kv#2 into o#0: on rank 0, .*chunk 1.* twice$"):
        check(with_op(plan, 5, last), problem)
    misread = replace(plan.ops[0], send=plan.inputs[0])
    with pytest.raises(PlanError, match=r"^operation 0, Pass.*: sends q where the peer receives kv$"):
        check(replace(plan, ops=(misread, *plan.ops[1:])), problem)


def test_fully_masked_blocks_are_not_demanded() -> None:
    """Rank 0 of the contiguous causal layout sees no chunk but its own: the others may be computed or not."""
    plan, problem = ring_of_three(causal=True)
    check(plan, problem)
    # On no rank may a block be left out, since each is visible on one: rank 2 sees both others.
    for index, op in plan:
        if isinstance(op, Attend):
            with pytest.raises(PlanError):
                check(without(plan, index), problem)


def test_a_chunk_received_twice_is_wasteful_but_right() -> None:
    """The volume is off, which account finds; the result is not."""
    plan, problem = ring_of_three()
    twice = with_op(plan, 1, plan.ops[0])
    check(twice, problem)
    assert account.volume(twice, problem).total_bytes > account.volume(plan, problem).total_bytes


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    plan, _ = ring_of_three()
    for n in (6, 9):
        with pytest.raises(PlanError):
            check(plan, small_problem(n, "contiguous", causal=False))


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_groups_that_do_not_tile_the_ranks_are_refused(n: int) -> None:
    plan, _ = ring_of_three()
    with pytest.raises(PlanError, match=r"^operation 0, .* doesn't tile"):
        check(replace(plan, n=n), small_problem(n, "contiguous", causal=False))


def plan_of(n: int, *ops: Op) -> tuple[Plan, Problem]:
    """Q, KV and O travel along one ring of n ranks; nothing is masked."""
    steps, ring = Steps(), Group(1, n)
    steps.next()
    steps.do(*ops)
    q, kv, o = (Chunk(tensor, 0, ring) for tensor in (Q, KV, O))
    return steps.plan("forward", n, (q, kv), (o,)), small_problem(n, "contiguous", causal=False)


def straight_home(n: int) -> list[Op]:
    """Every Q goes everywhere, and each partial output straight to its owner, by one hop of its own length."""
    ring = Group(1, n)
    q, kv, o = (Chunk(tensor, 0, ring) for tensor in (Q, KV, O))
    ops: list[Op] = [Attend(q, kv, o)]
    for u in range(1, n):
        ops += [receive_next(q, u - 1, "q"), Attend(q.at(u), kv, o.at(u))]
        ops += [Pass("o", o.at(u), o.arriving(), ring, shift=u), Fold(o.arriving(), o)]
    return ops


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_other_ways_to_reduce_are_accepted(n: int) -> None:
    plan, problem = plan_of(n, *straight_home(n))
    check(plan, problem)
    hop_bytes = sum(problem.chunk_bytes(tensor, wire=True) for tensor in (Q, O))
    assert account.volume(plan, problem).total_bytes == pytest.approx((n - 1) * hop_bytes)


def test_a_partial_must_be_folded_before_the_next_arrives_over_it() -> None:
    ops = straight_home(3)
    del ops[4]
    with pytest.raises(PlanError, match=r"^operation 6, Pass.*o#0 arriving is received over one that was not folded"):
        check(*plan_of(3, *ops))


def test_a_block_computed_on_two_ranks_is_refused_or_found_unused() -> None:
    ring = Group(1, 2)
    q, kv, o = (Chunk(tensor, 0, ring) for tensor in (Q, KV, O))
    ops: list[Op] = [Attend(q, kv, o), receive_next(kv, 0, "kv"), Attend(q, kv.at(1), o)]
    check(*plan_of(2, *ops))
    ops += [receive_next(q, 0, "q"), Attend(q.at(1), kv, o.at(1))]
    with pytest.raises(
        PlanError, match=r"^operation 4, Attend q#1 x kv#0 into o#1: on rank 0, o#1 is never sent on or folded"
    ):
        check(*plan_of(2, *ops))
    ops += [Pass("o", o.at(1), o.arriving(), ring, shift=1), Fold(o.arriving(), o)]
    with pytest.raises(PlanError, match=r"^operation 6, Fold.*on rank 0, a block of o#0 arriving is in o#0 already"):
        check(*plan_of(2, *ops))


def test_a_rank_has_no_tokens_but_its_own() -> None:
    plan, problem = ring_of_three()
    q, kv = plan.inputs
    with pytest.raises(PlanError, match=r"^the plan's inputs are q#0, kv#0, q#1"):
        check(replace(plan, inputs=(q, kv, q.at(1))), problem)


def test_kinds_of_chunks_are_not_mixed_up() -> None:
    plan, problem = ring_of_three()
    ring = of_kind(Group, of_kind(Pass, plan.ops[0]).group)
    q, o = Chunk(Q, 0, ring), Chunk(O, 0, ring)
    with pytest.raises(PlanError, match="sends q where the peer receives kv"):
        check(with_op(plan, 0, replace(plan.ops[0], send=q)), problem)
    into_arriving = Pass("kv", send=q, recv=q.at(1).arriving(), group=ring, shift=-1)
    with pytest.raises(PlanError, match="q#1 arriving is a buffer for arriving partials"):
        check(with_op(plan, 0, into_arriving), problem)
    with pytest.raises(PlanError, match="its output o#0 was never computed, or sent on"):
        check(with_op(plan, 5, receive_next(o, 0, "o")), problem)


@pytest.mark.parametrize(
    ("phase", "changes"),
    [("forward", {Q: KV}), ("forward", {KV: Q}), ("forward", {O: DQ}), ("backward", {ODOQ: KV})],
)
def test_blocks_of_the_wrong_tensors_are_refused(phase: str, changes: dict[Tensor, Tensor]) -> None:
    """Such a block would be attention of K to K, or leave its output where nobody looks for it."""
    problem = small_problem(1)
    plan = build("ring", {}).plan(problem, phase, COMPUTE_BOUND)
    (block,) = plan.ops
    wrong = replace(block, **{field.name: Chunk(tensor, 0, Group(1, 1)) for field, tensor in changes.items()})
    with pytest.raises(PlanError, match=r"^operation 0, |^the plan's outputs are dq#0"):
        check(replace(plan, ops=(wrong,), outputs=wrong.writes), problem)


@pytest.mark.parametrize("phase", PHASES)
def test_outputs_must_be_the_ranks_own(phase: str) -> None:
    """A plan that leaves each rank its neighbour's rows is wrong however complete they are."""
    problem = small_problem(3, "contiguous", causal=False)
    plan = build("mesh", {"tile": (3, 1)}).plan(problem, phase, COMPUTE_BOUND)
    for outputs in ((), plan.outputs[::-1] * 2, tuple(chunk.at(1) for chunk in plan.outputs)):
        with pytest.raises(PlanError, match=f"the plan's outputs are .*: {phase} has"):
            check(replace(plan, outputs=outputs), problem)
    with pytest.raises(PlanError, match="the plan's inputs are"):
        check(replace(plan, inputs=(*plan.inputs, plan.inputs[0].at(1))), problem)


def test_lanes_and_peers_that_are_none() -> None:
    plan, problem = ring_of_three()
    with pytest.raises(PlanError, match="operation 0, .*: blocks is no lane"):
        check(with_op(plan, 0, replace(plan.ops[0], lane="blocks")), problem)
    with pytest.raises(PlanError, match="operation 0, .*: a rank can't send to itself"):
        check(with_op(plan, 0, replace(plan.ops[0], shift=3)), problem)
