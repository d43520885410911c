"""Costs of the machine that schedules are told."""

from __future__ import annotations

import math

import pytest

from sp_bench.plan import CostProfile, Group
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.tensors import TENSORS, Q
from tests.support.problems import small_problem

COSTS = CostProfile(
    forward_block_s=2.0,
    backward_block_s=5.0,
    node_size=4,
    intra_latency_s=1.0,
    intra_bytes_per_s=100.0,
    inter_latency_s=3.0,
    inter_bytes_per_s=10.0,
)


@pytest.mark.parametrize(
    ("group", "inside"),
    [
        (Group(1, 4), True),
        (Group(1, 2), True),
        (Group(2, 2), True),
        (Group(1, 8), False),
        (Group(2, 4), False),
        (Group(4, 2), False),
        (Group(1, 3), False),
    ],
)
def test_a_hop_leaves_the_node_where_groups_do_not_tile_it(group: Group, inside: bool) -> None:
    assert COSTS.transfer_s(50, group) == (1.0 + 0.5 if inside else 3.0 + 5.0)


def test_hiding_blocks_is_the_least_that_hide_a_hop() -> None:
    problem = small_problem(8)
    for tensor in TENSORS.values():
        for group in (Group(1, 4), Group(4, 2)):
            for phase, block_s in (("forward", 2.0), ("backward", 5.0)):
                hop_s = COSTS.transfer_s(problem.chunk_bytes(tensor, wire=True), group)
                blocks = COSTS.hiding_blocks(problem, tensor, group, phase)
                assert blocks >= 1 and blocks * block_s >= hop_s
                assert blocks == 1 or (blocks - 1) * block_s < hop_s


def test_one_block_hides_everything_where_nothing_is_known() -> None:
    assert math.isinf(COMPUTE_BOUND.forward_block_s)
    assert COMPUTE_BOUND.hiding_blocks(small_problem(8), Q, Group(1, 8), "forward") == 1
