"""The proof accepts every plan of every method, and refuses each way of breaking one."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sp_bench.check import check, check_all
from sp_bench.methods import REGISTRY, build
from sp_bench.methods.tokenring import TokenRing
from sp_bench.plan import (
    COMPUTE_BOUND,
    DOWN,
    FIELDS,
    LAYOUTS,
    PHASES,
    UP,
    AllToAll,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    Exchange,
    Fold,
    Grid,
    Group,
    Op,
    Part,
    Pass,
    Plan,
    PlanError,
    Problem,
    Steps,
    Transfer,
    dataflow,
    divisors,
    part_sent,
    receive_next,
)
from tests.problems import Having, Planned, all_methods, plans, small_problem, splittable_problem

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


@pytest.mark.parametrize(("n", "tiles"), [(64, 7), (256, 9)])
def test_many_ranks(n: int, tiles: int) -> None:
    """All tiles of mesh, and all others."""
    started, problem, proven = time.perf_counter(), splittable_problem(n), Counter()
    for method in all_methods(problem):
        check_all({phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}, method.dealt(problem))
        proven[method.name] += 1
    assert set(proven) == set(REGISTRY) - {"reference"}
    assert proven["mesh"] == tiles and proven["ring"] == 1
    print(f"{2 * proven.total()} plans of {n} ranks: {time.perf_counter() - started:.2f} s")


# Plans that are broken. A mutation takes a right plan and spoils one thing that changes what it means.


@dataclass(frozen=True)
class Broken:
    """A spoiled plan, and the index of the operation at which it goes wrong, where that is certain."""

    plan: Plan
    culprit: int | None = None


Mutation = Callable[[st.DrawFn, Plan], Broken]


class Spoiling(NamedTuple):
    """A mutation, and the operation that it needs where not every plan has one."""

    mutate: Mutation
    having: Having | None


MUTATIONS: dict[str, Spoiling] = {}


def mutation(having: Having | None = None) -> Callable[[Mutation], Mutation]:
    def register(function: Mutation) -> Mutation:
        MUTATIONS[function.__name__] = Spoiling(function, having)
        return function

    return register


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


def is_exchange(op: Op) -> bool:
    return isinstance(op, Pass) and isinstance(op.group, Exchange)


def is_all_to_all(op: Op) -> bool:
    return isinstance(op, AllToAll)


def is_deal_back(op: Op) -> bool:
    return isinstance(op, AllToAll) and not op.to_heads


def is_bundle(op: Op) -> bool:
    return isinstance(op, Bundle)


def is_of_a_slice(op: Op) -> bool:
    return any(chunk.heads for chunk in op.reads)


EXCHANGE = Having(is_exchange, ("startrail",))
DEAL, DEAL_BACK, BUNDLE = (Having(op, ("ulysses", "usp")) for op in (is_all_to_all, is_deal_back, is_bundle))
SLICE = Having(is_of_a_slice, ("all_gather",))


def arrival(plan: Plan, chunk: Chunk) -> int:
    """The first operation that brings a chunk or puts it together; -1 for an input."""
    return next((index for index, op in plan if isinstance(op, Transfer | Bundle) and chunk in op.writes), -1)


def brings_news(plan: Plan, index: int) -> bool:
    """Whether a transfer brings something that the rank doesn't have from an earlier time round the ring."""
    op = plan.ops[index]
    return is_reduce(op) or (isinstance(op, Transfer) and arrival(plan, op.writes[0]) == index)


def departure(plan: Plan, chunk: Chunk) -> int:
    """The last transfer that sends a chunk; -1 for none. What is added to a partial after it is lost."""
    return max((index for index, op in plan if isinstance(op, Transfer) and op.send == chunk), default=-1)


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


@mutation()
def drop_block(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_block)))


