"""Waits and receive buffers against what the plain order of operations demands."""

from __future__ import annotations

import pytest
from hypothesis import given

from sp_bench.methods import build
from sp_bench.plan import AllToAll, Attend, AttendBackward, Bundle, Chunk, Group, Join, Pass, Plan, Steps, receive_next
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.dataflow import Dataflow, Value, dataflow
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import AllGather, Transfer
from sp_bench.plan.schedule import Schedule, schedule
from sp_bench.plan.tensors import DKV, DO, DQ, KV, ODOQ, O, Q
from tests.support.problems import Planned, plans, small_problem, splittable_problem
from tests.support.tiny_plans import chunks, tiny, uses


def stay(plan: Plan, index: int) -> list[int]:
    """The operations that use what a transfer receives: until the same chunk is received again."""
    found = list[int]()
    for chunk in plan.ops[index].writes:
        again = (i for i, op in plan if i > index and isinstance(op, Transfer) and chunk in op.writes)
        end = next(again, len(plan.ops))
        found += [user for user in uses(plan, chunk) if index <= user < end]
    return found


def implied_order(plan: Plan, order: Schedule) -> list[int]:
    """For each operation, a bit for each other that must have ended before it: by its stream or by its waits."""
    latest: dict[str, int] = {}
    before = []
    for index, op in plan:
        direct = [other for _, other in order.waits[index]]
        direct += [latest[op.stream]] if op.stream in latest else []
        before.append(0)
        for other in direct:
            before[index] |= before[other] | 1 << other
        latest[op.stream] = index
    return before


@given(plans())
def test_waits_point_backwards_at_other_streams(planned: Planned) -> None:
    plan = planned.plan
    for index, waits in enumerate(schedule(plan).waits):
        assert len({stream for stream, _ in waits}) == len(waits)
        for stream, other in waits:
            assert other < index
            assert stream == plan.ops[other].stream != plan.ops[index].stream


@given(plans())
def test_waits_order_every_conflict(planned: Planned) -> None:
    """Two operations of which one writes what the other uses, or whose chunks share a buffer, never overlap."""
    plan = planned.plan
    order = schedule(plan)
    before = implied_order(plan, order)
    for second, op in plan:
        for first in range(second):
            other = plan.ops[first]
            if {*op.writes} & {*other.reads, *other.writes} or {*op.reads} & {*other.writes}:
                assert before[second] >> first & 1, f"{other} ({first}) may still run when {op} ({second}) does"
    for index, buffer in order.receive_buffers.items():
        for earlier, same in order.receive_buffers.items():
            if earlier < index and same == buffer:
                for user in stay(plan, earlier):
                    assert user < index and before[index] >> user & 1, f"operation {user} may still use {buffer}"


@given(plans())
def test_a_free_buffer_is_all_that_a_receive_has_to_wait_for(planned: Planned) -> None:
    """Whoever uses what a transfer receives over has ended; what it sends need not be there yet."""
    plan = planned.plan
    order = schedule(plan)
    before = implied_order(plan, order)
    latest: dict[str, int] = {}
    for index, op in plan:
        waits = dict(order.waits[index])
        assert all(other <= waits[stream] for stream, other in order.buffer_free[index])
        direct = [other for _, other in order.buffer_free[index]] + ([latest[op.stream]] if op.stream in latest else [])
        latest[op.stream] = index
        ended = 0
        for other in direct:
            ended |= before[other] | 1 << other
        earlier = [i for i in range(index) if {*op.writes} & {*plan.ops[i].reads, *plan.ops[i].writes}]
        if index in order.receive_buffers:
            buffers = order.receive_buffers
            shared = [i for i, buffer in buffers.items() if i < index and buffer == buffers[index]]
            earlier += [user for i in shared for user in stay(plan, i)]
        assert all(ended >> i & 1 for i in earlier), f"operation {index} would overwrite what is still used"


@given(plans())
def test_receive_buffers_are_never_shared_by_chunks_alive_at_once(planned: Planned) -> None:
    plan = planned.plan
    order = schedule(plan)
    received = {i for i, op in plan if isinstance(op, Transfer) and op.writes[0] not in plan.ends_with}
    assert set(order.receive_buffers) == received
    lives: dict[int, list[tuple[int, int]]] = {}
    for index, buffer in order.receive_buffers.items():
        chunk, op = plan.ops[index].writes[0], plan.ops[index]
        assert (buffer.tensor, buffer.arriving) == (chunk.tensor, chunk.is_arriving)
        assert buffer.chunks == (op.group.size if isinstance(op, AllGather) else 1)
        lives.setdefault(buffer.number, []).append((index, max(stay(plan, index))))
    for spans in lives.values():
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert end < start


