"""Simulating one rank of each kind gives what simulating all of them gives, and is left off where ranks differ."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_bench.cluster import Cluster
from sp_bench.methods import build
from sp_bench.plan import Method, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.point.variants import variants
from sp_bench.simulate import Run, simulate
from sp_bench.simulate.graph import NEARLY, build_graph
from tests.support.clusters import NETWORKS, on_network, split_problem
from tests.support.marks import exhaustive
from tests.support.points import point
from tests.support.problems import all_methods, of_each_name
from tests.support.typed import of_kind


def both(plan, assigned: Problem, where: Cluster) -> tuple[Run, Run]:
    return simulate(plan, assigned, where), simulate(plan, assigned, where, use_symmetry=False)


def assert_equal(one: Run, all_of_them: Run) -> None:
    assert all_of_them.graph.quotient.ranks.size == one.plan.n
    assert one.makespan_s == pytest.approx(all_of_them.makespan_s, rel=1e-12)
    assert one.busy_s == pytest.approx(all_of_them.busy_s, rel=1e-12)
    assert one.ended_s == pytest.approx(all_of_them.ended_s, rel=1e-12)
    for rank in range(one.plan.n):
        for span, wanted in zip(one.spans(rank), all_of_them.spans(rank), strict=True):
            assert (span.stream, span.label) == (wanted.stream, wanted.label)
            assert (span.start_s, span.end_s) == pytest.approx((wanted.start_s, wanted.end_s), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("every", [False, exhaustive(True)])
@pytest.mark.parametrize("network", NETWORKS)
def test_every_method_on_every_network(network: str, every: bool) -> None:
    """Full attention, where all ranks compute the same; n = 8 on two or four nodes."""
    p, where, alike = split_problem(8), on_network(network), 0
    methods = all_methods(p)
    for method in methods if every else of_each_name(methods, [*NETWORKS].index(network)):
        assigned = method.assigned(p)
        for phase in PHASES:
            one, all_of_them = both(method.plan(p, phase, COMPUTE_BOUND), assigned, where)
            assert_equal(one, all_of_them)
            alike += one.graph.quotient.ranks.size < 8
    assert alike, "nothing was ever left out"


@settings(max_examples=30)
@given(st.data())
def test_any_plan(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([4, 8, 12]))
    p = split_problem(n, data.draw(st.sampled_from(sorted(LAYOUTS))), causal=data.draw(st.booleans()))
    method = data.draw(st.sampled_from(all_methods(p)))
    phase = data.draw(st.sampled_from(PHASES))
    where = on_network(data.draw(st.sampled_from(sorted(NETWORKS))))
    assert_equal(*both(method.plan(p, phase, COMPUTE_BOUND), method.assigned(p), where))


@pytest.mark.parametrize("phase", PHASES)
def test_ranks_with_other_folds_are_told_apart(phase: str) -> None:
    """Some zigzag blocks fold all queries and others half of them, and take equally long."""
    request = point("method=ring", "method.layout=zigzag", "gpus=8", "cluster=local", "head_dim=64", f"phase={phase}")
    (choice,) = variants(request, [of_kind(Method, request.method)])
    one, all_of_them = both(choice.plans[phase], choice.problem, request.cluster)
    assert_equal(one, all_of_them)
    assert np.ptp(one.busy_s) > 0


def ranks_simulated(method: str, n: int, where: Cluster, p: Problem | None = None, **options: Any) -> int:
    p = p or split_problem(n)
    return simulate(build(method, options).plan(p, "forward", COMPUTE_BOUND), p, where).graph.quotient.ranks.size


def test_how_few_are_left() -> None:
    """A ring on nodes looks the same from every node, a square tile on one node from every rank."""
    assert ranks_simulated("ring", 32, on_network("nodes")) == 4
    assert ranks_simulated("ring", 32, on_network("one node")) == 1
    assert ranks_simulated("mesh", 64, on_network("one node"), tile=(8, 8)) == 1
    assert ranks_simulated("mesh", 64, on_network("nodes"), tile=(4, 16)) == 1
    assert ranks_simulated("mesh", 64, on_network("nodes"), tile=(8, 8)) == 4


def test_never_where_ranks_differ() -> None:
    """Uneven work, a slow rank, a slow link or noise."""
    assert ranks_simulated("ring", 16, on_network("nodes"), split_problem(16, "contiguous", causal=True)) == 16
    assert ranks_simulated("ring", 16, on_network("nodes", ranks={3: 2.0})) == 16
    assert ranks_simulated("ring", 16, on_network("nodes", links={"nic": {0: 0.5}})) == 16
    assert ranks_simulated("ring", 16, on_network("nodes", jitter=0.1)) == 16
    assert ranks_simulated("ring", 16, on_network("nodes", ranks={3: 1.0})) == 4


def test_ranks_that_are_nearly_alike() -> None:
    """Zigzag blocks of half the queries and of half the keys differ a little; each rank is as slow as the slowest."""
    asked = ["method=ring", "method.layout=zigzag", "cluster=h100_ndr400", "gpus=16", "seqlen=512k"]
    request = point(*asked)
    (choice,) = variants(request, [of_kind(Method, request.method)])
    for plan in choice.plans.values():
        alike, whole = (simulate(plan, choice.problem, request.cluster, nearly_alike=x) for x in (True, False))
        assert (alike.graph.exact, whole.graph.exact) == (False, True)
        assert (alike.graph.quotient.ranks.size, whole.graph.quotient.ranks.size) == (8, 16)
        assert whole.makespan_s <= alike.makespan_s <= whole.makespan_s * (1 + NEARLY)
        assert (alike.work_s >= whole.work_s).all()
    p = split_problem(16, "contiguous", causal=True)
    far = build("ring", {"layout": "contiguous"}).plan(p, "forward", COMPUTE_BOUND)
    assert simulate(far, p, on_network("nodes"), nearly_alike=True).graph.quotient.ranks.size == 16


def test_the_quotient_counts_every_rank_and_link_once() -> None:
    where, p = on_network("two NICs"), split_problem(16)
    quotient = simulate(build("ring", {}).plan(p, "forward", COMPUTE_BOUND), p, where).graph.quotient
    assert quotient.sizes.sum() == 16
    assert quotient.link_sizes.sum() == where.network(16).link_bytes_per_s.size
    assert np.array_equal(quotient.ranks[quotient.orbit], np.arange(16) % 4)


@pytest.mark.parametrize("name", ["ring", "zigzag", "tokenring", "mesh", "startrail"])
def test_tasks_wait_for_each_other_one_once(name: str) -> None:
    """A message that a rank has sent and that its receiver has received is one task to whoever waits for both."""
    p, twice = split_problem(8), 0
    method = next(each for each in all_methods(p) if each.name == name)
    plan, assigned = method.plan(p, "backward", COMPUTE_BOUND), method.assigned(p)
    tasks = build_graph(plan, assigned, on_network("nodes"), use_symmetry=False).tasks
    for first, last in pairwise(tasks.dep_start[::8].tolist()):
        waits_for = tasks.dep_tasks[first:last].reshape(8, -1).T.tolist()
        twice += len(waits_for) - len(set(map(tuple, waits_for)))
    assert not twice