@mutation()
def double_block(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_block)
    again = draw(st.integers(index + 1, len(plan.ops)))
    # If the first one's result left in between, the second may look innocent until it is folded.
    left = any(isinstance(op, Transfer) and op.send in plan.ops[index].writes for op in plan.ops[index:again])
    return Broken(with_op(plan, again, plan.ops[index]), culprit=None if left else again)


@mutation()
def block_before_its_receive(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, lambda op: is_block(op) and any(arrival(plan, chunk) >= 0 for chunk in op.reads))
    last = max(arrival(plan, chunk) for chunk in plan.ops[index].reads)
    to = draw(st.integers(0, last))
    return Broken(moved(plan, index, to), culprit=to)


@mutation()
def block_after_its_result_left(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick_index(draw, plan, lambda i: is_block(plan.ops[i]) and bool(departs_later(plan, i)))
    to = draw(st.integers(min(departs_later(plan, index)), len(plan.ops) - 1))
    return Broken(moved(plan, index, to))


@mutation()
def fold_after_its_result_left(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick_index(draw, plan, lambda i: is_fold(plan.ops[i]) and bool(departs_later(plan, i)))
    to = draw(st.integers(min(departs_later(plan, index)), len(plan.ops) - 1))
    return Broken(moved(plan, index, to))


@mutation()
def drop_transfer(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick_index(draw, plan, lambda i: brings_news(plan, i))))


@mutation()
def receive_without_send(draw: st.DrawFn, plan: Plan) -> Broken:
    return with_changed(plan, pick(draw, plan, is_pass), send=None)


@mutation()
def send_without_receive(draw: st.DrawFn, plan: Plan) -> Broken:
    return if_in_order(with_changed(plan, pick(draw, plan, is_pass), recv=None))


@mutation()
def change_shift(draw: st.DrawFn, plan: Plan) -> Broken:
    index, op = pick_pass(draw, plan)
    size = 2 if isinstance(op.group, Exchange) else op.group.size
    return with_changed(plan, index, shift=op.shift + draw(st.integers(1, size - 1)))


@mutation()
def change_group(draw: st.DrawFn, plan: Plan) -> Broken:
    """A Q chunk travels along the KV group, or any chunk along a group that is no one's."""
    index, op = pick_pass(draw, plan)
    return with_changed(plan, index, group=draw(st.sampled_from(with_other_peers(plan, op, groups_of(plan.n)))))


def groups_of(n: int) -> list[Group]:
    return [Group(*sides) for d in divisors(n) for sides in product([d], divisors(n // d), (UP, DOWN))]


def with_other_peers(plan: Plan, op: Pass, groups: Sequence[Group | Exchange]) -> list[Group | Exchange]:
    """Those in which some rank would receive from another than now."""
    ranks = np.arange(plan.n)
    found = [group for group in groups if (replace(op, group=group).source(ranks) != op.source(ranks)).any()]
    assume(found)
    return found


@mutation(EXCHANGE)
def exchange_other_digits(draw: st.DrawFn, plan: Plan) -> Broken:
    """Or none: along a group instead."""
    index = pick(draw, plan, is_exchange)
    op = plan.ops[index]
    assert isinstance(op, Pass)
    digits = product(groups_of(plan.n), repeat=2)
    others = [Exchange(low, high) for low, high in digits if low.size == high.size and low.span <= high.stride]
    groups = with_other_peers(plan, op, [*groups_of(plan.n), *others])
    return with_changed(plan, index, group=draw(st.sampled_from(groups)))


@mutation(EXCHANGE)
def exchange_what_are_no_two_digits(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_exchange)
    digits = product(groups_of(plan.n), repeat=2)
    none = [Exchange(low, high) for low, high in digits if low.size != high.size or low.span > high.stride]
    return with_changed(plan, index, group=draw(st.sampled_from(none)))


@mutation(EXCHANGE)
def exchange_of_another_s_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    """What arrives belongs to the partner, and is taken for the rank's own."""
    index = pick(draw, plan, is_exchange)
    name, chunk = draw(st.sampled_from([(name, getattr(plan.ops[index], name)) for name in ("send", "recv")]))
    assume(isinstance(chunk.home, Grid))
    without = chunk._replace(home=chunk.home._replace(exchange=None))
    return if_in_order(with_changed(plan, index, **{name: without}))


@mutation(DEAL)
def deal_in_another_group(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_all_to_all)
    op = plan.ops[index]
    assert isinstance(op, AllToAll)
    return with_changed(plan, index, group=draw(st.sampled_from([g for g in groups_of(plan.n) if g != op.group])))


@mutation(DEAL)
def deal_another_tensor(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_all_to_all)
    name = draw(st.sampled_from(["send", "recv"]))
    chunk = getattr(plan.ops[index], name)
    tensor = draw(st.sampled_from([tensor for tensor in FIELDS if tensor != chunk.tensor]))
    return if_in_order(with_changed(plan, index, **{name: chunk._replace(tensor=tensor)}))


@mutation(DEAL)
def deal_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_all_to_all)
    name = draw(st.sampled_from(["send", "recv"]))
    return if_in_order(with_changed(plan, index, **{name: other_index(draw, getattr(plan.ops[index], name))}))


@mutation(DEAL_BACK)
def deal_back_twice(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_deal_back)
    again = draw(st.integers(index + 1, len(plan.ops)))
    return Broken(with_op(plan, again, plan.ops[index]), culprit=again)


@mutation(DEAL_BACK)
def deal_back_early(draw: st.DrawFn, plan: Plan) -> Broken:
    """Before the last block is folded into what it deals."""
    index = pick(draw, plan, is_deal_back)
    last = max(i for i, op in plan if i < index and plan.ops[index].reads[0] in op.writes)
    return Broken(moved(plan, index, draw(st.integers(0, last))))


@mutation(BUNDLE)
def bundle_other_parts(draw: st.DrawFn, plan: Plan) -> Broken:
    """One is missing, is there twice, or is another tensor."""
    index = pick(draw, plan, is_bundle)
    parts = plan.ops[index].reads
    at = draw(st.integers(0, len(parts) - 1))
    for_it = draw(st.sampled_from([(), (parts[at],) * 2, *((other,) for other in parts if other != parts[at])]))
    return with_changed(plan, index, parts=(*parts[:at], *for_it, *parts[at + 1 :]))


@mutation(BUNDLE)
def bundle_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_bundle)
    op = plan.ops[index]
    assert isinstance(op, Bundle)
    into, *parts = (other_index(draw, chunk) for chunk in (op.into, *op.parts))
    at = draw(st.integers(-1, len(parts) - 1))
    if at < 0:
        return if_in_order(with_changed(plan, index, into=into))
    return with_changed(plan, index, parts=(*op.parts[:at], parts[at], *op.parts[at + 1 :]))


@mutation(BUNDLE)
def drop_bundle(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_bundle)))


