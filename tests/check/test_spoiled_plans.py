"""Plans of which one operation, input or output is spoiled are refused, each for what is wrong with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.plan import Attend, Exchange, Fold, Pass, Plan
from sp_bench.plan.ops import Transfer
from tests.support.plan_edits import (
    Broken,
    Mutations,
    arrival,
    brings_news,
    departs_later,
    groups_of,
    if_in_order,
    is_block,
    is_fold,
    is_pass,
    is_reduce,
    moved,
    other_index,
    pick,
    pick_index,
    pick_pass,
    with_changed,
    with_op,
    with_other_peers,
    without,
)

MUTATIONS = Mutations()


@MUTATIONS.add()
def drop_block(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_block)))


@MUTATIONS.add()
def double_block(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_block)
    again = draw(st.integers(index + 1, len(plan.ops)))
    # If the first one's result left in between, the second may look innocent until it is folded.
    left = any(isinstance(op, Transfer) and {*op.reads} & {*plan.ops[index].writes} for op in plan.ops[index:again])
    return Broken(with_op(plan, again, plan.ops[index]), culprit=None if left else again)


@MUTATIONS.add()
def block_before_its_receive(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, lambda op: is_block(op) and any(arrival(plan, chunk) >= 0 for chunk in op.reads))
    last = max(arrival(plan, chunk) for chunk in plan.ops[index].reads)
    to = draw(st.integers(0, last))
    return Broken(moved(plan, index, to), culprit=to)


@MUTATIONS.add()
def block_after_its_result_left(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick_index(draw, plan, lambda i: is_block(plan.ops[i]) and bool(departs_later(plan, i)))
    to = draw(st.integers(min(departs_later(plan, index)), len(plan.ops) - 1))
    return Broken(moved(plan, index, to))


@MUTATIONS.add()
def fold_after_its_result_left(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick_index(draw, plan, lambda i: is_fold(plan.ops[i]) and bool(departs_later(plan, i)))
    to = draw(st.integers(min(departs_later(plan, index)), len(plan.ops) - 1))
    return Broken(moved(plan, index, to))


@MUTATIONS.add()
def drop_transfer(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick_index(draw, plan, lambda i: brings_news(plan, i))))


NOBODYS = 9
"""The number of an arrival that no plan has."""


@MUTATIONS.add()
def receive_what_nobody_has(draw: st.DrawFn, plan: Plan) -> Broken:
    """The sender's chunk is one that nothing has put there: what it sends is anything."""
    index, op = pick_pass(draw, plan)
    return with_changed(plan, index, send=op.send.arriving(NOBODYS))


@MUTATIONS.add()
def send_where_nobody_looks(draw: st.DrawFn, plan: Plan) -> Broken:
    """The receiver's chunk is one that nothing reads: what was sent is lost."""
    index, op = pick_pass(draw, plan)
    return if_in_order(with_changed(plan, index, recv=op.recv.arriving(NOBODYS)))


@MUTATIONS.add()
def change_shift(draw: st.DrawFn, plan: Plan) -> Broken:
    index, op = pick_pass(draw, plan)
    size = 2 if isinstance(op.group, Exchange) else op.group.size
    return with_changed(plan, index, shift=op.shift + draw(st.integers(1, size - 1)))


@MUTATIONS.add()
def change_group(draw: st.DrawFn, plan: Plan) -> Broken:
    """A Q chunk travels along the KV group, or any chunk along a group that is no one's."""
    index, op = pick_pass(draw, plan)
    return with_changed(plan, index, group=draw(st.sampled_from(with_other_peers(plan, op, groups_of(plan.n)))))


@MUTATIONS.add()
def send_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_pass)
    return if_in_order(with_changed(plan, index, send=other_index(draw, plan.ops[index].reads[0])))


@MUTATIONS.add()
def receive_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_pass)
    return if_in_order(with_changed(plan, index, recv=other_index(draw, plan.ops[index].writes[0])))


