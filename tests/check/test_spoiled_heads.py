"""Plans that exchange, bundle or slice heads are refused where that is spoiled."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sp_bench.plan import AllToAll, Bundle, Exchange, Fold, Grid, Op, Pass, Plan
from sp_bench.plan.ops import AllGather, ReduceScatter
from sp_bench.plan.tensors import TENSORS
from tests.support.plan_edits import (
    Broken,
    Mutations,
    groups_of,
    if_in_order,
    is_block,
    is_pass,
    moved,
    other_index,
    pick,
    with_changed,
    with_op,
    with_other_peers,
    without,
)
from tests.support.problems import Having

MUTATIONS = Mutations()


def is_exchange(op: Op) -> bool:
    return isinstance(op, Pass) and isinstance(op.group, Exchange)


def is_all_to_all(op: Op) -> bool:
    return isinstance(op, AllToAll)


def is_back_to_tokens(op: Op) -> bool:
    return isinstance(op, AllToAll) and not op.to_heads


def is_bundle(op: Op) -> bool:
    return isinstance(op, Bundle)


def is_of_a_slice(op: Op) -> bool:
    return any(chunk.heads for chunk in op.reads)


def is_gather(op: Op) -> bool:
    return isinstance(op, AllGather)


def is_scatter(op: Op) -> bool:
    return isinstance(op, ReduceScatter)


GATHER, SCATTER = (Having(op, ("all_gather", "startrail")) for op in (is_gather, is_scatter))
EXCHANGE = Having(is_exchange, ("startrail",))
TO_HEADS, TO_TOKENS, BUNDLE = (Having(op, ("ulysses", "usp")) for op in (is_all_to_all, is_back_to_tokens, is_bundle))
SLICE = Having(is_of_a_slice, ("all_gather",))
SLICE_PASSED = Having(lambda op: is_pass(op) and is_of_a_slice(op), ("all_gather",))


@MUTATIONS.add(EXCHANGE)
def exchange_other_digits(draw: st.DrawFn, plan: Plan) -> Broken:
    """Or none: along a group instead."""
    index = pick(draw, plan, is_exchange)
    op = plan.ops[index]
    assert isinstance(op, Pass)
    digits = product(groups_of(plan.n), repeat=2)
    others = [Exchange(low, high) for low, high in digits if low.size == high.size and low.span <= high.stride]
    groups = with_other_peers(plan, op, [*groups_of(plan.n), *others])
    return with_changed(plan, index, group=draw(st.sampled_from(groups)))


@MUTATIONS.add(EXCHANGE)
def exchange_what_are_no_two_digits(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_exchange)
    digits = product(groups_of(plan.n), repeat=2)
    none = [Exchange(low, high) for low, high in digits if low.size != high.size or low.span > high.stride]
    return with_changed(plan, index, group=draw(st.sampled_from(none)))


@MUTATIONS.add(EXCHANGE)
def exchange_of_another_s_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    """Arrivals belong to the partner, and are taken for the rank's own."""
    index = pick(draw, plan, is_exchange)
    name, chunk = draw(st.sampled_from([(name, getattr(plan.ops[index], name)) for name in ("send", "recv")]))
    assume(isinstance(chunk.home, Grid))
    without = chunk._replace(home=chunk.home._replace(exchange=None))
    return if_in_order(with_changed(plan, index, **{name: without}))


@MUTATIONS.add(GATHER)
def gather_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    """Another rank's, or one of a group that numbers its ranks otherwise."""
    index = pick(draw, plan, is_gather)
    op = plan.ops[index]
    assert isinstance(op, AllGather)
    homes = [op.own._replace(home=group) for group in groups_of(plan.n) if group != op.own.home]
    return if_in_order(with_changed(plan, index, own=draw(st.sampled_from([op.own.at(1), *homes]))))


@MUTATIONS.add(GATHER)
def gather_what_is_gathered_elsewhere(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_gather)))


@MUTATIONS.add(SCATTER)
def reduce_nothing(draw: st.DrawFn, plan: Plan) -> Broken:
    """With the Fold of what it brings."""
    index = pick(draw, plan, is_scatter)
    folds = [i for i, op in plan if isinstance(op, Fold) and op.part == plan.ops[index].writes[0]]
    return Broken(without(plan, index, *folds))


@MUTATIONS.add(SCATTER)
def reduce_without_a_fold(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_scatter)
    fold = next(i for i, op in plan if i > index and isinstance(op, Fold) and op.part == plan.ops[index].writes[0])
    return Broken(without(plan, fold))


@MUTATIONS.add(SCATTER)
def reduce_too_early(draw: st.DrawFn, plan: Plan) -> Broken:
    """Before the last block that adds to what is sent."""
    index = pick(draw, plan, is_scatter)
    sent = {*plan.ops[index].reads}
    last = max(i for i, op in plan if i < index and {*op.writes} & sent)
    return Broken(moved(plan, index, last))