def slices_of(plan: Plan) -> int:
    """In how many slices the heads are taken."""
    return len({chunk.heads for chunk in plan.inputs})


@mutation(SLICE)
def block_of_another_slice(draw: st.DrawFn, plan: Plan) -> Broken:
    """One operand of a block has other heads, or all have: then these are computed twice."""
    index = pick(draw, plan, is_block)
    op = plan.ops[index]
    names = [field.name for field in fields(op)]
    heads = draw(st.sampled_from([heads for heads in range(slices_of(plan) + 1) if heads != op.reads[0].heads]))
    changed = draw(st.sampled_from([[name] for name in names] + [names]))
    broken = with_changed(plan, index, **{name: getattr(op, name).slice(heads) for name in changed})
    return if_in_order(broken) if len(changed) == 1 else replace(broken, culprit=None)


@mutation(SLICE)
def pass_another_slice(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_pass)
    name = draw(st.sampled_from(["send", "recv"]))
    chunk = getattr(plan.ops[index], name)
    heads = draw(st.sampled_from([heads for heads in range(slices_of(plan) + 1) if heads != chunk.heads]))
    return if_in_order(with_changed(plan, index, **{name: chunk._replace(heads=heads)}))


@mutation(SLICE)
def change_a_slice_at_an_end(draw: st.DrawFn, plan: Plan) -> Broken:
    """A slice of the heads is missing from inputs or outputs, is there twice, or is one that there is not."""
    name = draw(st.sampled_from(["inputs", "outputs"]))
    chunks = getattr(plan, name)
    at = draw(st.integers(0, len(chunks) - 1))
    for_it = draw(st.sampled_from([(), (chunks[at],) * 2, (chunks[at].slice(len(chunks)),), (chunks[at - 1],)]))
    return Broken(replace(plan, **{name: (*chunks[:at], *for_it, *chunks[at + 1 :])}))


