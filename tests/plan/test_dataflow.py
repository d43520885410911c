"""Waits, receive buffers and lifetimes against what the plain order of operations demands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from sp_bench.methods import build
from sp_bench.plan import (
    COMPUTE_BOUND,
    PHASES,
    AllToAll,
    Attend,
    AttendBackward,
    Bundle,
    Chunk,
    Dataflow,
    Fold,
    Group,
    Join,
    Op,
    Pass,
    Plan,
    PlanError,
    Steps,
    Transfer,
    Value,
    dataflow,
    is_partial,
    receive_next,
)
from tests.support.problems import Planned, plans, small_problem, splittable_problem


def uses(plan: Plan, chunk: Chunk) -> list[int]:
    """The operations that read or write a chunk, itself or what it is bundled into."""
    names = {chunk, *(op.into for op in plan.ops if isinstance(op, Bundle) and chunk in op.parts)}
    return [index for index, op in plan if names & {*op.reads, *op.writes}]


def stay(plan: Plan, index: int) -> list[int]:
    """The operations that use what a transfer receives: until the same chunk is received again."""
    (chunk,) = plan.ops[index].writes
    again = (i for i, op in plan if i > index and isinstance(op, Transfer) and op.recv == chunk)
    end = next(again, len(plan.ops))
    return [user for user in uses(plan, chunk) if index <= user < end]


def implied_order(plan: Plan, flow: Dataflow) -> list[int]:
    """For each operation, a bit for each other that must have ended before it: by its stream or by its waits."""
    latest: dict[str, int] = {}
    before = []
    for index, op in plan:
        direct = [other for _, other in flow.waits[index]]
        direct += [latest[op.stream]] if op.stream in latest else []
        before.append(0)
        for other in direct:
            before[index] |= before[other] | 1 << other
        latest[op.stream] = index
    return before


@given(plans())
def test_waits_point_backwards_at_other_streams(planned: Planned) -> None:
    plan = planned.plan
    for index, waits in enumerate(dataflow(plan).waits):
        assert len({stream for stream, _ in waits}) == len(waits)
        for stream, other in waits:
            assert other < index
            assert stream == plan.ops[other].stream != plan.ops[index].stream


@given(plans())
def test_waits_order_every_conflict(planned: Planned) -> None:
    """Two operations of which one writes what the other uses, or whose chunks share a buffer, never overlap."""
    plan = planned.plan
    flow = dataflow(plan)
    before = implied_order(plan, flow)
    for second, op in plan:
        for first in range(second):
            other = plan.ops[first]
            if {*op.writes} & {*other.reads, *other.writes} or {*op.reads} & {*other.writes}:
                assert before[second] >> first & 1, f"{other} ({first}) may still run when {op} ({second}) does"
    for index, slot in flow.slots.items():
        for earlier, same in flow.slots.items():
            if earlier < index and same == slot:
                for user in stay(plan, earlier):
                    assert user < index and before[index] >> user & 1, f"operation {user} may still use {slot}"


@given(plans())
def test_room_is_all_that_a_receive_has_to_wait_for(planned: Planned) -> None:
    """Whoever uses what a transfer receives over has ended; what it sends need not be there yet."""
    plan = planned.plan
    flow = dataflow(plan)
    before = implied_order(plan, flow)
    latest: dict[str, int] = {}
    for index, op in plan:
        waits = dict(flow.waits[index])
        assert all(other <= waits[stream] for stream, other in flow.room[index])
        direct = [other for _, other in flow.room[index]] + ([latest[op.stream]] if op.stream in latest else [])
        latest[op.stream] = index
        ended = 0
        for other in direct:
            ended |= before[other] | 1 << other
        earlier = [i for i in range(index) if {*op.writes} & {*plan.ops[i].reads, *plan.ops[i].writes}]
        if index in flow.slots:
            shared = [i for i, slot in flow.slots.items() if i < index and slot == flow.slots[index]]
            earlier += [user for i in shared for user in stay(plan, i)]
        assert all(ended >> i & 1 for i in earlier), f"operation {index} would overwrite what is still used"


@given(plans())
def test_slots_are_never_shared_by_chunks_alive_at_once(planned: Planned) -> None:
    plan = planned.plan
    flow = dataflow(plan)
    assert set(flow.slots) == {i for i, op in plan if isinstance(op, Transfer) and op.recv not in plan.ends_with}
    lives: dict[int, list[tuple[int, int]]] = {}
    for index, slot in flow.slots.items():
        (chunk,) = plan.ops[index].writes
        assert (slot.tensor, slot.arriving) == (chunk.tensor, chunk.is_arriving)
        lives.setdefault(slot.number, []).append((index, max(stay(plan, index))))
    for spans in lives.values():
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert end < start


@given(plans())
def test_no_more_slots_than_chunks_alive_at_once(planned: Planned) -> None:
    """The buffers of a tensor are as few as its received chunks that are alive at one time."""
    plan = planned.plan
    flow = dataflow(plan)
    kinds = {(slot.tensor, slot.arriving) for slot in flow.slots.values()}
    for kind in kinds:
        received = [i for i, slot in flow.slots.items() if (slot.tensor, slot.arriving) == kind]
        spans = [(i, max(stay(plan, i))) for i in received]
        most = max(sum(start <= now <= end for start, end in spans) for now in range(len(plan.ops)))
        assert len({flow.slots[i] for i in received}) == most


@given(plans())
def test_lifetimes(planned: Planned) -> None:
    """A chunk's values follow each other without overlap, and every use falls into the life of one of them."""
    plan = planned.plan
    flow = dataflow(plan)
    chunks = {chunk for op in plan.ops for chunk in (*op.reads, *op.writes)} | {*plan.starts_with, *plan.ends_with}
    assert flow.first_use.keys() == flow.last_use.keys()
    assert {value.chunk for value in flow.first_use} == chunks
    for chunk in chunks:
        used = uses(plan, chunk)
        values = sorted((value for value in flow.first_use if value.chunk == chunk), key=lambda value: value.version)
        lives = [(flow.first_use[value], flow.last_use[value]) for value in values]
        assert [value.version for value in values] == list(range(len(values)))
        assert all(end < start for (_, end), (start, _) in zip(lives, lives[1:], strict=False))
        assert all(any(start <= index <= end for start, end in lives) for index in used)
        # Only what is there before or after the plan begins or ends where no operation uses it.
        begins, ends = lives[0][0], lives[-1][1]
        assert begins == (0 if chunk in plan.starts_with else min(used))
        assert ends == (len(plan.ops) if chunk in (*plan.starts_with, *plan.ends_with) else max(used))
        assert all(start in used for start, _ in lives[1:]) and all(end in used for _, end in lives[:-1])


