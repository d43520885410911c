"""Results of a simulation beside its makespan: bounds, link bytes, stragglers, slowdown by transfers, traces."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_bench import account, draw
from sp_bench.cluster import Cluster
from sp_bench.cluster.stragglers import Stragglers
from sp_bench.errors import RequestError
from sp_bench.methods import build
from sp_bench.plan import Plan, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.tensors import KV
from sp_bench.simulate import Run, simulate
from sp_bench.simulate.bounds import by_link_class, link_bytes, lower_bounds
from tests.support.clusters import NETWORKS, block_s, cluster, on_network, problem, split_problem
from tests.support.marks import exhaustive
from tests.support.problems import all_methods


def run_ring(p: Problem, where: Cluster, phase: str = "forward") -> Run:
    return simulate(build("ring", {}).plan(p, phase, COMPUTE_BOUND), p, where)


def crossing(plan: Plan, p: Problem, where: Cluster) -> np.ndarray:
    return link_bytes(where.network(p.n), account.traffic(plan, p, where))


@settings(max_examples=40)
@given(st.data())
def test_no_plan_is_faster_than_its_bounds(data: st.DataObject) -> None:
    p = split_problem(8, causal=data.draw(st.booleans()))
    method = data.draw(st.sampled_from(all_methods(p)))
    where = on_network(data.draw(st.sampled_from(sorted(NETWORKS))))
    plan, assigned = method.plan(p, data.draw(st.sampled_from(PHASES)), COMPUTE_BOUND), method.assigned(p)
    run = simulate(plan, assigned, where)
    bounds = lower_bounds(plan, assigned, where, crossing(plan, assigned, where), float(run.busy_s.max()))
    assert max(bounds.values()) <= run.makespan_s * (1 + 1e-9)
    assert run.busy_s + run.exposed_s + run.idle_s == pytest.approx(np.full(8, run.makespan_s))
    assert run.exposed_s.min() >= -1e-12


def test_bounds_of_a_ring() -> None:
    """15 hops of KV through every port, 3 of 4 ranks' within a node; the last rank's goes through its NIC."""
    p, where = problem(16), cluster(gpus_per_node=4)
    plan = build("ring", {}).plan(p, "forward", COMPUTE_BOUND)
    kv = p.chunk_bytes(KV, wire=True)
    bounds = lower_bounds(plan, p, where, crossing(plan, p, where), 16 * block_s(p))
    assert bounds["nic"] == pytest.approx(15 * kv / 2.5e8)
    assert bounds["port"] == pytest.approx(15 * kv / 1e9)
    assert bounds["latency"] == pytest.approx(15 * 3e-5)
    network = where.network(16)
    crossed = by_link_class(network, link_bytes(network, account.traffic(plan, p)))
    assert crossed == {"port": 15 * 12 * kv, "nic": 15 * 4 * kv}


def test_a_slow_rank_holds_up_a_ring() -> None:
    """Blocks hide the transfers, so that only the slow rank's own blocks count."""
    p, where = problem(8, tokens=8192), cluster(bytes_per_s=1e13)
    slow = run_ring(p, on_cluster(where, ranks={3: 2.0}))
    assert slow.makespan_s == pytest.approx(2 * 8 * block_s(p))
    assert slow.busy_s == pytest.approx(block_s(p) * 8 * np.where(np.arange(8) == 3, 2, 1))
    assert slow.idle_s.max() > 0


def on_cluster(where: Cluster, **stragglers) -> Cluster:
    return replace(where, stragglers=Stragglers(**stragglers))


def test_a_slow_link_holds_up_a_ring() -> None:
    p, where = problem(8), cluster()
    hop_s = 1e-5 + p.chunk_bytes(KV, wire=True) / 0.25e9
    slow = run_ring(p, on_cluster(where, links={"port": {5: 0.25}}))
    assert slow.makespan_s == pytest.approx(7 * hop_s + block_s(p), rel=0.2)
    assert slow.makespan_s > run_ring(p, where).makespan_s * 2


