"""The proof accepts every plan of every method, and refuses each way of breaking one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sp_bench.check import check
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
    receive_next,
)
from tests.problems import Planned, all_methods, plans, small_problem

# Plans that are right.


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", range(1, 17))
def test_every_method_and_tile_is_accepted(n: int, layout: str, causal: bool) -> None:
    problem = small_problem(n, layout, causal=causal)
    for method in all_methods(n):
        for phase in PHASES:
            check(method.plan(problem, phase, COMPUTE_BOUND), problem)


@given(plans(max_n=24))
def test_schedules_for_any_costs_are_accepted(planned: Planned) -> None:
    check(*planned)


def test_256_ranks() -> None:
    """All nine tiles and ring."""
    started, problem = time.perf_counter(), small_problem(256)
    methods = all_methods(256)
    assert len(methods) == 10
    for method in methods:
        for phase in PHASES:
            check(method.plan(problem, phase, COMPUTE_BOUND), problem)
    print(f"20 plans of 256 ranks: {time.perf_counter() - started:.2f} s")


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


def with_changed(plan: Plan, index: int, **changes: object) -> Broken:
    """One field of an operation is another; nothing before it is touched, so it must be the one that is named."""
    op = replace(plan.ops[index], **changes)
    return Broken(replace(plan, ops=(*plan.ops[:index], op, *plan.ops[index + 1 :])), culprit=index)


def moved(plan: Plan, index: int, to: int) -> Plan:
    return with_op(without(plan, index), to, plan.ops[index])


def is_block(op: Op) -> bool:
    return isinstance(op, Attend | AttendBackward)


def is_pass(op: Op) -> bool:
    return isinstance(op, Pass)


def is_fold(op: Op) -> bool:
    return isinstance(op, Fold)


def is_arriving(chunk: Chunk) -> bool:
    return chunk == chunk.arriving()


def is_reduce(op: Op) -> bool:
    return isinstance(op, Pass) and is_arriving(op.recv)


def arrival(plan: Plan, chunk: Chunk) -> int:
    """The Pass that brings a chunk; -1 for an input."""
    return next((index for index, op in plan if isinstance(op, Pass) and op.recv == chunk), -1)


def departure(plan: Plan, chunk: Chunk) -> int | None:
    """The Pass that sends a chunk on."""
    return next((index for index, op in plan if isinstance(op, Pass) and op.send == chunk), None)


def other_index(draw: st.DrawFn, chunk: Chunk) -> Chunk:
    """The same buffer of any other local index."""
    assume(chunk.home.size > 1)
    other = chunk.at(chunk.index + draw(st.integers(1, chunk.home.size - 1)))
    return other.arriving() if is_arriving(chunk) else other


@mutation
def drop_block(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_block)))


@mutation
def double_block(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_block)
    again = draw(st.integers(index + 1, len(plan.ops)))
    return Broken(with_op(plan, again, plan.ops[index]), culprit=again)


@mutation
def block_before_its_receive(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, lambda op: is_block(op) and any(arrival(plan, chunk) >= 0 for chunk in op.reads))
    last = max(arrival(plan, chunk) for chunk in plan.ops[index].reads)
    to = draw(st.integers(0, last))
    return Broken(moved(plan, index, to), culprit=to)


@mutation
def block_after_its_result_left(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, lambda op: is_block(op) and any(departure(plan, chunk) is not None for chunk in op.writes))
    left = min(d for chunk in plan.ops[index].writes if (d := departure(plan, chunk)) is not None)
    return Broken(moved(plan, index, draw(st.integers(left, len(plan.ops) - 1))))


@mutation
def fold_after_its_result_left(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, lambda op: isinstance(op, Fold) and departure(plan, op.into) is not None)
    left = departure(plan, plan.ops[index].writes[0])
    assert left is not None
    return Broken(moved(plan, index, draw(st.integers(left, len(plan.ops) - 1))))


@mutation
def drop_pass(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_pass)))


@mutation
def receive_without_send(draw: st.DrawFn, plan: Plan) -> Broken:
    return with_changed(plan, pick(draw, plan, is_pass), send=None)


@mutation
def send_without_receive(draw: st.DrawFn, plan: Plan) -> Broken:
    # What lacks the chunk later is named if it comes first.
    return replace(with_changed(plan, pick(draw, plan, is_pass), recv=None), culprit=None)


@mutation
def change_shift(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_pass)
    size, shift = plan.ops[index].group.size, plan.ops[index].shift
    return with_changed(plan, index, shift=shift + draw(st.integers(1, size - 1)))


@mutation
def change_group(draw: st.DrawFn, plan: Plan) -> Broken:
    """A Q chunk travels along the KV group, or any chunk along a group that is no one's."""
    index = pick(draw, plan, is_pass)
    divisors = [d for d in range(1, plan.n + 1) if plan.n % d == 0]
    groups = {Group(stride, size) for stride in divisors for size in divisors if plan.n % (stride * size) == 0}
    groups = {group for group in groups if group.size > 1} - {plan.ops[index].group}
    assume(groups)
    return with_changed(plan, index, group=draw(st.sampled_from(sorted(groups, key=str))))