@given(plans())
def test_each_receive_and_each_new_sum_is_a_value_of_its_own(planned: Planned) -> None:
    plan = planned.plan
    flow = dataflow(plan)
    there = {*plan.starts_with}
    for index, op in plan:
        for chunk in op.writes:
            assert flow.starts(index, chunk) == (isinstance(op, Transfer) or chunk not in there)
        if isinstance(op, Fold | Transfer):
            there -= {chunk for chunk in op.reads if is_partial(chunk.tensor) and chunk not in plan.kept}
        there |= {*op.writes}


@pytest.mark.parametrize("n", [2, 4, 9])
def test_what_outlives_the_plan_has_no_buffer_that_others_could_take(n: int) -> None:
    """Of Ulysses only dO by heads is received and gone with its phase; of USP the KV that goes round as well."""
    received: dict[tuple[str, str], list[str]] = {}
    for method in (build("ulysses", {}), build("usp", {"ulysses": 1})):
        problem = splittable_problem(n)
        for phase in PHASES:
            plan = method.plan(problem, phase, COMPUTE_BOUND)
            flow = dataflow(plan)
            received[method.name, phase] = sorted(str(plan.ops[index].writes[0]) for index in flow.slots)
            assert all(flow.last_use[newest(flow, chunk)] == len(plan.ops) for chunk in plan.ends_with)
    round_the_ring = [f"kv_h#{i}" for i in range(1, n)]
    behind = [f"dkv_h#{i} arriving" for i in (*range(2, n), 0)]
    assert received == {
        ("ulysses", "forward"): [],
        ("ulysses", "backward"): ["do_h#0"],
        ("usp", "forward"): round_the_ring,
        ("usp", "backward"): sorted(["do_h#0", *round_the_ring, *behind]),
    }


def newest(flow: Dataflow, chunk: Chunk) -> Value:
    """The last content of a chunk."""
    return max((value for value in flow.first_use if value.chunk == chunk), key=lambda value: value.version)


def test_the_parts_of_a_bundle_live_as_long_as_it_does() -> None:
    """Their buffers are not received into before the last block that reads them as one."""
    ring = Group(1, 3)
    do, kv_h, q_h, o_h, do_h, odoq_h, dq_h, dkv_h = (
        Chunk(tensor, 0, ring) for tensor in ("do", "kv_h", "q_h", "o_h", "do_h", "odoq_h", "dq_h", "dkv_h")
    )

    def deal(index: int) -> AllToAll:
        return AllToAll("all-to-all", do, do_h.at(index), ring)

    def bundle(index: int) -> Bundle:
        return Bundle((q_h, o_h, do_h.at(index)), odoq_h.at(index))

    def block(index: int) -> AttendBackward:
        return AttendBackward(odoq_h.at(index), kv_h, dq_h, dkv_h)

    steps = Steps()
    steps.next()
    steps.do(deal(0), bundle(0), deal(1), bundle(1), block(0), deal(2), block(1))
    plan = steps.plan("backward", 3, (do,), (dq_h, dkv_h), kept=(q_h, o_h, kv_h))
    flow = dataflow(plan)
    first, second, third = (flow.slots[index] for index in (0, 2, 5))
    assert first == third != second
    assert flow.last_use[Value(do_h, 0)] == 4, "the block's, not the bundle's"
    assert flow.last_use[Value(do_h.at(1), 0)] == 6
    assert flow.waits[5] == (("blocks", 4),)
    assert [flow.waits[index] for index in (1, 3)] == [(("all-to-all", 0),), (("all-to-all", 2),)]