@mutation()
def send_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_pass)
    return if_in_order(with_changed(plan, index, send=other_index(draw, plan.ops[index].reads[0])))


@mutation()
def receive_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_pass)
    return if_in_order(with_changed(plan, index, recv=other_index(draw, plan.ops[index].writes[0])))


@mutation()
def send_partial_as_input(draw: st.DrawFn, plan: Plan) -> Broken:
    """A partial is received where only inputs are, and would never be folded."""
    index = pick(draw, plan, is_reduce)
    held = plan.ops[index].writes[0]._replace(arrival=0)
    return replace(with_changed(plan, index, recv=held), culprit=None)


@mutation()
def send_partial_twice(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_reduce)
    again = draw(st.integers(index + 1, len(plan.ops)))
    sent = plan.ops[index].reads[0]
    once = sum(is_reduce(op) and op.reads[0] == sent for op in plan.ops) == 1
    return Broken(with_op(plan, again, plan.ops[index]), culprit=again if once else None)


@mutation()
def drop_reduce_hop(draw: st.DrawFn, plan: Plan) -> Broken:
    """A Pass of partials together with the Fold of what it brings."""
    hop = pick(draw, plan, is_reduce)
    folds = [index for index, op in plan if isinstance(op, Fold) and op.part == plan.ops[hop].writes[0]]
    return Broken(without(plan, hop, *folds))


@mutation()
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


@mutation()
def retarget_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    return if_in_order(with_changed(plan, index, into=other_index(draw, plan.ops[index].writes[0])))


@mutation()
def fold_another_part(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    return with_changed(plan, index, part=other_index(draw, plan.ops[index].reads[0]))


@mutation()
def drop_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_fold)))


@mutation()
def double_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_fold)
    again = draw(st.integers(index + 1, len(plan.ops)))
    part = plan.ops[index].reads[0]
    once = sum(is_fold(op) and op.reads[0] == part for op in plan.ops) == 1
    return Broken(with_op(plan, again, plan.ops[index]), culprit=again if once else None)


@mutation()
def swap_q(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_block)
    op = plan.ops[index]
    field = "q" if isinstance(op, Attend) else "odoq"
    return with_changed(plan, index, **{field: other_index(draw, getattr(op, field))})


@mutation()
def swap_kv(draw: st.DrawFn, plan: Plan) -> Broken:
    # Forward, the block that this one has become is named if it comes later.
    index = pick(draw, plan, is_block)
    return replace(with_changed(plan, index, kv=other_index(draw, plan.ops[index].reads[1])), culprit=None)


@mutation()
def retarget_block(draw: st.DrawFn, plan: Plan) -> Broken:
    """Its output, or one of its gradients, goes to another chunk's accumulator."""
    index = pick(draw, plan, is_block)
    op = plan.ops[index]
    field = "o" if isinstance(op, Attend) else draw(st.sampled_from(["dq", "dkv"]))
    return if_in_order(with_changed(plan, index, **{field: other_index(draw, getattr(op, field))}))


