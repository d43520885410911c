"""Ring's plans, as the paper's steps."""

from __future__ import annotations

import pytest

from sp_bench.methods import build
from sp_bench.methods.ring import Ring
from sp_bench.plan import Attend, AttendBackward, Group, Pass
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.tensors import KV
from tests.support.problems import small_problem, splittable_problem


@pytest.mark.parametrize("n", range(1, 10))
def test_forward_step_computes_while_the_next_chunk_arrives(n: int) -> None:
    plan = Ring().forward(small_problem(n), COMPUTE_BOUND)
    computed = {step: op.kv.index for step, op in zip(plan.steps, plan.ops, strict=True) if isinstance(op, Attend)}
    arrived = {step: op.writes[0].index for step, op in zip(plan.steps, plan.ops, strict=True) if isinstance(op, Pass)}
    assert computed == {s: s for s in range(n)}
    assert arrived == {s: s + 1 for s in range(n - 1)}


def test_backward_of_three_by_hand() -> None:
    """dKV#1 leaves once its one block is in; what comes in of dKV#2 is folded before it leaves; dKV#0 stays."""
    plan = Ring().backward(small_problem(3), COMPUTE_BOUND)
    assert [f"{step}: {op}" for step, op in zip(plan.steps, plan.ops, strict=True)] == [
        "0: Pass[kv] kv#0 -> +1, kv#1 <- -1",
        "0: AttendBackward odoq#0 x kv#0 into dq#0, dkv#0",
        "1: Pass[kv] kv#1 -> +1, kv#2 <- -1",
        "1: AttendBackward odoq#0 x kv#1 into dq#0, dkv#1",
        "2: Pass[dkv] dkv#1 -> +1, dkv#2 arriving <- -1",
        "2: AttendBackward odoq#0 x kv#2 into dq#0, dkv#2",
        "2: Fold dkv#2 arriving into dkv#2",
        "3: Pass[dkv] dkv#2 -> +1, dkv#0 arriving <- -1",
        "3: Fold dkv#0 arriving into dkv#0",
    ]


def test_ring_is_a_row_of_the_assignment_matrix() -> None:
    assert Ring().tile_shape(8) == (1, 8)
    assert Ring().candidates(small_problem(8)) == (Ring(),)


@pytest.mark.parametrize(
    ("name", "options"),
    [("ring", {}), ("usp", {"ulysses": 1}), ("double_ring", {"inner": 1}), ("startrail", {"team": 1})],
)
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_begins_with_what_it_sees(name: str, options: dict[str, object], phase: str) -> None:
    """On the contiguous layout with a causal mask, the KV of the ranks before comes first."""
    problem = splittable_problem(8, "contiguous")
    plan = build(name, options).plan(problem, phase, COMPUTE_BOUND)
    for rank in range(8):
        owners = [int(op.kv.owner(rank)) for op in plan.ops if isinstance(op, Attend | AttendBackward)]
        assert owners == [(rank - s) % 8 for s in range(8)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("usp", {"ulysses": 2}),
        ("double_ring", {"inner": 4}),
        ("loongtrain", {"ulysses": 2, "inner": 2}),
        ("mesh", {"tile": (2, 4)}),
        ("tokenring", {"nodes": 4}),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
def test_kv_comes_from_the_ranks_before(name: str, options: dict[str, object], phase: str) -> None:
    """Along every ring that it goes round: at its first hop, from the rank before, in whatever group."""
    method = build(name, options)
    plan = method.plan(splittable_problem(8, "contiguous"), phase, COMPUTE_BOUND)
    hops = [op for op in plan.ops if isinstance(op, Pass) and op.tensor in (KV, KV.by_heads)]
    assert hops
    for hop in hops:
        group = hop.group
        assert isinstance(group, Group)
        for rank in range(8):
            assert group.digit(int(hop.source(rank))) == (group.digit(rank) - 1) % group.size
