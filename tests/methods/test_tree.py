"""Tree decoding: rounds that bring every partial to its owner once, and what they cross."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from sp_bench.check import check_all
from sp_bench.methods import build
from sp_bench.plan.caches import Caches
from sp_bench.plan.chunks import Chunk
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.groups import Group
from sp_bench.plan.ops import PlanError, TreeReduce
from sp_bench.plan.patterns import divisors
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import O
from sp_bench.point.simulated import simulate_point
from tests.support.points import point
from tests.support.problems import cached_problem
from tests.support.typed import Known

STEP = ("workload=decode", "gpus=64", "heads=32", "kv_heads=8", "batch=32", "kv_seqlen=128k", "mode=simulate")


def tree(n: int, inner: int) -> TreeReduce:
    return TreeReduce("o", Chunk(O, 0, Group(1, n)), inner)


def step_of(n: int, inner: int) -> tuple[Problem, dict]:
    mask = Caches((40, 25, 31), share=4)
    method = build("tree", {"inner": inner})
    problem = method.assigned(cached_problem(n, mask, heads=2, head_dim=8))
    return problem, {"forward": method.plan(problem, "forward", COMPUTE_BOUND)}


@pytest.mark.parametrize("n", range(2, 25))
def test_owners_get_the_partials_of_all_ranks_once(n: int) -> None:
    for inner in divisors(n)[:-1]:
        op, ranks = tree(n, inner), range(n)
        held = {(rank, owner): [rank] for rank in ranks for owner in ranks}
        for each in op.rounds:
            moves = [
                (int(each.group.member(rank, each.shift)), owner, held.pop((rank, owner)))
                for rank, owner in list(held)
                if each.first <= op.place(rank, owner) < each.first + each.owners
            ]
            for target, owner, parts in moves:
                held[target, owner] = [*held[target, owner], *parts]
        assert {key: sorted(parts) for key, parts in held.items()} == {(rank, rank): [*ranks] for rank in ranks}
        assert len(op.rounds) == math.ceil(math.log2(inner)) + math.ceil(math.log2(n // inner))
        assert sum(each.owners for each in op.rounds) == n - 1
        assert all(op.place(rank, op.owner(rank, place)) == place for rank in ranks for place in range(n))


@contextmanager
def spoiled(op: TreeReduce, **values: Any) -> Iterator[None]:
    """The operation with other values for a while: equal plans are one, also in other tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setitem(op.__dict__, name, value)
        yield


def test_rounds_that_lose_a_partial_or_repeat_one_are_refused() -> None:
    for spoil in (lambda rounds: rounds[:-1], lambda rounds: rounds[1:], lambda rounds: (*rounds, rounds[-1])):
        problem, plans = step_of(6, 2)
        check_all(plans, problem)
        (op,) = (op for op in plans["forward"].ops if isinstance(op, TreeReduce))
        with spoiled(op, rounds=spoil(op.rounds)), pytest.raises(PlanError, match=r"owners get|no longer there"):
            check_all(plans, problem)


def test_groups_of_unequal_size_are_refused() -> None:
    problem, plans = step_of(6, 2)
    (op,) = (op for op in plans["forward"].ops if isinstance(op, TreeReduce))
    with spoiled(op, inner=4), pytest.raises(PlanError, match="4 ranks of 6 reduce among themselves"):
        check_all(plans, problem)


def test_a_tree_of_nodes_crosses_them_with_one_chunk_for_each() -> None:
    """Shyam et al. 2024, section 5: inside nodes first. Helix sends every partial straight to its owner."""
    trees, helix = (Known(simulate_point(point(*STEP, f"method={name}"))[0]) for name in ("tree", "helix"))
    assert trees.variant == "inner 8"
    assert trees.comm_bytes_per_gpu == trees.comm_bytes_expected == helix.comm_bytes_per_gpu
    assert 8 * trees.comm_bytes_across_nodes_max == helix.comm_bytes_across_nodes_max
    times = {row["variant"]: row["step_ms"] for row in trees.candidates}
    assert min(times, key=lambda variant: times[variant]) == "inner 8"


def test_rounds_follow_one_another() -> None:
    """Each pays its latency, and merges before the next one begins."""
    record = Known(simulate_point(point(*STEP, "gpus=8", "method=tree", "method.inner=1"))[0])
    network = point(*STEP, "gpus=8", "method=tree").cluster.network(8)
    latency_s = float(network.routes_to((np.arange(8) + 1) % 8).latency_s.max())
    assert record.step_ms_median - record.compute_ms > 3 * 1e3 * latency_s
    assert record.bound_ms <= record.step_ms_median
