"""The proof accepts every plan of every method, and refuses each way of breaking one."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from methods import REGISTRY, build
from sp_bench.check import check, check_all
from sp_bench.plan import (
    COMPUTE_BOUND,
    LAYOUTS,
    PHASES,
    Attend,
    AttendBackward,
    Chunk,
    Fold,
    Group,
    Op,
    Pass,
    Plan,
    PlanError,
    Problem,
    Steps,
    dataflow,
    receive_next,
)
from tests.problems import Planned, all_methods, plans, small_problem, splittable_problem

# Plans that are right.


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", range(1, 17))
def test_every_method_and_tile_is_accepted(n: int, layout: str, causal: bool) -> None:
    problem = splittable_problem(n, layout, causal=causal)
    for method in all_methods(problem):
        check_all({phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}, method.dealt(problem))


@given(plans(max_n=24))
def test_schedules_for_any_costs_are_accepted(planned: Planned) -> None:
    check(*planned)


def test_256_ranks() -> None:
    """All nine tiles of mesh, and all others."""
    started, problem, proven = time.perf_counter(), splittable_problem(256), Counter()
    for method in all_methods(problem):
        check_all({phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}, method.dealt(problem))
        proven[method.name] += 1
    assert set(proven) == set(REGISTRY) - {"reference"}
    assert proven["mesh"] == 9 and proven["ring"] == 1
    print(f"{2 * proven.total()} plans of 256 ranks: {time.perf_counter() - started:.2f} s")


# Plans that are broken. A mutation takes a right plan and spoils one thing that changes what it means.


@dataclass(frozen=True)
class Broken:
    """A spoiled plan, and the index of the operation at which it goes wrong, where that is certain."""

    plan: Plan
    culprit: int | None = None


Mutation = Callable[[st.DrawFn, Plan], Broken]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def pick(draw: st.DrawFn, plan: Plan, wanted: Callable[[Op], bool]) -> int:
    """The index of any operation of that sort; plans without one are left out."""
    found = [index for index, op in plan if wanted(op)]
    assume(found)
    return draw(st.sampled_from(found))


def pick_pass(draw: st.DrawFn, plan: Plan) -> tuple[int, Pass]:
    index = pick(draw, plan, is_pass)
    op = plan.ops[index]
    assert isinstance(op, Pass)
    return index, op


def without(plan: Plan, *indices: int) -> Plan:
    kept = [i for i in range(len(plan.ops)) if i not in indices]
    return replace(plan, ops=tuple(plan.ops[i] for i in kept), steps=tuple(plan.steps[i] for i in kept))


def with_op(plan: Plan, index: int, op: Op) -> Plan:
    """`op` is put before operation `index`."""
    step = plan.steps[min(index, len(plan.ops) - 1)]
    return replace(
        plan,
        ops=(*plan.ops[:index], op, *plan.ops[index:]),
        steps=(*plan.steps[:index], step, *plan.steps[index:]),
    )


def with_changed(plan: Plan, index: int, **changes: Any) -> Broken:
    """One field of an operation is another; nothing before it is touched, so it must be the one that is named."""
    op = replace(plan.ops[index], **changes)
    return Broken(replace(plan, ops=(*plan.ops[:index], op, *plan.ops[index + 1 :])), culprit=index)


def if_in_order(broken: Broken) -> Broken:
    """The culprit is certain only if nothing is read before it is there, since that is proven first."""
    try:
        dataflow(broken.plan)
    except PlanError:
        return replace(broken, culprit=None)
    return broken


def moved(plan: Plan, index: int, to: int) -> Plan:
    return with_op(without(plan, index), to, plan.ops[index])


def is_block(op: Op) -> bool:
    return isinstance(op, Attend | AttendBackward)


def is_pass(op: Op) -> bool:
    return isinstance(op, Pass)


def is_fold(op: Op) -> bool:
    return isinstance(op, Fold)


def is_reduce(op: Op) -> bool:
    return isinstance(op, Pass) and op.writes[0].is_arriving


def arrival(plan: Plan, chunk: Chunk) -> int:
    """The first Pass that brings a chunk; -1 for an input."""
    return next((index for index, op in plan if isinstance(op, Pass) and op.recv == chunk), -1)


def brings_news(plan: Plan, index: int) -> bool:
    """Whether a Pass brings something that the rank doesn't have from an earlier time round the ring."""
    op = plan.ops[index]
    return is_reduce(op) or (isinstance(op, Pass) and arrival(plan, op.writes[0]) == index)