@mutation()
def forget_input(draw: st.DrawFn, plan: Plan) -> Broken:
    lost = draw(st.integers(0, len(plan.inputs) - 1))
    return Broken(replace(plan, inputs=(*plan.inputs[:lost], *plan.inputs[lost + 1 :])))


@mutation()
def misplace_input(draw: st.DrawFn, plan: Plan) -> Broken:
    """The plan takes its rank's own tokens for those of another."""
    lost = draw(st.integers(0, len(plan.inputs) - 1))
    wrong = other_index(draw, plan.inputs[lost])
    return Broken(replace(plan, inputs=(*plan.inputs[:lost], wrong, *plan.inputs[lost + 1 :])))


@mutation()
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
    mutate, having = MUTATIONS[name]
    planned = data.draw(plans(min_n=2, max_n=9, having=having))
    check(*planned)
    broken = data.draw(st.composite(lambda draw: mutate(draw, planned.plan))())
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
    with pytest.raises(PlanError, match="^the end of the plan: o#0 of rank 2 lacks its block with chunk 0$"):
        check(replace(plan, ops=tuple(rest)), problem)
    with pytest.raises(PlanError, match=r"^operation 5, Attend q#0 x kv#2 into o#0: on rank 0, .*chunk 1.* twice$"):
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
    ring = plan.ops[0].group
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


# Heads that are split, and chunks that are kept.


def ulysses(n: int, phase: str = "forward") -> tuple[Plan, Problem]:
    problem = splittable_problem(n, "contiguous")
    method = build("ulysses", {})
    return method.plan(problem, phase, COMPUTE_BOUND), method.dealt(problem)


def usp(phase: str = "forward") -> tuple[Plan, Problem]:
    """Two groups of two ranks."""
    problem = splittable_problem(4, "contiguous", causal=False)
    method = build("usp", {"ulysses": 2})
    return method.plan(problem, phase, COMPUTE_BOUND), method.dealt(problem)


@pytest.mark.parametrize("phase", PHASES)
def test_heads_dealt_twice_are_wasteful_but_right(phase: str) -> None:
    plan, problem = usp(phase)
    for index, op in plan:
        if isinstance(op, AllToAll) and op.to_heads:
            check(with_op(plan, index, op), problem)


@pytest.mark.parametrize("phase", PHASES)
def test_blocks_of_plain_chunks_are_refused_where_heads_are_split(phase: str) -> None:
    """Such a block would compute all heads of a rank's own tokens only, whatever the layout says of its chunk."""
    _, problem = ulysses(4)
    ring = build("ring", {}).plan(splittable_problem(4, "contiguous"), phase, COMPUTE_BOUND)
    with pytest.raises(
        PlanError, match=r"^operation 1, Attend.*: (q|odoq)#0 stands where a held chunk of \w+_h should$"
    ):
        check(ring, problem)


@pytest.mark.parametrize("operand", ["q", "kv", "o"])
def test_a_plain_operand_is_refused_where_heads_are_split(operand: str) -> None:
    plan, problem = ulysses(4)
    broken = with_changed(plan, 2, **{operand: Chunk(operand, 0, Group(1, 4))})
    wanted = f"{operand}#0 stands where a held chunk of {operand}_h should$"
    with pytest.raises(PlanError, match=f"^operation 2, Attend .*: {wanted}|^operation 3, .* reads o_h#0 before"):
        check(broken.plan, problem)


def test_dealing_back_names_what_is_missing() -> None:
    plan, problem = usp()
    *_, last, deal = plan.ops
    early = replace(plan, ops=(*plan.ops[:-2], deal, last))
    with pytest.raises(PlanError, match=r"^the end of the plan: out#0 of rank 2 lacks its block with chunk 0$"):
        check(early, problem)
    with pytest.raises(PlanError, match=r"^operation 6, AllToAll.*: out#0 is there already$"):
        check(with_op(plan, 6, deal), problem)


