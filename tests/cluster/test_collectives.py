"""How a library carries collectives: NCCL's rings over all NICs, its other algorithms, gloo's ring of hops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import account
from sp_bench.cluster import Cluster
from sp_bench.cluster.collectives import PAT_RATE
from sp_bench.methods import build
from sp_bench.plan import Chunk, Group, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import AllGather, AllToAll, ReduceScatter
from sp_bench.plan.tensors import DKV, KV, O, Q
from sp_bench.simulate import simulate
from sp_bench.simulate.bounds import link_bytes
from tests.support.clusters import NETWORKS, cluster, on_network, problem, split_problem
from tests.support.problems import all_methods


def gather(group: Group) -> AllGather:
    return AllGather("kv", Chunk(KV, 0, group))


@given(st.sampled_from(sorted(NETWORKS)), st.sampled_from([Group(1, 8), Group(1, 4), Group(2, 4), Group(4, 2)]))
def test_each_rank_sends_all_and_gets_all(network: str, group: Group) -> None:
    """Whatever the algorithm: the shares of a rank's flows are one, and so are those of what comes to it."""
    where = on_network(network)
    way = where.algorithm(gather(group), split_problem(8), 10**6)
    assert way is not None
    arriving, ranks = np.zeros(8), np.arange(8)
    for flow in way.flows:
        arriving += np.bincount(flow.target, weights=flow.share, minlength=8)
        inside = (flow.target // group.span == ranks // group.span) & (
            flow.target % group.stride == ranks % group.stride
        )
        assert (inside | (flow.share == 0)).all(), "all go to members"
    assert sum(flow.share for flow in way.flows) == pytest.approx(np.ones(8))
    assert arriving == pytest.approx(np.ones(8))


def test_rings_use_every_nic() -> None:
    """4 nodes of 8: each node lets 31 chunks out, over one NIC by hops, and an eighth of it over each by NCCL."""
    p, where = problem(32, tokens=512), cluster(gpus_per_node=8)
    size = 31 * p.chunk_bytes(KV, wire=True)
    for collectives, nics in (("messages", [0] * 7 + [1]), ("library", [1 / 8] * 8)):
        method = build("all_gather", {"stride": p.kv_heads, "collectives": collectives})
        plan, network = method.plan(p, "forward", COMPUTE_BOUND), where.network(32)
        crossing = link_bytes(network, account.traffic(plan, p, where))
        out = crossing[network.first_link["nic out"] :][:32] / size
        assert out == pytest.approx(np.tile(nics, 4))
        across = account.sent_across_nodes(plan, p, network.node_of, where)
        assert across == pytest.approx(np.tile(nics, 4) * size)


def test_a_ring_takes_the_time_of_its_busiest_link_and_a_latency_for_each_step() -> None:
    p, where = problem(16, tokens=512), cluster(gpus_per_node=4)
    method = build("all_gather", {"stride": p.kv_heads})
    run = simulate(method.plan(p, "forward", COMPUTE_BOUND), p, where)
    gathered = next(span for span in run.spans(0) if span.stream == "kv")
    size = 15 * p.chunk_bytes(KV, wire=True)
    assert gathered.end_s == pytest.approx(12 * 1e-5 + 3 * 3e-5 + size / 4 / 2.5e8)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_slow_link_holds_up_all_members(network: str) -> None:
    where, p = on_network(network, ranks={3: 3.0}), split_problem(8)
    for method in all_methods(p):
        if method.name == "all_gather":
            plan, assigned = method.plan(p, "backward", COMPUTE_BOUND), method.assigned(p)
            one, slow = (simulate(plan, assigned, x).makespan_s for x in (on_network(network), where))
            assert one <= slow * (1 + 1e-9)


def test_members_alone_on_their_nodes_take_trees_where_latency_counts() -> None:
    where, group = cluster(gpus_per_node=2), Group(2, 16)
    few, many = (where.algorithm(gather(group), problem(32), size) for size in (10, 10**9))
    assert few is not None and many is not None
    assert (few.name, few.rate_share, many.name) == ("pat", PAT_RATE, "ring")
    assert few.latency_s.max() == pytest.approx(4 * 3e-5 / 3.5 + 16 * 2.8e-6)
    inside = where.algorithm(gather(Group(1, 2)), problem(32), 10)
    assert inside is not None and inside.name == "ring LL"


def test_small_messages_take_protocols_of_short_steps() -> None:
    """NCCL 2.2x, src/graph/tuning.cc: baseLatencies, hwLatencies and getNetOverhead."""
    where, size = cluster(gpus_per_node=8), 1000
    one_node, several = (where.algorithm(gather(Group(1, n)), problem(n), size) for n in (8, 64))
    assert one_node and several and one_node.name == several.name == "ring LL"
    assert one_node.latency_s.max() == pytest.approx(6.6e-6 + 7 * 0.6e-6)
    assert several.latency_s.max() == pytest.approx(6.6e-6 + 56 * 1e-6 + 7 * 2.7e-6)
    large = where.algorithm(gather(Group(1, 64)), problem(64), 10**9)
    assert large is not None and large.name == "ring"


def test_multicast_is_used_where_the_cluster_has_it() -> None:
    p = problem(8, tokens=512)
    plain = cluster(gpus_per_node=8)
    fast = replace(plain, topology=plain.topology.replace(intra=plain.topology.intra.replace(nvls_bytes_per_s=1e9)))
    size = 7 * p.chunk_bytes(KV, wire=True)
    ways = [where.algorithm(gather(Group(1, 8)), p, size) for where in (plain, fast)]
    assert [way and way.name for way in ways] == ["ring", "nvls"]
    method = build("all_gather", {"stride": p.kv_heads})
    spans = simulate(method.plan(p, "forward", COMPUTE_BOUND), p, fast).spans(0)
    assert next(span.end_s for span in spans if span.stream == "kv") == pytest.approx(25e-6 + size / 1e9)
    assert fast.algorithm(gather(Group(1, 16)), problem(16), size).name == "ring"  # pyright: ignore[reportOptionalMemberAccess]


def test_what_the_library_cannot_add_goes_to_its_owner() -> None:
    o, dkv = (ReduceScatter("o", Chunk(tensor, 0, Group(1, 8))) for tensor in (O, DKV))
    nccl, gloo = cluster(), on_network("shared cores")
    p = replace(split_problem(8), dtype="bfloat16", wire_dtype="")
    wide = replace(p, wire_dtype="float32")
    assert all(where.algorithm(o, each, 1) is None for where in (nccl, gloo) for each in (p, wide))
    assert nccl.algorithm(dkv, p, 1) is None, "it would round at every hop"
    assert nccl.algorithm(dkv, wide, 1) is not None and gloo.algorithm(dkv, wide, 1) is None
    exchange = AllToAll("q", Chunk(Q, 0, Group(1, 8)), Chunk(Q.by_heads, 0, Group(8, 1)), Group(1, 8))
    assert nccl.algorithm(exchange, wide, 1) is None
    hops = gloo.algorithm(gather(Group(1, 8)), p, 1)
    assert hops is not None and (hops.name, hops.hops) == ("hops", 7)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_library_sends_as_much_as_messages(network: str) -> None:
    where: Cluster = on_network(network)
    p: Problem = split_problem(8)
    for phase in PHASES:
        totals = []
        for collectives in ("library", "messages"):
            method = build("all_gather", {"stride": 4, "collectives": collectives})
            plan, assigned = method.plan(p, phase, COMPUTE_BOUND), method.assigned(p)
            totals.append(sum(sent for _, sent in account.traffic(plan, assigned, where)))
        np.testing.assert_allclose(*totals)
