"""Right plans made wrong: edits of plans, what to edit, and what must be said of the result."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from sp_bench.check import check
from sp_bench.methods import build
from sp_bench.plan import (
    DOWN,
    UP,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    Exchange,
    Fold,
    Group,
    Op,
    Pass,
    Plan,
    Problem,
    divisors,
)
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.dataflow import dataflow
from sp_bench.plan.ops import PlanError, Transfer
from tests.support.problems import Having, plans, small_problem


@dataclass(frozen=True)
class Broken:
    """A spoiled plan, and the index of the operation at which it goes wrong, where that is certain."""

    plan: Plan
    culprit: int | None = None


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
    """The first operation that brings a chunk or puts it together; -1 for an input."""
    return next((index for index, op in plan if isinstance(op, Transfer | Bundle) and chunk in op.writes), -1)


def brings_news(plan: Plan, index: int) -> bool:
    """Whether a transfer brings something that the rank doesn't have from an earlier time round the ring."""
    op = plan.ops[index]
    return is_reduce(op) or (isinstance(op, Transfer) and arrival(plan, op.writes[0]) == index)


def departure(plan: Plan, chunk: Chunk) -> int:
    """The last transfer that sends a chunk; -1 for none. What is added to a partial after it is lost."""
    return max((index for index, op in plan if isinstance(op, Transfer) and chunk in op.reads), default=-1)


def departs_later(plan: Plan, index: int) -> list[int]:
    """For the partials that an operation adds to: the last departure, where that is still to come."""
    return [left for chunk in plan.ops[index].writes if (left := departure(plan, chunk)) > index]


def pick(draw: st.DrawFn, plan: Plan, wanted: Callable[[Op], bool]) -> int:
    """The index of any operation of that sort; plans without one are left out."""
    found = [index for index, op in plan if wanted(op)]
    assume(found)
    return draw(st.sampled_from(found))


def pick_index(draw: st.DrawFn, plan: Plan, wanted: Callable[[int], bool]) -> int:
    """As pick, by the index of the operation."""
    found = [index for index in range(len(plan.ops)) if wanted(index)]
    assume(found)
    return draw(st.sampled_from(found))


def pick_pass(draw: st.DrawFn, plan: Plan) -> tuple[int, Pass]:
    index = pick(draw, plan, is_pass)
    op = plan.ops[index]
    assert isinstance(op, Pass)
    return index, op


def other_index(draw: st.DrawFn, chunk: Chunk) -> Chunk:
    """The same buffer of any other local index."""
    assume(chunk.home.size > 1)
    other = chunk.at(chunk.index + draw(st.integers(1, chunk.home.size - 1)))
    return other.arriving(chunk.arrival) if chunk.is_arriving else other


def groups_of(n: int) -> list[Group]:
    return [Group(*sides) for d in divisors(n) for sides in product([d], divisors(n // d), (UP, DOWN))]


def with_other_peers(plan: Plan, op: Pass, groups: Sequence[Group | Exchange]) -> list[Group | Exchange]:
    """Those in which some rank would receive from another than now."""
    ranks = np.arange(plan.n)
    found = [group for group in groups if (replace(op, group=group).source(ranks) != op.source(ranks)).any()]
    assume(found)
    return found


def assert_names_what_is_wrong(message: str, broken: Broken) -> None:
    """The message quotes an operation of the plan by its index, or a chunk that the end of the plan lacks."""
    if named := re.match(r"operation (\d+), ", message):
        index = int(named.group(1))
        assert message.startswith(f"operation {index}, {broken.plan.ops[index]}: ")
        assert broken.culprit in (None, index), f"{message}\n(operation {broken.culprit} was spoiled)"
    else:
        assert broken.culprit is None, f"{message}\n(operation {broken.culprit} was spoiled)"
        assert re.match(r"(the end of the plan: |the plan's (in|out)puts are ).*\w+#\d+", message)


def ring_of_three(causal: bool = False) -> tuple[Plan, Problem]:
    problem = small_problem(3, "contiguous", causal=causal)
    return build("ring", {}).plan(problem, "forward", COMPUTE_BOUND), problem


Mutation = Callable[[st.DrawFn, Plan], Broken]


class Spoiling(NamedTuple):
    """A mutation, and the operation that it needs where not every plan has one."""

    mutate: Mutation
    having: Having | None


class Mutations(dict[str, Spoiling]):
    """Ways of spoiling a plan, by name."""

    def add(self, having: Having | None = None) -> Callable[[Mutation], Mutation]:
        """Decorates a mutation; `having` is the operation that it needs, where not every plan has one."""

        def register(function: Mutation) -> Mutation:
            self[function.__name__] = Spoiling(function, having)
            return function

        return register

    def assert_refused(self, name: str, data: st.DataObject) -> None:
        """A right plan is accepted, and refused once it is spoiled so, by a message that names what is wrong."""
        mutate, having = self[name]
        planned = data.draw(plans(min_n=2, max_n=9, having=having))
        check(*planned)
        broken = data.draw(st.composite(lambda draw: mutate(draw, planned.plan))())
        try:
            check(broken.plan, planned.problem)
        except PlanError as error:
            assert_names_what_is_wrong(str(error), broken)
        else:
            pytest.fail(f"{name} was accepted: {[str(op) for op in broken.plan.ops]}")