def test_join_stands_between_all_before_and_all_behind() -> None:
    q, kv, o = chunks()
    own, first, second = Attend(q, kv, o), receive_next(kv, 0, "kv"), receive_next(kv, 1, "kv")
    flow = dataflow(tiny(own, first, Join(), second, Attend(q, kv.at(1), o)))
    assert flow.waits[2] == (("kv", 1),), "its own stream is in order anyway"
    assert flow.waits[3] == (("blocks", 2),)


@pytest.mark.parametrize("phase", PHASES)
def test_joins_in_plans(phase: str) -> None:
    for n in range(2, 10):
        plan = build("pass_q", {}).plan(small_problem(n), phase, COMPUTE_BOUND)
        before = implied_order(plan, dataflow(plan))
        (join,) = (index for index, op in plan if isinstance(op, Join))
        assert before[join] == (1 << join) - 1
        assert all(later >> join & 1 for later in before[join + 1 :])


@pytest.mark.parametrize("n", range(1, 17))
def test_ring_forward_needs_two_receive_buffers(n: int) -> None:
    """One chunk is computed with while the next one arrives; a single hop needs just one."""
    plan = build("ring", {}).plan(small_problem(n), "forward", COMPUTE_BOUND)
    assert len(set(dataflow(plan).slots.values())) == min(n - 1, 2)


def tiny(*ops: Op) -> Plan:
    q, kv, o = chunks()
    steps = Steps()
    steps.next()
    steps.do(*ops)
    return steps.plan("forward", 3, (q, kv), (o,))


def chunks() -> tuple[Chunk, Chunk, Chunk]:
    ring = Group(1, 3)
    return Chunk("q", 0, ring), Chunk("kv", 0, ring), Chunk("o", 0, ring)


def test_a_chunk_received_again_waits_for_its_readers() -> None:
    q, kv, o = chunks()
    hop = receive_next(kv, 0, "kv")
    flow = dataflow(tiny(hop, Attend(q, kv.at(1), o), hop))
    assert flow.slots[0] == flow.slots[2]
    assert flow.waits == ((), (("kv", 0),), (("blocks", 1),))
    assert flow.room[2] == flow.waits[2]


def test_a_write_waits_for_whoever_still_reads() -> None:
    """The block may not add to O#0 while it is being sent."""
    q, kv, o = chunks()
    block, hop = Attend(q, kv, o), Pass("o", o, o.arriving(), Group(1, 3), shift=0)
    flow = dataflow(tiny(block, hop, block))
    assert flow.waits == ((), (("blocks", 0),), (("o", 1),))
    assert flow.room[1] == (), "there is room for what comes, whatever the block does"


def test_errors_name_the_operation() -> None:
    q, kv, o = chunks()
    own, other = Attend(q, kv, o), Attend(q, kv.at(1), o)
    with pytest.raises(PlanError, match=r"operation 1, Attend q#0 x kv#1 into o#0: reads kv#1 before"):
        dataflow(tiny(own, other, receive_next(kv, 0, "kv")))
    with pytest.raises(PlanError, match=r"operation 0, Pass\[kv\] kv#1 -> -1, kv#2 <- \+1: reads kv#1 before"):
        dataflow(tiny(receive_next(kv, 1, "kv"), own))
    over_own = replace(receive_next(kv, 0, "kv"), recv=kv)
    with pytest.raises(PlanError, match=r"operation 1, Pass.* receives over kv#0, which the rank has already"):
        dataflow(tiny(own, over_own))
    with pytest.raises(PlanError, match="its output o#0 was never computed"):
        dataflow(tiny(receive_next(kv, 0, "kv")))


def test_first_operation_may_not_receive_over_an_input() -> None:
    q, kv, o = chunks()
    over_own = replace(receive_next(kv, 0, "kv"), recv=kv)
    with pytest.raises(PlanError, match=r"operation 0, Pass.* receives over kv#0, which the rank has already"):
        dataflow(tiny(over_own, Attend(q, kv, o)))