def departure(plan: Plan, chunk: Chunk) -> int:
    """The last Pass that sends a chunk; -1 for none. What is added to a partial after it is lost."""
    return max((index for index, op in plan if isinstance(op, Pass) and op.send == chunk), default=-1)


def departs_later(plan: Plan, index: int) -> list[int]:
    """For the partials that an operation adds to: the last departure, where that is still to come."""
    return [left for chunk in plan.ops[index].writes if (left := departure(plan, chunk)) > index]


def pick_index(draw: st.DrawFn, plan: Plan, wanted: Callable[[int], bool]) -> int:
    """As pick, by the index of the operation."""
    found = [index for index in range(len(plan.ops)) if wanted(index)]
    assume(found)
    return draw(st.sampled_from(found))


def other_index(draw: st.DrawFn, chunk: Chunk) -> Chunk:
    """The same buffer of any other local index."""
    assume(chunk.home.size > 1)
    other = chunk.at(chunk.index + draw(st.integers(1, chunk.home.size - 1)))
    return other.arriving(chunk.arrival) if chunk.is_arriving else other


@mutation
def drop_block(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_block)))


@mutation
def double_block(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_block)
    again = draw(st.integers(index + 1, len(plan.ops)))
    # If the first one's result left in between, the second may look innocent until it is folded.
    left = any(isinstance(op, Pass) and op.send in plan.ops[index].writes for op in plan.ops[index:again])
    return Broken(with_op(plan, again, plan.ops[index]), culprit=None if left else again)


@mutation
def block_before_its_receive(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, lambda op: is_block(op) and any(arrival(plan, chunk) >= 0 for chunk in op.reads))
    last = max(arrival(plan, chunk) for chunk in plan.ops[index].reads)
    to = draw(st.integers(0, last))
    return Broken(moved(plan, index, to), culprit=to)


@mutation
def block_after_its_result_left(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick_index(draw, plan, lambda i: is_block(plan.ops[i]) and bool(departs_later(plan, i)))
    to = draw(st.integers(min(departs_later(plan, index)), len(plan.ops) - 1))
    return Broken(moved(plan, index, to))


@mutation
def fold_after_its_result_left(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick_index(draw, plan, lambda i: is_fold(plan.ops[i]) and bool(departs_later(plan, i)))
    to = draw(st.integers(min(departs_later(plan, index)), len(plan.ops) - 1))
    return Broken(moved(plan, index, to))


@mutation
def drop_pass(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick_index(draw, plan, lambda i: brings_news(plan, i))))


@mutation
def receive_without_send(draw: st.DrawFn, plan: Plan) -> Broken:
    return with_changed(plan, pick(draw, plan, is_pass), send=None)


@mutation
def send_without_receive(draw: st.DrawFn, plan: Plan) -> Broken:
    return if_in_order(with_changed(plan, pick(draw, plan, is_pass), recv=None))


@mutation
def change_shift(draw: st.DrawFn, plan: Plan) -> Broken:
    index, op = pick_pass(draw, plan)
    return with_changed(plan, index, shift=op.shift + draw(st.integers(1, op.group.size - 1)))


@mutation
def change_group(draw: st.DrawFn, plan: Plan) -> Broken:
    """A Q chunk travels along the KV group, or any chunk along a group that is no one's."""
    index, op = pick_pass(draw, plan)
    ranks = range(plan.n)
    divisors = [d for d in range(1, plan.n + 1) if plan.n % d == 0]
    groups = [Group(stride, size) for stride in divisors for size in divisors if plan.n % (stride * size) == 0]
    peers = [op.source(rank) for rank in ranks]
    groups = [group for group in groups if [replace(op, group=group).source(rank) for rank in ranks] != peers]
    assume(groups)
    return with_changed(plan, index, group=draw(st.sampled_from(groups)))


@mutation
def send_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_pass)
    return if_in_order(with_changed(plan, index, send=other_index(draw, plan.ops[index].reads[0])))


@mutation
def receive_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_pass)
    return if_in_order(with_changed(plan, index, recv=other_index(draw, plan.ops[index].writes[0])))


@mutation
def send_partial_as_input(draw: st.DrawFn, plan: Plan) -> Broken:
    """A partial is received where only inputs are, and would never be folded."""
    index = pick(draw, plan, is_reduce)
    held = plan.ops[index].writes[0]._replace(arrival=0)
    return replace(with_changed(plan, index, recv=held), culprit=None)


@mutation
def send_partial_twice(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_reduce)
    again = draw(st.integers(index + 1, len(plan.ops)))
    once = plan.ops.count(plan.ops[index]) == 1
    return Broken(with_op(plan, again, plan.ops[index]), culprit=again if once else None)