@mutation
def send_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_pass)
    return with_changed(plan, index, send=other_index(draw, plan.ops[index].send))


@mutation
def receive_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_pass)
    # Where the rank has that chunk already or never gets the right one, dataflow names that first.
    return replace(with_changed(plan, index, recv=other_index(draw, plan.ops[index].recv)), culprit=None)


@mutation
def send_partial_as_input(draw: st.DrawFn, plan: Plan) -> Broken:
    """A partial is received where only inputs are, and would never be folded."""
    index = pick(draw, plan, is_reduce)
    held = plan.ops[index].recv._replace(is_arriving=plan.ops[index].send.is_arriving)
    return replace(with_changed(plan, index, recv=held), culprit=None)


@mutation
def drop_reduce_hop(draw: st.DrawFn, plan: Plan) -> Broken:
    """A Pass of partials together with the Fold of what it brings."""
    hop = pick(draw, plan, is_reduce)
    folds = [index for index, op in plan if isinstance(op, Fold) and op.part == plan.ops[hop].recv]
    return Broken(without(plan, hop, *folds))


@mutation
def swap_hops(draw: st.DrawFn, plan: Plan) -> Broken:
    """Two hops of the same tensor, in the other order."""
    first = pick(draw, plan, is_pass)
    later = [
        i for i, op in plan if i > first and isinstance(op, Pass) and op.send.tensor == plan.ops[first].send.tensor
    ]
    assume(later)
    second = draw(st.sampled_from(later))
    ops = list(plan.ops)
    ops[first], ops[second] = ops[second], ops[first]
    return Broken(replace(plan, ops=tuple(ops)))


@mutation
def retarget_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    return with_changed(plan, index, into=other_index(draw, plan.ops[index].into))


@mutation
def fold_another_part(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    return with_changed(plan, index, part=other_index(draw, plan.ops[index].part))


@mutation
def drop_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_fold)))


@mutation
def double_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    again = draw(st.integers(index + 1, len(plan.ops)))
    return Broken(with_op(plan, again, plan.ops[index]), culprit=again)


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
    return replace(with_changed(plan, index, kv=other_index(draw, plan.ops[index].kv)), culprit=None)


@mutation
def retarget_block(draw: st.DrawFn, plan: Plan) -> Broken:
    """Its output, or one of its gradients, goes to another chunk's accumulator."""
    # What then has no block at all is named first.
    index = pick(draw, plan, is_block)
    op = plan.ops[index]
    field = "o" if isinstance(op, Attend) else draw(st.sampled_from(["dq", "dkv"]))
    return replace(with_changed(plan, index, **{field: other_index(draw, getattr(op, field))}), culprit=None)


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
        assert re.match(r"(the end of the plan: |the plan never computes |the plan's input: ).*\w+#\d+", message)


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
    return all_methods(3)[0].plan(problem, "forward", COMPUTE_BOUND), problem


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


@pytest.mark.xfail(strict=True, raises=IndexError, reason="check takes for granted that groups tile the ranks")
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_groups_that_do_not_tile_the_ranks_are_refused(n: int) -> None:
    with pytest.raises(PlanError):
        check(ring_of_three()[0], small_problem(n, "contiguous", causal=False))


def test_kinds_of_chunks_are_not_mixed_up() -> None:
    plan, problem = ring_of_three()
    ring = Group(1, 3)
    q, o = Chunk("q", 0, ring), Chunk("o", 0, ring)
    with pytest.raises(PlanError, match="sends q where the peer receives kv"):
        check(with_op(plan, 0, replace(plan.ops[0], send=q)), problem)
    into_arriving = Pass("kv", send=q, recv=q.at(1).arriving(), group=ring, shift=-1)
    with pytest.raises(PlanError, match="q#1 arriving is a buffer for arriving partials"):
        check(with_op(plan, 0, into_arriving), problem)
    with pytest.raises(PlanError, match=r"operation 5, Pass.*o#1 is not a buffer for arriving partials"):
        check(with_op(plan, 5, receive_next(o, 0, "o")), problem)


@pytest.mark.xfail(strict=True, reason="check compares which tokens a chunk holds, not which tensor it is")
@pytest.mark.parametrize(
    ("phase", "changes"),
    [("forward", {"q": "kv"}), ("forward", {"kv": "q"}), ("forward", {"o": "dq"}), ("backward", {"odoq": "kv"})],
)
def test_blocks_of_the_wrong_tensors_are_refused(phase: str, changes: dict[str, str]) -> None:
    """Such a block would be attention of K to K, or leave its output where nobody looks for it."""
    problem = small_problem(1)
    plan = all_methods(1)[0].plan(problem, phase, COMPUTE_BOUND)
    (block,) = plan.ops
    wrong = replace(block, **{field: Chunk(tensor, 0, Group(1, 1)) for field, tensor in changes.items()})
    with pytest.raises(PlanError, match="operation 0"):
        check(replace(plan, ops=(wrong,), outputs=wrong.writes), problem)
