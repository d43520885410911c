"""Random traffic on random clusters: the flow solver on routes against the exact reference, and conserved bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.cluster.topology import Network, Topology
from sp_bench.simulate.flows import Solver, solve
from tests.support.flow_graphs import RELATIVE, SOLVERS, Task, assert_within_capacity, exact_finish_s, graph_of
from tests.support.marks import exhaustive
from tests.support.topologies import FULL_MESH, NICS, SOCKETS, SWITCH, config

Case = tuple[Network, list[Task]]


@st.composite
def fabrics(draw: st.DrawFn) -> Network:
    """2 to 4 nodes of 4 GPUs behind leaf switches of any oversubscription, with NICs shared or not, any placement."""
    nics = {**NICS, "nics_per_node": draw(st.sampled_from([None, 1, 2]))}
    if draw(st.booleans()):
        nics["flow_bytes_per_s"] = draw(st.floats(0.2e9, 2e9))
    intra = draw(st.sampled_from([SWITCH, FULL_MESH, {**SOCKETS, "gpus_per_socket": 2, "gpus_per_switch": 1}]))
    fabric = {
        "nodes_per_leaf": draw(st.integers(1, 2)),
        "oversubscription": draw(st.one_of(st.sampled_from([1.0, 2.0, 4.0]), st.floats(1.0, 9.0))),
        "latency_s": draw(st.sampled_from([0.0, 1e-4])),
    }
    n = 4 * draw(st.integers(2, 4))
    placement = draw(st.one_of(st.sampled_from(["block", "cyclic"]), st.permutations(range(n))))
    return Topology.build(config(4, intra, nics, fabric=fabric, placement=placement)).network(n)


@st.composite
def traffic(draw: st.DrawFn) -> Case:
    """Rounds of random permutations of the ranks, unlike sizes, and computations of unlike length between them.

    A rank's send waits for its own send and receive of the round before, and for what it then computed, so that rounds
    drift apart and every round meets the traffic of others.
    """
    network = draw(fabrics())
    n, rng = network.gpu.size, np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tasks: list[Task] = []
    before: list[tuple[int, ...]] = [() for _ in range(n)]
    for _ in range(draw(st.integers(1, 3))):
        targets = rng.permutation(n)
        routes = network.routes(np.arange(n), targets)
        send, compute = len(tasks), len(tasks) + n
        for rank, (latency_s, links, cap) in enumerate(
            zip(routes.latency_s, routes.links, routes.rate_cap, strict=True)
        ):
            moves = targets[rank] != rank
            size = float(rng.uniform(1e5, 1e8)) if moves else 0.0
            path = tuple(int(link) for link in links if link >= 0)
            tasks.append(Task(float(latency_s) * rng.uniform(0.5, 2), size, path, before[rank], float(cap)))
        received = np.argsort(targets)
        tasks += [Task(float(rng.uniform(0, 0.05)), after=(send + int(received[rank]),)) for rank in range(n)]
        before = [(send + rank, send + int(received[rank]), compute + rank) for rank in range(n)]
    return network, tasks


@pytest.mark.parametrize("solver", [exhaustive(SOLVERS[0]), *SOLVERS[1:]])
@given(case=traffic())
def test_random_traffic_agrees_with_the_exact_reference(solver: Solver, case: Case) -> None:
    network, tasks = case
    timing = solve(graph_of(tasks, network.link_bytes_per_s), solver)
    exact = exact_finish_s(tasks, network.link_bytes_per_s.tolist())
    np.testing.assert_allclose(timing.finish_s, exact, rtol=RELATIVE, atol=0)


@given(case=traffic())
def test_no_link_of_a_fabric_carries_more_than_its_rate(case: Case) -> None:
    network, tasks = case
    rates = network.link_bytes_per_s.tolist()
    timing = solve(graph_of(tasks, rates), "python")
    for task, start_s, finish_s in zip(tasks, timing.start_s, timing.finish_s, strict=True):
        narrowest = min([task.cap, *(rates[link] for link in task.path)], default=math.inf)
        alone_s = task.delay_s + (task.bytes / narrowest if task.bytes else 0.0)
        assert finish_s - start_s >= alone_s * (1 - RELATIVE) - 1e-15
    assert_within_capacity(tasks, rates, timing)


@given(case=traffic())
def test_what_leaves_arrives(case: Case) -> None:
    """By class of links: as many bytes into ports, NICs, leaf switches, ... as out of them."""
    network, tasks = case
    crossed = np.zeros(network.link_bytes_per_s.size)
    for task in tasks:
        crossed[list(task.path)] += task.bytes
    out = {name.removesuffix(" out"): at for name, at in network.first_link.items() if name.endswith(" out")}
    for name, start in out.items():
        into = network.first_link[f"{name} in"]
        count = into - start if into > start else start - into
        sent, received = crossed[start : start + count].sum(), crossed[into : into + count].sum()
        assert sent == pytest.approx(received, rel=1e-12)