def test_noise_is_seeded_and_keeps_the_mean() -> None:
    p, where = problem(8, tokens=8192), cluster(bytes_per_s=1e13)
    first = run_ring(p, on_cluster(where, jitter=0.1, seed=1))
    assert first.makespan_s == run_ring(p, on_cluster(where, jitter=0.1, seed=1)).makespan_s
    assert first.makespan_s != run_ring(p, on_cluster(where, jitter=0.1, seed=2)).makespan_s
    busy = [run_ring(p, on_cluster(where, jitter=0.1, seed=s)).busy_s.mean() for s in range(20)]
    assert np.mean(busy) == pytest.approx(8 * block_s(p), rel=0.02)


@pytest.mark.parametrize(
    ("stragglers", "message"),
    [
        ({"ranks": {9: 2.0}}, "stragglers.ranks.9: there are 8 ranks"),
        ({"links": {"port": {99: 0.5}}}, "stragglers.links.port.99: there are 8 of them"),
        ({"links": {"nix": {0: 0.5}}}, "stragglers.links=nix"),
    ],
)
def test_stragglers_that_there_are_not(stragglers: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run_ring(problem(8), on_cluster(cluster(), **stragglers))


@pytest.mark.parametrize("config", [{"ranks": {3: 0}}, {"ranks": {"a": 1.0}}, {"jitter": -1}, {"rank": {}}])
def test_bad_stragglers(config: dict) -> None:
    with pytest.raises(RequestError, match="stragglers"):
        Stragglers.build(config, seed=0)


def test_transfers_slow_blocks_down() -> None:
    """All but the last block of a ring run beside a transfer that is as long as the block or longer."""
    p, where = problem(8), cluster(transfer_slowdown=0.5)
    assert p.chunk_bytes(KV, wire=True) / 1e9 > 1.5 * block_s(p)
    run = run_ring(p, where)
    assert run.busy_s == pytest.approx(np.full(8, block_s(p) * (7 * 1.5 + 1)), rel=1e-6)
    fast = run_ring(problem(8, tokens=8192), cluster(bytes_per_s=1e13, transfer_slowdown=0.5))
    alone = run_ring(problem(8, tokens=8192), cluster(bytes_per_s=1e13))
    assert alone.makespan_s < fast.makespan_s < alone.makespan_s * 1.01


def test_chrome_trace() -> None:
    """As json: complete events in microseconds, and a name for each process and thread."""
    run = run_ring(problem(2), cluster())
    spans = [(rank, s.stream, s.label, s.start_s, s.end_s) for rank in range(2) for s in run.spans(rank)]
    trace = json.loads(json.dumps(draw.chrome_trace(spans)))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(spans)
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(run.makespan_s * 1e6)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"rank 0", "rank 1", "blocks", "kv"}


@pytest.mark.parametrize("n", [3, exhaustive(6), exhaustive(8)])
def test_slowdown_of_blocks_that_take_no_time(n: int) -> None:
    """Contiguous causal leaves ranks without work; rounding must not turn that into less than nothing."""
    p, where = split_problem(n, "contiguous", causal=True), cluster(gpus_per_node=2, transfer_slowdown=0.2)
    for method in all_methods(p):
        assigned = method.assigned(p)
        for phase in PHASES:
            plan = method.plan(p, phase, COMPUTE_BOUND)
            slow, fast = simulate(plan, assigned, where), simulate(plan, assigned, cluster(gpus_per_node=2))
            assert (slow.busy_s >= fast.busy_s * (1 - 1e-12)).all()


@pytest.mark.parametrize("seed", range(12))
def test_noise_may_beat_what_latencies_add_up_to(seed: int) -> None:
    p, where = problem(2), on_cluster(cluster(), jitter=0.3, seed=seed)
    run = run_ring(p, where)
    crossed = crossing(run.plan, p, where)
    bounds = lower_bounds(run.plan, p, where, crossed, float(run.busy_s.max()))
    assert max(bounds.values()) <= run.makespan_s * (1 + 1e-9)
