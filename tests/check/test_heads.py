"""Heads that are split among ranks or taken in slices, and chunks that the forward keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp_bench.check import check, check_all
from sp_bench.methods import build
from sp_bench.plan import (
    AllToAll,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    Exchange,
    Grid,
    Group,
    Pass,
    Plan,
    Problem,
    Steps,
)
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import PlanError
from sp_bench.plan.tensors import DKV, DO, DQ, KV, ODOQ, OUT, O, Q, Tensor
from tests.support.plan_edits import (
    with_changed,
    with_op,
)
from tests.support.problems import small_problem, splittable_problem


def ulysses(n: int, phase: str = "forward") -> tuple[Plan, Problem]:
    problem = splittable_problem(n, "contiguous")
    method = build("ulysses", {})
    return method.plan(problem, phase, COMPUTE_BOUND), method.assigned(problem)


def usp(phase: str = "forward") -> tuple[Plan, Problem]:
    """Two groups of two ranks."""
    problem = splittable_problem(4, "contiguous", causal=False)
    method = build("usp", {"ulysses": 2})
    return method.plan(problem, phase, COMPUTE_BOUND), method.assigned(problem)


@pytest.mark.parametrize("phase", PHASES)
def test_heads_exchanged_twice_are_wasteful_but_right(phase: str) -> None:
    plan, problem = usp(phase)
    exchanged = [(index, op) for index, op in plan if isinstance(op, AllToAll) and op.to_heads]
    assert exchanged
    for index, op in exchanged:
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


@pytest.mark.parametrize("operand", [Q, KV, O])
def test_a_plain_operand_is_refused_where_heads_are_split(operand: Tensor) -> None:
    plan, problem = ulysses(4)
    broken = with_changed(plan, 2, **{operand.name: Chunk(operand, 0, Group(1, 4))})
    wanted = f"{operand}#0 stands where a held chunk of {operand}_h should$"
    with pytest.raises(PlanError, match=f"^operation 2, Attend .*: {wanted}|^operation 3, .* reads o_h#0 before"):
        check(broken.plan, problem)


def test_exchange_back_names_what_is_missing() -> None:
    plan, problem = usp()
    *_, last, exchange = plan.ops
    early = replace(plan, ops=(*plan.ops[:-2], exchange, last))
    with pytest.raises(PlanError, match=r"^the end of the plan: out#0 of rank 2 lacks its block with chunk 0$"):
        check(early, problem)
    with pytest.raises(PlanError, match=r"^operation 6, AllToAll.*: out#0 is there already$"):
        check(with_op(plan, 6, exchange), problem)


@pytest.mark.parametrize("name", ["ulysses", "usp"])
def test_what_is_kept_is_what_the_backward_takes(name: str) -> None:
    problem = splittable_problem(4, "contiguous")
    method = build(name, {}).candidates(problem)[-1]
    plans, exchanged = (
        {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES},
        method.assigned(problem),
    )
    forward, backward = plans.values()
    assert [chunk.tensor for chunk in forward.kept] == [Q.by_heads, KV.by_heads, O.by_heads]
    for lost in range(3):
        less = (*forward.kept[:lost], *forward.kept[lost + 1 :])
        forgets = plans | {"forward": replace(forward, kept=less)}
        check(forgets["forward"], exchanged)
        with pytest.raises(
            PlanError, match=r"^what the forward keeps is not .* \(forward\) and q_h#0, .* \(backward\)$"
        ):
            check_all(forgets, exchanged)
        with pytest.raises(PlanError, match=rf"^operation \d, .* reads {forward.kept[lost]} before"):
            check_all(plans | {"backward": replace(backward, kept=less)}, exchanged)
    foreign = (*forward.kept, forward.kept[0].at(1).arriving())
    with pytest.raises(PlanError, match="only a rank's own chunks are kept"):
        check(replace(forward, kept=foreign), exchanged)


def test_an_output_that_is_not_complete_is_not_bundled() -> None:
    """A backward that computes O by heads again may have left a block out, or not yet have come to it."""
    plan, problem = ulysses(4, "backward")
    q_h, kv_h, o_h = plan.kept
    again = replace(plan, kept=(q_h, kv_h))
    with pytest.raises(PlanError, match=r"^operation 2, Bundle q_h#0, o_h#0, do_h#0 as odoq_h#0: o_h#0 is not known"):
        check(with_op(again, 1, Attend(q_h, kv_h, o_h)), problem)


def test_only_a_rank_s_own_chunks_are_exchanged() -> None:
    """Chunks of the partner, at home as #0, would be taken for those of the rank's own group."""
    plan, problem = usp()
    swap = Exchange(Group(1, 2), Group(2, 2))
    exchange = plan.ops[0]
    assert isinstance(exchange, AllToAll)
    partners = Chunk(Q, 0, Grid(Group(1, 2), Group(2, 2), swap))
    changed = with_changed(with_op(plan, 0, Pass("swap", exchange.send, partners, swap, 1)), 1, send=partners)
    with pytest.raises(PlanError, match=r"^operation 1, AllToAll"):
        check(changed.plan, problem)


def in_two_slices(phase: str, other: int) -> tuple[Plan, Problem]:
    """Ulysses of one rank, by slices of the heads; with other = 1, KV or Q by heads is of the other slice."""
    one, ops, slices = Group(1, 1), [], (0, 1)

    def chunk(tensor: Tensor, heads: int) -> Chunk:
        return Chunk(tensor, 0, one, heads=heads)

    def exchange(send: Tensor, recv: Tensor, heads: int, sent: int | None = None) -> AllToAll:
        return AllToAll("all-to-all", chunk(send, heads if sent is None else sent), chunk(recv, heads), one)

    for i in slices:
        if phase == "forward":
            ops += [exchange(Q, Q.by_heads, i), exchange(KV, KV.by_heads, i, sent=i ^ other)]
            ops += [
                Attend(*(chunk(tensor, i) for tensor in (Q.by_heads, KV.by_heads, O.by_heads))),
                exchange(O.by_heads, OUT, i),
            ]
        else:
            parts = chunk(Q.by_heads, i ^ other), chunk(O.by_heads, i), chunk(DO.by_heads, i)
            block = AttendBackward(
                *(chunk(tensor, i) for tensor in (ODOQ.by_heads, KV.by_heads, DQ.by_heads, DKV.by_heads))
            )
            ops += [exchange(DO, DO.by_heads, i), Bundle(parts, chunk(ODOQ.by_heads, i)), block]
            ops += [exchange(DQ.by_heads, DQ, i), exchange(DKV.by_heads, DKV, i)]
    steps = Steps()
    steps.do(*ops)
    ends = {"forward": ((Q, KV), (OUT,)), "backward": ((DO,), (DQ, DKV))}[phase]
    inputs, outputs = (tuple(chunk(tensor, i) for tensor in tensors for i in slices) for tensors in ends)
    kept = tuple(chunk(tensor, i) for tensor in (Q.by_heads, KV.by_heads, O.by_heads) for i in slices)
    return steps.plan(phase, 1, inputs, outputs, kept), replace(small_problem(1), head_slices=2)


@pytest.mark.parametrize("phase", PHASES)
def test_slices_of_heads_are_exchanged_and_bundled_apart(phase: str) -> None:
    check(*in_two_slices(phase, other=0))
    with pytest.raises(PlanError, match=r"^operation 1, (AllToAll|Bundle).*: mixes slices of heads"):
        check(*in_two_slices(phase, other=1))


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