@mutation
def drop_reduce_hop(draw: st.DrawFn, plan: Plan) -> Broken:
    """A Pass of partials together with the Fold of what it brings."""
    hop = pick(draw, plan, is_reduce)
    folds = [index for index, op in plan if isinstance(op, Fold) and op.part == plan.ops[hop].writes[0]]
    return Broken(without(plan, hop, *folds))


@mutation
def swap_hops(draw: st.DrawFn, plan: Plan) -> Broken:
    """A hop, and the next one of what it brought or of what that was folded into, in the other order."""

    def next_hop(index: int) -> int:
        brought = plan.ops[index].writes
        onward = {*brought, *(op.into for op in plan.ops if isinstance(op, Fold) and op.part in brought)}
        later = [i for i, op in plan if i > index and isinstance(op, Pass) and op.send in onward]
        return later[0] if later and brings_news(plan, index) else -1

    first = pick_index(draw, plan, lambda i: is_pass(plan.ops[i]) and next_hop(i) >= 0)
    second, ops = next_hop(first), list(plan.ops)
    ops[first], ops[second] = ops[second], ops[first]
    return Broken(replace(plan, ops=tuple(ops)))


@mutation
def retarget_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    return if_in_order(with_changed(plan, index, into=other_index(draw, plan.ops[index].writes[0])))


@mutation
def fold_another_part(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    return with_changed(plan, index, part=other_index(draw, plan.ops[index].reads[0]))


@mutation
def drop_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_fold)))


@mutation
def double_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    again = draw(st.integers(index + 1, len(plan.ops)))
    once = plan.ops.count(plan.ops[index]) == 1
    return Broken(with_op(plan, again, plan.ops[index]), culprit=again if once else None)


@mutation
def swap_q(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_block)
    op = plan.ops[index]
    field = "q" if isinstance(op, Attend) else "odoq"
    return with_changed(plan, index, **{field: other_index(draw, getattr(op, field))})


@mutation
def swap_kv(draw: st.DrawFn, plan: Plan) -> Broken:
    # Forward, the block that this one has become is named if it comes later.
    index = pick(draw, plan, is_block)
    return replace(with_changed(plan, index, kv=other_index(draw, plan.ops[index].reads[1])), culprit=None)


@mutation
def retarget_block(draw: st.DrawFn, plan: Plan) -> Broken:
    """Its output, or one of its gradients, goes to another chunk's accumulator."""
    index = pick(draw, plan, is_block)
    op = plan.ops[index]
    field = "o" if isinstance(op, Attend) else draw(st.sampled_from(["dq", "dkv"]))
    return if_in_order(with_changed(plan, index, **{field: other_index(draw, getattr(op, field))}))


@mutation
def forget_input(draw: st.DrawFn, plan: Plan) -> Broken:
    lost = draw(st.integers(0, len(plan.inputs) - 1))
    return Broken(replace(plan, inputs=(*plan.inputs[:lost], *plan.inputs[lost + 1 :])))


@mutation
def misplace_input(draw: st.DrawFn, plan: Plan) -> Broken:
    """The plan takes its rank's own tokens for those of another."""
    lost = draw(st.integers(0, len(plan.inputs) - 1))
    wrong = other_index(draw, plan.inputs[lost])
    return Broken(replace(plan, inputs=(*plan.inputs[:lost], wrong, *plan.inputs[lost + 1 :])))


@mutation
def ask_for_another_output(draw: st.DrawFn, plan: Plan) -> Broken:
    lost = draw(st.integers(0, len(plan.outputs) - 1))
    wrong = other_index(draw, plan.outputs[lost])
    return Broken(replace(plan, outputs=(*plan.outputs[:lost], wrong, *plan.outputs[lost + 1 :])))


def assert_names_what_is_wrong(message: str, broken: Broken) -> None:
    """The message quotes an operation of the plan by its index, or a chunk that the end of the plan lacks."""
    if named := re.match(r"operation (\d+), ", message):
        index = int(named.group(1))
        assert message.startswith(f"operation {index}, {broken.plan.ops[index]}: ")
        assert broken.culprit in (None, index), f"{message}\n(operation {broken.culprit} was spoiled)"
    else:
        assert broken.culprit is None, f"{message}\n(operation {broken.culprit} was spoiled)"
        assert re.match(r"(the end of the plan: |the plan's (in|out)puts are ).*\w+#\d+", message)