@given(plans())
def test_no_more_receive_buffers_than_chunks_alive_at_once(planned: Planned) -> None:
    """The buffers of a tensor are as few as its received chunks that are alive at one time."""
    plan = planned.plan
    order = schedule(plan)
    kinds = {(buffer.tensor, buffer.arriving, buffer.chunks) for buffer in order.receive_buffers.values()}
    for kind in kinds:
        received = [
            i for i, buffer in order.receive_buffers.items() if (buffer.tensor, buffer.arriving, buffer.chunks) == kind
        ]
        spans = [(i, max(stay(plan, i))) for i in received]
        most = max(sum(start <= now <= end for start, end in spans) for now in range(len(plan.ops)))
        assert len({order.receive_buffers[i] for i in received}) == most


@pytest.mark.parametrize("n", [2, 4, 9])
def test_what_outlives_the_plan_has_no_buffer_that_others_could_take(n: int) -> None:
    """Ulysses receives only dO by heads that is gone with its phase; USP the KV that goes round as well."""
    received: dict[tuple[str, str], list[str]] = {}
    for method in (build("ulysses", {}), build("usp", {"ulysses": 1})):
        problem = splittable_problem(n)
        for phase in PHASES:
            plan = method.plan(problem, phase, COMPUTE_BOUND)
            flow, order = dataflow(plan), schedule(plan)
            received[method.name, phase] = sorted(str(plan.ops[index].writes[0]) for index in order.receive_buffers)
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
        Chunk(tensor, 0, ring)
        for tensor in (DO, KV.by_heads, Q.by_heads, O.by_heads, DO.by_heads, ODOQ.by_heads, DQ.by_heads, DKV.by_heads)
    )

    def exchange(index: int) -> AllToAll:
        return AllToAll("all-to-all", do, do_h.at(index), ring)

    def bundle(index: int) -> Bundle:
        return Bundle((q_h, o_h, do_h.at(index)), odoq_h.at(index))

    def block(index: int) -> AttendBackward:
        return AttendBackward(odoq_h.at(index), kv_h, dq_h, dkv_h)

    steps = Steps()
    steps.next()
    steps.do(exchange(0), bundle(0), exchange(1), bundle(1), block(0), exchange(2), block(1))
    plan = steps.plan("backward", 3, (do,), (dq_h, dkv_h), kept=(q_h, o_h, kv_h))
    flow, order = dataflow(plan), schedule(plan)
    first, second, third = (order.receive_buffers[index] for index in (0, 2, 5))
    assert first == third != second
    assert flow.last_use[Value(do_h, 0)] == 4, "the block's, not the bundle's"
    assert flow.last_use[Value(do_h.at(1), 0)] == 6
    assert order.waits[5] == (("blocks", 4),)
    assert [order.waits[index] for index in (1, 3)] == [(("all-to-all", 0),), (("all-to-all", 2),)]


def test_join_stands_between_all_before_and_all_behind() -> None:
    q, kv, o = chunks()
    own, first, second = Attend(q, kv, o), receive_next(kv, 0, "kv"), receive_next(kv, 1, "kv")
    order = schedule(tiny(own, first, Join(), second, Attend(q, kv.at(1), o)))
    assert order.waits[2] == (("kv", 1),), "its own stream is in order anyway"
    assert order.waits[3] == (("blocks", 2),)


@pytest.mark.parametrize("phase", PHASES)
def test_joins_in_plans(phase: str) -> None:
    for n in range(2, 10):
        plan = build("pass_q", {}).plan(small_problem(n), phase, COMPUTE_BOUND)
        before = implied_order(plan, schedule(plan))
        (join,) = (index for index, op in plan if isinstance(op, Join))
        assert before[join] == (1 << join) - 1
        assert all(later >> join & 1 for later in before[join + 1 :])


@pytest.mark.parametrize("n", range(1, 17))
def test_ring_forward_needs_two_receive_buffers(n: int) -> None:
    """One chunk is computed with while the next one arrives; a single hop needs just one."""
    plan = build("ring", {}).plan(small_problem(n), "forward", COMPUTE_BOUND)
    assert len(set(schedule(plan).receive_buffers.values())) == min(n - 1, 2)


def test_a_chunk_received_again_waits_for_its_readers() -> None:
    q, kv, o = chunks()
    hop = receive_next(kv, 0, "kv")
    order = schedule(tiny(hop, Attend(q, kv.at(1), o), hop))
    assert order.receive_buffers[0] == order.receive_buffers[2]
    assert order.waits == ((), (("kv", 0),), (("blocks", 1),))
    assert order.buffer_free[2] == order.waits[2]


def test_a_write_waits_for_whoever_still_reads() -> None:
    """The block may not add to O#0 while it is being sent."""
    q, kv, o = chunks()
    block, hop = Attend(q, kv, o), Pass("o", o, o.arriving(), Group(1, 3), shift=0)
    order = schedule(tiny(block, hop, block))
    assert order.waits == ((), (("blocks", 0),), (("o", 1),))
    assert order.buffer_free[1] == (), "the buffer is free, whatever the block does"
