"""All-gather attention's plans."""

from __future__ import annotations

import pytest

from sp_bench.lower.schedule import schedule
from sp_bench.methods import build
from sp_bench.plan import Attend, AttendBackward, Pass
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import BLOCKS
from tests.support.problems import splittable_problem


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("n", "stride"), [(2, 1), (4, 1), (4, 2), (5, 5)])
def test_a_slice_is_there_as_a_whole_before_what_came_of_it_is_used(n: int, stride: int, phase: str) -> None:
    method = build("all_gather", {"stride": stride})
    plan = method.plan(splittable_problem(n), phase, COMPUTE_BOUND)
    waits, last_hop, began = schedule(plan).waits, {}, set[int]()
    for index, op in plan:
        if isinstance(op, Pass) and op.lane == "kv":
            assert op.recv
            last_hop[op.recv.heads] = index
    assert len(last_hop) == n // stride
    for index, op in plan:
        if isinstance(op, Attend | AttendBackward) and op.kv.index and op.kv.heads not in began:
            began.add(op.kv.heads)
            assert ("kv", last_hop[op.kv.heads]) in waits[index]


@pytest.mark.parametrize("phase", PHASES)
def test_a_slice_is_gathered_while_the_one_before_is_computed_with(phase: str) -> None:
    """It waits for blocks with the slice before that, whose buffers it takes, and never more than two are held."""
    n = 4
    plan = build("all_gather", {"stride": 1}).plan(splittable_problem(n), phase, COMPUTE_BOUND)
    order = schedule(plan)
    hops = [index for index, op in plan if isinstance(op, Pass) and op.lane == "kv"]
    assert len({order.receive_buffers[index] for index in hops}) == 2 * (n - 1)
    for index in hops:
        recv = plan.ops[index].writes[0]
        for stream, last in order.waits[index]:
            assert stream == BLOCKS
            block = plan.ops[last]
            assert isinstance(block, Attend | AttendBackward)
            assert block.kv.heads <= recv.heads - 2
