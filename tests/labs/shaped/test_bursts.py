"""Links between shaped hosts that were idle let a burst through at once, and owe it to their rate then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sp_bench import account
from sp_bench.cluster import Cluster
from sp_bench.methods import build
from sp_bench.plan import DOWN, Attend, Chunk, Group, Pass, Plan, Problem, Steps
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.tensors import KV, O, Q
from sp_bench.simulate import Run, simulate
from sp_bench.simulate.bounds import link_bytes, lower_bounds
from tests.support.clusters import TABLE, block_s, problem

BYTES_PER_S, PAYLOAD_SHARE = 1e6, 0.8
"""The share of a link that messages get; the rest are headers."""


def on_hosts(burst_bytes: float, latency_s: float = 0.0, bytes_per_s: float = BYTES_PER_S, **hosts: Any) -> Cluster:
    """A host for each rank; `burst_bytes` is what messages get of a burst."""
    own = {"link_bytes_per_s": bytes_per_s / PAYLOAD_SHARE, "burst_bytes": round(burst_bytes / PAYLOAD_SHARE)}
    own |= {"payload_share": PAYLOAD_SHARE, "latency_s": latency_s}
    return Cluster.build(
        {
            "name": "test",
            "cores": 8,
            "hosts": own | hosts,
            "intra": {"bytes_per_s": 1e9, "latency_s": 1e-5},
            "device": {
                "name": "test", "rates": {"kernel": TABLE}, "peak_tflops": {}, "memory_bytes_per_s": 1e30,
                "launch_s": 0.0,
            },
        }
    )  # fmt: skip


def run_of(name: str, p: Problem, where: Cluster) -> Run:
    method = build(name, {}).candidates(p)[0]
    return checked(method.plan(p, "forward", COMPUTE_BOUND), method.assigned(p), where)


def checked(plan: Plan, assigned: Problem, where: Cluster) -> Run:
    """A run that no bound forbids, the same where ranks stand for one another, and over before links owe nothing."""
    run = simulate(plan, assigned, where)
    assert run.makespan_s < run.finish_s.max(), "links still owe something"
    assert run.ended_s == pytest.approx(simulate(plan, assigned, where, use_symmetry=False).ended_s, rel=1e-9)
    assert max(span.end_s for rank in range(plan.n) for span in run.spans(rank)) == pytest.approx(run.makespan_s)
    assert bound_s(run, assigned, where) <= run.makespan_s * (1 + 1e-9)
    return run


def bound_s(run: Run, assigned: Problem, where: Cluster) -> float:
    """The highest of the lower bounds on a run."""
    crossing = link_bytes(where.network(assigned.n), account.traffic(run.plan, assigned, where))
    return max(lower_bounds(run.plan, assigned, where, crossing, float(run.busy_s.max())).values())


@pytest.mark.parametrize("latency_s", [0.0, 0.02])
@pytest.mark.parametrize(("burst", "at_once"), [(1 / 4, 1 / 4), (1 / 2, 1 / 2), (10, 3 / 4)])
def test_messages_in_a_row_gain_one_burst_together(burst: float, at_once: float, latency_s: float) -> None:
    """In hops. A burst that is larger than a message is its greater part."""
    p = problem(4)
    hop_bytes = p.chunk_bytes(KV, wire=True)
    run = run_of("ring", p, on_hosts(burst * hop_bytes, latency_s))
    took = (3 - at_once) * hop_bytes / BYTES_PER_S
    assert run.makespan_s == pytest.approx(latency_s + took + block_s(p), rel=2e-3)


@pytest.mark.parametrize("n", [2, 4])
def test_links_that_rested_meanwhile_let_another_through(n: int) -> None:
    """Ulysses: Q and KV come in a row, and its output after a block. Messages that begin together share a burst."""
    p = problem(n, tokens=2**15)
    burst_bytes, bytes_per_s = 0.02 * p.chunk_bytes(Q, wire=True), 1e9
    run = run_of("ulysses", p, on_hosts(burst_bytes, bytes_per_s=bytes_per_s))
    sent = link_bytes(on_hosts(1).network(n), account.traffic(run.plan, build("ulysses", {}).assigned(p))).max()
    compute_s = run.busy_s[0]
    assert compute_s > burst_bytes / bytes_per_s
    assert run.makespan_s == pytest.approx((sent - 2 * burst_bytes) / bytes_per_s + compute_s, rel=2e-3)


def test_an_uplink_lets_one_burst_through_for_all_hosts_below_it() -> None:
    p = problem(8)
    hop_bytes = p.chunk_bytes(KV, wire=True)
    ring = Group(1, 8)
    q, kv, o = (Chunk(tensor, 0, ring) for tensor in (Q, KV, O))
    steps = Steps()
    steps.do(Pass("kv", kv, kv.at(4), ring, shift=4))
    steps.do(Attend(q, kv.at(4), o))
    plan = steps.plan("forward", 8, inputs=(q, kv), outputs=(o,))
    where = on_hosts(0.5 * hop_bytes, hosts_per_leaf=4, uplink_bytes_per_s=BYTES_PER_S / PAYLOAD_SHARE)
    run = checked(plan, p, where)
    assert run.makespan_s == pytest.approx((4 - 0.5) * hop_bytes / BYTES_PER_S + block_s(p), rel=2e-3)


def test_the_one_of_two_ranks_that_sends_out_of_its_host_has_the_burst_alone() -> None:
    """In a ring, whose other hops stay inside hosts."""
    p = problem(4)
    hop_bytes = p.chunk_bytes(KV, wire=True)
    run = run_of("ring", p, on_hosts(0.25 * hop_bytes, ranks_per_host=2))
    assert run.makespan_s == pytest.approx((3 - 0.25) * hop_bytes / BYTES_PER_S + block_s(p), rel=5e-3)


@pytest.mark.parametrize("name", ["ulysses", "tokenring", "startrail", "mesh"])
@pytest.mark.parametrize("hosts", [{}, {"ranks_per_host": 2}, {"hosts_per_leaf": 4, "uplink_bytes_per_s": 1e6}])
def test_no_method_goes_below_its_bounds(name: str, hosts: dict[str, Any]) -> None:
    p = replace(problem(8), heads=8)
    where = on_hosts(0.2 * p.chunk_bytes(KV, wire=True), 1e-3, **hosts)
    run = run_of(name, p, where)
    assert 0 < bound_s(run, build(name, {}).candidates(p)[0].assigned(p), where) <= run.makespan_s * (1 + 1e-9)


def test_each_lane_has_a_burst() -> None:
    p = problem(8)
    hop_bytes = p.chunk_bytes(KV, wire=True)
    ring = Group(1, 8, DOWN)
    q, kv, o = (Chunk(tensor, 0, ring) for tensor in (Q, KV, O))
    steps = Steps()
    steps.do(*(Pass(f"lane {far}", kv, kv.at(far), ring, shift=-far) for far in (1, 2)))
    steps.do(*(Attend(q, kv.at(far), o) for far in (1, 2)))
    run = checked(steps.plan("forward", 8, inputs=(q, kv), outputs=(o,)), p, on_hosts(0.2 * hop_bytes))
    assert run.makespan_s == pytest.approx((2 - 2 * 0.2) * hop_bytes / BYTES_PER_S, rel=2e-3)
