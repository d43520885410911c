"""Ranks that share cores: work flows at most at a second per second, fairly, and a rank that waits leaves its core."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sp_bench.cluster.stragglers import Stragglers
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.simulate import Run, simulate
from tests.support.clusters import block_s, cluster, problem

FAST, TOKENS = 1e15, 2**15
"""Blocks so large that the latencies of hops are nothing."""


def run(n: int, cores: int, *, bytes_per_s: float = FAST, layout: str = "auto", **slow) -> Run:
    p = problem(n, tokens=TOKENS, causal=layout == "contiguous", layout=layout)
    where = replace(cluster(bytes_per_s=bytes_per_s), cores=cores, stragglers=Stragglers(**slow))
    return simulate(build("ring", {}).plan(p, "forward", COMPUTE_BOUND), p, where)


@pytest.mark.parametrize(("cores", "times"), [(1, 8), (2, 4), (3, 8 / 3), (4, 2), (8, 1), (16, 1)])
def test_ranks_that_all_compute_share_evenly(cores: int, times: float) -> None:
    one = run(8, cores)
    work_s = 8 * block_s(problem(8, tokens=TOKENS))
    assert one.work_s == pytest.approx(np.full(8, work_s))
    assert one.makespan_s == pytest.approx(times * work_s, rel=1e-3)  # and the latencies of seven hops
    assert one.busy_s.max() <= one.makespan_s


def test_a_rank_that_is_late_has_the_core_to_itself() -> None:
    """Two ranks on one core, one with twice the work: both at half speed until the other ends, then it alone."""
    slow = run(2, 1, ranks={1: 2.0})
    one_s = 2 * block_s(problem(2, tokens=TOKENS))
    assert slow.work_s == pytest.approx([one_s, 2 * one_s])
    assert slow.makespan_s == pytest.approx(3 * one_s, rel=1e-3)
    assert slow.ended_s[0] == pytest.approx(2 * one_s, rel=1e-3)


def test_what_waits_for_transfers_leaves_its_core() -> None:
    """Bound by transfers, blocks of all ranks fit between them: cores change the first and the last block only."""
    few, many = (run(8, cores, bytes_per_s=1e8) for cores in (4, 8))
    assert few.makespan_s - many.makespan_s == pytest.approx(block_s(problem(8, tokens=TOKENS)), rel=1e-6)


def test_no_step_is_shorter_than_all_work_over_all_cores() -> None:
    for layout in ("striped", "contiguous"):
        one = run(8, 3, layout=layout)
        where = replace(cluster(), cores=3)
        assert where.least_compute_s(one.work_s) == max(one.work_s.max(), one.work_s.sum() / 3)
        assert one.makespan_s >= where.least_compute_s(one.work_s)