@pytest.mark.parametrize("name", MUTATIONS)
@given(data=st.data())
def test_broken_plans_are_refused(name: str, data: st.DataObject) -> None:
    planned = data.draw(plans(min_n=2, max_n=9))
    check(*planned)
    broken = data.draw(st.composite(lambda draw: MUTATIONS[name](draw, planned.plan))())
    try:
        check(broken.plan, planned.problem)
    except PlanError as error:
        assert_names_what_is_wrong(str(error), broken)
    else:
        pytest.fail(f"{name} was accepted: {[str(op) for op in broken.plan.ops]}")


# Messages, on plans small enough to read.


def ring_of_three(causal: bool = False) -> tuple[Plan, Problem]:
    problem = small_problem(3, "contiguous", causal=causal)
    return build("ring", {}).plan(problem, "forward", COMPUTE_BOUND), problem


def test_messages_name_rank_block_and_chunk() -> None:
    plan, problem = ring_of_three()
    *rest, last = plan.ops
    assert str(last) == "Attend q#0 x kv#2 into o#0"
    with pytest.raises(PlanError, match="^the end of the plan: o#0 of rank 1 lacks its block with chunk 0$"):
        check(replace(plan, ops=tuple(rest)), problem)
    with pytest.raises(PlanError, match=r"^operation 5, Attend q#0 x kv#2 into o#0: on rank 0, .*chunk 2.* twice$"):
        check(with_op(plan, 5, last), problem)
    lonely = replace(plan.ops[0], send=None)
    with pytest.raises(PlanError, match=r"^operation 0, Pass.*receive of kv#1 meets no send, on rank 0 and all others"):
        check(replace(plan, ops=(lonely, *plan.ops[1:])), problem)


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
    check(with_op(plan, 1, plan.ops[0]), problem)


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
    q, kv, o = (Chunk(tensor, 0, ring) for tensor in ("q", "kv", "o"))
    return steps.plan("forward", n, (q, kv), (o,)), small_problem(n, "contiguous", causal=False)


def straight_home(n: int) -> list[Op]:
    """Every Q goes everywhere, and each partial output straight to its owner, by one hop of its own length."""
    ring = Group(1, n)
    q, kv, o = (Chunk(tensor, 0, ring) for tensor in ("q", "kv", "o"))
    ops: list[Op] = [Attend(q, kv, o)]
    for u in range(1, n):
        ops += [receive_next(q, u - 1, "q"), Attend(q.at(u), kv, o.at(u))]
        ops += [Pass("o", o.at(u), o.arriving(), ring, shift=u), Fold(o.arriving(), o)]
    return ops


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_other_ways_to_reduce_are_accepted(n: int) -> None:
    check(*plan_of(n, *straight_home(n)))


def test_a_partial_must_be_folded_before_the_next_arrives_over_it() -> None:
    ops = straight_home(3)
    del ops[4]
    with pytest.raises(PlanError, match=r"^operation 6, Pass.*o#0 arriving is received over one that was not folded"):
        check(*plan_of(3, *ops))


def test_a_block_computed_on_two_ranks_is_refused_or_found_unused() -> None:
    ring = Group(1, 2)
    q, kv, o = (Chunk(tensor, 0, ring) for tensor in ("q", "kv", "o"))
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
    ring = Group(1, 3)
    q, o = Chunk("q", 0, ring), Chunk("o", 0, ring)
    with pytest.raises(PlanError, match="sends q where the peer receives kv"):
        check(with_op(plan, 0, replace(plan.ops[0], send=q)), problem)
    into_arriving = Pass("kv", send=q, recv=q.at(1).arriving(), group=ring, shift=-1)
    with pytest.raises(PlanError, match="q#1 arriving is a buffer for arriving partials"):
        check(with_op(plan, 0, into_arriving), problem)
    with pytest.raises(PlanError, match="its output o#0 was never computed, or sent on"):
        check(with_op(plan, 5, receive_next(o, 0, "o")), problem)


@pytest.mark.parametrize(
    ("phase", "changes"),
    [("forward", {"q": "kv"}), ("forward", {"kv": "q"}), ("forward", {"o": "dq"}), ("backward", {"odoq": "kv"})],
)
def test_blocks_of_the_wrong_tensors_are_refused(phase: str, changes: dict[str, str]) -> None:
    """Such a block would be attention of K to K, or leave its output where nobody looks for it."""
    problem = small_problem(1)
    plan = build("ring", {}).plan(problem, phase, COMPUTE_BOUND)
    (block,) = plan.ops
    wrong = replace(block, **{field: Chunk(tensor, 0, Group(1, 1)) for field, tensor in changes.items()})
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