@MUTATIONS.add(TO_HEADS)
def all_to_all_in_another_group(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_all_to_all)
    op = plan.ops[index]
    assert isinstance(op, AllToAll)
    return with_changed(plan, index, group=draw(st.sampled_from([g for g in groups_of(plan.n) if g != op.group])))


@MUTATIONS.add(TO_HEADS)
def all_to_all_another_tensor(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_all_to_all)
    name = draw(st.sampled_from(["send", "recv"]))
    chunk = getattr(plan.ops[index], name)
    tensor = draw(st.sampled_from([tensor for tensor in TENSORS.values() if tensor != chunk.tensor]))
    return if_in_order(with_changed(plan, index, **{name: chunk._replace(tensor=tensor)}))


@MUTATIONS.add(TO_HEADS)
def all_to_all_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_all_to_all)
    name = draw(st.sampled_from(["send", "recv"]))
    return if_in_order(with_changed(plan, index, **{name: other_index(draw, getattr(plan.ops[index], name))}))


@MUTATIONS.add(TO_TOKENS)
def all_to_all_back_twice(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_back_to_tokens)
    again = draw(st.integers(index + 1, len(plan.ops)))
    return Broken(with_op(plan, again, plan.ops[index]), culprit=again)


@MUTATIONS.add(TO_TOKENS)
def all_to_all_back_early(draw: st.DrawFn, plan: Plan) -> Broken:
    """Before the last block is folded into what it exchanges."""
    index = pick(draw, plan, is_back_to_tokens)
    last = max(i for i, op in plan if i < index and plan.ops[index].reads[0] in op.writes)
    return Broken(moved(plan, index, draw(st.integers(0, last))))


@MUTATIONS.add(BUNDLE)
def bundle_other_parts(draw: st.DrawFn, plan: Plan) -> Broken:
    """One is missing, is there twice, or is another tensor."""
    index = pick(draw, plan, is_bundle)
    parts = plan.ops[index].reads
    at = draw(st.integers(0, len(parts) - 1))
    for_it = draw(st.sampled_from([(), (parts[at],) * 2, *((other,) for other in parts if other != parts[at])]))
    return with_changed(plan, index, parts=(*parts[:at], *for_it, *parts[at + 1 :]))


@MUTATIONS.add(BUNDLE)
def bundle_another_chunk(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_bundle)
    op = plan.ops[index]
    assert isinstance(op, Bundle)
    into, *parts = (other_index(draw, chunk) for chunk in (op.into, *op.parts))
    at = draw(st.integers(-1, len(parts) - 1))
    if at < 0:
        return if_in_order(with_changed(plan, index, into=into))
    return with_changed(plan, index, parts=(*op.parts[:at], parts[at], *op.parts[at + 1 :]))


@MUTATIONS.add(BUNDLE)
def drop_bundle(draw: st.DrawFn, plan: Plan) -> Broken:
    return Broken(without(plan, pick(draw, plan, is_bundle)))


def slices_of(plan: Plan) -> int:
    """In how many slices the heads are taken."""
    return len({chunk.heads for chunk in plan.inputs})


@MUTATIONS.add(SLICE)
def block_of_another_slice(draw: st.DrawFn, plan: Plan) -> Broken:
    """One operand of a block has other heads, or all have: then these are computed twice."""
    index = pick(draw, plan, is_block)
    op = plan.ops[index]
    names = [field.name for field in fields(op)]
    heads = draw(st.sampled_from([heads for heads in range(slices_of(plan) + 1) if heads != op.reads[0].heads]))
    changed = draw(st.sampled_from([[name] for name in names] + [names]))
    broken = with_changed(plan, index, **{name: getattr(op, name).slice(heads) for name in changed})
    return if_in_order(broken) if len(changed) == 1 else replace(broken, culprit=None)


@MUTATIONS.add(SLICE_PASSED)
def pass_another_slice(draw: st.DrawFn, plan: Plan) -> Broken:
    index = pick(draw, plan, is_pass)
    name = draw(st.sampled_from(["send", "recv"]))
    chunk = getattr(plan.ops[index], name)
    heads = draw(st.sampled_from([heads for heads in range(slices_of(plan) + 1) if heads != chunk.heads]))
    return if_in_order(with_changed(plan, index, **{name: chunk._replace(heads=heads)}))


@MUTATIONS.add(SLICE)
def change_a_slice_at_an_end(draw: st.DrawFn, plan: Plan) -> Broken:
    """A slice of the heads is missing from inputs or outputs, is there twice, or is one that there is not."""
    name = draw(st.sampled_from(["inputs", "outputs"]))
    chunks = getattr(plan, name)
    at = draw(st.integers(0, len(chunks) - 1))
    for_it = draw(st.sampled_from([(), (chunks[at],) * 2, (chunks[at].slice(len(chunks)),), (chunks[at - 1],)]))
    return Broken(replace(plan, **{name: (*chunks[:at], *for_it, *chunks[at + 1 :])}))


@pytest.mark.parametrize("name", MUTATIONS)
@given(data=st.data())
def test_spoiled_heads_are_refused(name: str, data: st.DataObject) -> None:
    MUTATIONS.assert_refused(name, data)