@MUTATIONS.add()
def send_partial_as_input(draw: st.DrawFn, plan: Plan) -> Broken:
    """A partial is received where only inputs are, and would never be folded."""
    index = pick(draw, plan, is_reduce)
    held = plan.ops[index].writes[0]._replace(arrival=0)
    return replace(with_changed(plan, index, recv=held), culprit=None)


@MUTATIONS.add()
def send_partial_twice(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_reduce)
    again = draw(st.integers(index + 1, len(plan.ops)))
    sent = plan.ops[index].reads[0]
    once = sum(is_reduce(op) and op.reads[0] == sent for op in plan.ops) == 1
    return Broken(with_op(plan, again, plan.ops[index]), culprit=again if once else None)


@MUTATIONS.add()
def drop_reduce_hop(draw: st.DrawFn, plan: Plan) -> Broken:
    """A Pass of partials together with the Fold of what it brings."""
    hop = pick(draw, plan, is_reduce)
    folds = [index for index, op in plan if isinstance(op, Fold) and op.part == plan.ops[hop].writes[0]]
    return Broken(without(plan, hop, *folds))


@MUTATIONS.add()
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


@MUTATIONS.add()
def retarget_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    return if_in_order(with_changed(plan, index, into=other_index(draw, plan.ops[index].writes[0])))


@MUTATIONS.add()
def fold_another_part(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    return with_changed(plan, index, part=other_index(draw, plan.ops[index].reads[0]))


@MUTATIONS.add()
def drop_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_fold)))


@MUTATIONS.add()
def double_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    again = draw(st.integers(index + 1, len(plan.ops)))
    part = plan.ops[index].reads[0]
    once = sum(is_fold(op) and op.reads[0] == part for op in plan.ops) == 1
    return Broken(with_op(plan, again, plan.ops[index]), culprit=again if once else None)


@MUTATIONS.add()
def swap_q(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_block)
    op = plan.ops[index]
    field = "q" if isinstance(op, Attend) else "odoq"
    return with_changed(plan, index, **{field: other_index(draw, getattr(op, field))})


@MUTATIONS.add()
def swap_kv(draw: st.DrawFn, plan: Plan) -> Broken:
    # Forward, the block that this one has become is named if it comes later.
    index = pick(draw, plan, is_block)
    return replace(with_changed(plan, index, kv=other_index(draw, plan.ops[index].reads[1])), culprit=None)


@MUTATIONS.add()
def retarget_block(draw: st.DrawFn, plan: Plan) -> Broken:
    """Its output, or one of its gradients, goes to another chunk's accumulator."""
    index = pick(draw, plan, is_block)
    op = plan.ops[index]
    field = "o" if isinstance(op, Attend) else draw(st.sampled_from(["dq", "dkv"]))
    return if_in_order(with_changed(plan, index, **{field: other_index(draw, getattr(op, field))}))


@MUTATIONS.add()
def forget_input(draw: st.DrawFn, plan: Plan) -> Broken:
    lost = draw(st.integers(0, len(plan.inputs) - 1))
    return Broken(replace(plan, inputs=(*plan.inputs[:lost], *plan.inputs[lost + 1 :])))


@MUTATIONS.add()
def misplace_input(draw: st.DrawFn, plan: Plan) -> Broken:
    """The plan takes its rank's own tokens for those of another."""
    lost = draw(st.integers(0, len(plan.inputs) - 1))
    wrong = other_index(draw, plan.inputs[lost])
    return Broken(replace(plan, inputs=(*plan.inputs[:lost], wrong, *plan.inputs[lost + 1 :])))


@MUTATIONS.add()
def ask_for_another_output(draw: st.DrawFn, plan: Plan) -> Broken:
    lost = draw(st.integers(0, len(plan.outputs) - 1))
    wrong = other_index(draw, plan.outputs[lost])
    return Broken(replace(plan, outputs=(*plan.outputs[:lost], wrong, *plan.outputs[lost + 1 :])))


@pytest.mark.parametrize("name", MUTATIONS)
@given(data=st.data())
def test_spoiled_plans_are_refused(name: str, data: st.DataObject) -> None:
    MUTATIONS.assert_refused(name, data)