@pytest.mark.parametrize("name", ["ulysses", "usp"])
def test_what_is_kept_is_what_the_backward_takes(name: str) -> None:
    problem = splittable_problem(4, "contiguous")
    method = build(name, {}).candidates(problem)[-1]
    plans, dealt = {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}, method.dealt(problem)
    forward, backward = plans.values()
    assert [chunk.tensor for chunk in forward.kept] == ["q_h", "kv_h", "o_h"]
    for lost in range(3):
        less = (*forward.kept[:lost], *forward.kept[lost + 1 :])
        forgets = plans | {"forward": replace(forward, kept=less)}
        check(forgets["forward"], dealt)
        with pytest.raises(
            PlanError, match=r"^what the forward keeps is not .* \(forward\) and q_h#0, .* \(backward\)$"
        ):
            check_all(forgets, dealt)
        with pytest.raises(PlanError, match=rf"^operation \d, .* reads {forward.kept[lost]} before"):
            check_all(plans | {"backward": replace(backward, kept=less)}, dealt)
    foreign = (*forward.kept, forward.kept[0].at(1).arriving())
    with pytest.raises(PlanError, match="only a rank's own chunks are kept"):
        check(replace(forward, kept=foreign), dealt)


def test_an_output_that_is_not_complete_is_not_bundled() -> None:
    """A backward that computes O by heads again may have left a block out, or not yet have come to it."""
    plan, problem = ulysses(4, "backward")
    q_h, kv_h, o_h = plan.kept
    again = replace(plan, kept=(q_h, kv_h))
    with pytest.raises(PlanError, match=r"^operation 2, Bundle q_h#0, o_h#0, do_h#0 as odoq_h#0: o_h#0 is not known"):
        check(with_op(again, 1, Attend(q_h, kv_h, o_h)), problem)


def test_only_a_rank_s_own_chunks_are_dealt() -> None:
    """Chunks of the partner, at home as #0, would be taken for those of the rank's own group."""
    plan, problem = usp()
    swap = Exchange(Group(1, 2), Group(2, 2))
    deal = plan.ops[0]
    assert isinstance(deal, AllToAll)
    partners = Chunk("q", 0, Grid(Group(1, 2), Group(2, 2), swap))
    changed = with_changed(with_op(plan, 0, Pass("swap", deal.send, partners, swap, 1)), 1, send=partners)
    with pytest.raises(PlanError, match=r"^operation 1, AllToAll"):
        check(changed.plan, problem)


def in_two_slices(phase: str, other: int) -> tuple[Plan, Problem]:
    """Ulysses of one rank, by slices of the heads; with other = 1, KV or Q by heads is of the other slice."""
    one, ops, slices = Group(1, 1), [], (0, 1)

    def chunk(tensor: str, heads: int) -> Chunk:
        return Chunk(tensor, 0, one, heads=heads)

    def deal(send: str, recv: str, heads: int, sent: int | None = None) -> AllToAll:
        return AllToAll("all-to-all", chunk(send, heads if sent is None else sent), chunk(recv, heads), one)

    for i in slices:
        if phase == "forward":
            ops += [deal("q", "q_h", i), deal("kv", "kv_h", i, sent=i ^ other)]
            ops += [Attend(*(chunk(tensor, i) for tensor in ("q_h", "kv_h", "o_h"))), deal("o_h", "out", i)]
        else:
            parts = chunk("q_h", i ^ other), chunk("o_h", i), chunk("do_h", i)
            block = AttendBackward(*(chunk(tensor, i) for tensor in ("odoq_h", "kv_h", "dq_h", "dkv_h")))
            ops += [deal("do", "do_h", i), Bundle(parts, chunk("odoq_h", i)), block]
            ops += [deal("dq_h", "dq", i), deal("dkv_h", "dkv", i)]
    steps = Steps()
    steps.do(*ops)
    ends = {"forward": (("q", "kv"), ("out",)), "backward": (("do",), ("dq", "dkv"))}[phase]
    inputs, outputs = (tuple(chunk(tensor, i) for tensor in tensors for i in slices) for tensors in ends)
    kept = tuple(chunk(tensor, i) for tensor in ("q_h", "kv_h", "o_h") for i in slices)
    return steps.plan(phase, 1, inputs, outputs, kept), replace(small_problem(1), head_slices=2)


