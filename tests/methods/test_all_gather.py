"""All-gather attention's plans."""

from __future__ import annotations

import pytest

from sp_bench.methods import build
from sp_bench.plan import Attend, AttendBackward, Pass
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import BLOCKS, AllGather, Fold, ReduceScatter
from sp_bench.plan.schedule import schedule
from tests.support.problems import splittable_problem


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("n", "stride"), [(2, 1), (4, 1), (4, 2), (5, 5)])
@pytest.mark.parametrize("collectives", ["library", "messages"])
def test_a_slice_is_there_as_a_whole_before_what_came_of_it_is_used(
    n: int, stride: int, phase: str, collectives: str
) -> None:
    method = build("all_gather", {"stride": stride, "collectives": collectives})
    plan = method.plan(splittable_problem(n), phase, COMPUTE_BOUND)
    waits, last_hop, began = schedule(plan).waits, {}, set[int]()
    for index, op in plan:
        if isinstance(op, Pass | AllGather) and op.lane == "kv":
            last_hop[op.writes[0].heads] = index
    assert len(last_hop) == n // stride
    for index, op in plan:
        if isinstance(op, Attend | AttendBackward) and op.kv.index and op.kv.heads not in began:
            began.add(op.kv.heads)
            assert ("kv", last_hop[op.kv.heads]) in waits[index]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("collectives", ["library", "messages"])
def test_a_slice_is_gathered_while_the_one_before_is_computed_with(phase: str, collectives: str) -> None:
    """It waits for blocks with the slice before that, whose buffers it takes, and never more than two are held."""
    n = 4
    method = build("all_gather", {"stride": 1, "collectives": collectives})
    plan = method.plan(splittable_problem(n), phase, COMPUTE_BOUND)
    order = schedule(plan)
    hops = [index for index, op in plan if isinstance(op, Pass | AllGather) and op.lane == "kv"]
    assert len({order.receive_buffers[index] for index in hops}) == 2 * (n - 1 if collectives == "messages" else 1)
    for index in hops:
        recv = plan.ops[index].writes[0]
        for stream, last in order.waits[index]:
            assert stream == BLOCKS
            block = plan.ops[last]
            assert isinstance(block, Attend | AttendBackward)
            assert block.kv.heads <= recv.heads - 2


def test_the_reduce_scatter_of_a_slice_runs_beside_the_blocks_of_the_next() -> None:
    """It waits for the last block of its slice, and the blocks' stream for it only after those of the next."""
    plan = build("all_gather", {"stride": 1}).plan(splittable_problem(4), "backward", COMPUTE_BOUND)
    order = schedule(plan)
    for index, op in plan:
        if isinstance(op, ReduceScatter):
            ((stream, last),) = order.waits[index]
            adds = [i for i, other in plan if isinstance(other, AttendBackward) and other.dkv.heads == op.own.heads]
            assert stream == BLOCKS and last >= max(adds)
            fold = next(i for i, other in plan if i > index and isinstance(other, Fold) and other.into == op.own)
            between = [other for other in plan.ops[index:fold] if isinstance(other, AttendBackward)]
            assert {block.kv.heads for block in between} <= {op.own.heads + 1, op.own.heads + 2}
            assert bool(between) == (op.own.heads < 3), "the last slice has no next one"