@pytest.mark.parametrize("phase", PHASES)
def test_slices_of_heads_are_dealt_and_bundled_apart(phase: str) -> None:
    check(*in_two_slices(phase, other=0))
    with pytest.raises(PlanError, match=r"^operation 1, (AllToAll|Bundle).*: mixes slices of heads"):
        check(*in_two_slices(phase, other=1))


# Rows that are left behind.


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

    def parts(op: Pass) -> list[Part]:
        return [part_sent(op, problem, rank) for rank in range(n)]

    for index, op in plan:
        if not isinstance(op, Pass) or op.against is None or op.send is None:
            continue
        if is_reduce(op) or op.send.index == 0:
            check(with_changed(plan, index, against=None).plan, problem)
        for u in range(n):
            broken = with_changed(plan, index, against=Chunk("kv", u, Group(1, n)))
            wrong = broken.plan.ops[index]
            assert isinstance(wrong, Pass)
            if not any(p is Part.WHOLE and w is not p for p, w in zip(parts(op), parts(wrong), strict=True)):
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


# What is wrong with a plan is a PlanError, whatever it is.


@pytest.mark.parametrize("case", ["kept twice", "kept and an output", "sent on while kept"])
def test_odd_things_to_keep(case: str) -> None:
    plan, problem = usp()
    (*_, o_h), ring = plan.kept, Group(2, 2)
    wrong = {
        "kept twice": replace(plan, kept=(*plan.kept, o_h)),
        "kept and an output": replace(plan, kept=(*plan.kept, *plan.outputs)),
        "sent on while kept": with_op(plan, len(plan.ops), Pass("o", o_h, o_h.at(1).arriving(), ring, -1)),
    }
    with pytest.raises(PlanError):
        check(wrong[case], problem)


def test_rows_that_were_left_behind_are_not_sent_on() -> None:
    """A trimmed hop makes all further ones trimmed: without `against` whole chunks would be sent."""
    problem = splittable_problem(4, "zigzag")
    plan = build("tokenring", {}).plan(problem, "forward", COMPUTE_BOUND)
    hops = [index for index, op in plan if isinstance(op, Pass) and op.send and op.send.tensor == "q"]
    for hop in hops[1:]:
        broken = with_changed(plan, hop, against=None).plan
        with pytest.raises(PlanError, match=rf"operation {hop}, .*lacks rows that are to be sent"):
            check(broken, problem)


def test_an_exchange_of_digits_that_overlap() -> None:
    """Its ranks would not come in pairs."""
    problem = splittable_problem(6, "contiguous", causal=False)
    plan = build("ring", {}).plan(problem, "forward", COMPUTE_BOUND)
    odd = Exchange(Group(1, 2), Group(3, 2))
    with pytest.raises(PlanError, match="doesn't exchange two digits"):
        check(with_changed(plan, 0, group=odd).plan, problem)


def test_a_backward_needs_the_lse_of_its_forward() -> None:
    """One rank, by heads forward: its `out` has no lse, which the backward of a plain method would need."""
    problem = small_problem(1, "contiguous")
    plans = {
        "forward": build("ulysses", {}).plan(problem, "forward", COMPUTE_BOUND),
        "backward": build("ring", {}).plan(problem, "backward", COMPUTE_BOUND),
    }
    with pytest.raises(PlanError, match="the backward takes odoq, whose lse the forward doesn't leave"):
        check_all(plans, problem)
