"""Tori and meshes: which links a transfer crosses, and what they carry."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from sp_bench.cluster import Cluster
from sp_bench.cluster.topology import Network, Topology
from sp_bench.errors import RequestError
from sp_bench.methods import build
from sp_bench.plan import Problem
from sp_bench.resources import conf_content, conf_files
from sp_bench.simulate import simulate
from tests.support.problems import mask_of
from tests.support.topologies import config

SHAPES = ((4,), (2, 4), (2, 4, 2), (3, 5), (1, 6))


def joined(shape: tuple[int, ...], *, wrap: bool, nodes: int = 1) -> Network:
    intra = {"kind": "torus", "shape": list(shape), "wrap": wrap, "bytes_per_s": 1e9, "latency_s": 1e-6}
    n = int(np.prod(shape))
    return Topology.build(config(n, intra)).network(n * nodes)


def walked(network: Network, shape: tuple[int, ...], source: int, target: int) -> tuple[int, int]:
    """(where a route ends, how many links it has), followed link by link."""
    node, at, steps = int(np.prod(shape)), source, 0
    for wire in network.routes(np.array([source]), np.array([target])).links[0]:
        if wire < 0:
            continue
        place, down = divmod(int(wire) - network.first_link["wire"], 2)
        gpu, dimension = divmod(place, len(shape))
        assert gpu == at, "a link begins where the one before ends"
        there = list(np.unravel_index(gpu % node, shape))
        there[dimension] = (there[dimension] + (-1 if down else 1)) % shape[dimension]
        at, steps = gpu // node * node + int(np.ravel_multi_index(there, shape)), steps + 1
    return at, steps


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_routes_go_from_neighbour_to_neighbour_the_shortest_way(shape: tuple[int, ...], wrap: bool) -> None:
    network, n = joined(shape, wrap=wrap), int(np.prod(shape))
    for source, target in product(range(n), repeat=2):
        apart = [
            abs(a - b) for a, b in zip(np.unravel_index(source, shape), np.unravel_index(target, shape), strict=True)
        ]
        if wrap:
            apart = [min(d, size - d) for d, size in zip(apart, shape, strict=True)]
        assert walked(network, shape, source, target) == (target, sum(apart))


def test_each_node_has_links_of_its_own() -> None:
    network = joined((2, 2), wrap=False, nodes=2)
    assert walked(network, (2, 2), 4, 7) == (7, 2)
    one, other = (network.routes(np.array([a]), np.array([a + 3])).links[0] for a in (0, 4))
    assert not set(one[one >= 0]) & set(other[other >= 0])


def test_a_mesh_has_no_way_round() -> None:
    assert walked(joined((4,), wrap=True), (4,), 0, 3) == (3, 1)
    assert walked(joined((4,), wrap=False), (4,), 0, 3) == (3, 3)


def test_its_shape_is_that_of_its_node() -> None:
    intra = {"kind": "torus", "shape": [2, 2], "bytes_per_s": 1e9, "latency_s": 0.0}
    with pytest.raises(
        RequestError, match=r"intra.shape=\[2, 2\]: must have gpus_per_node=8 GPUs; gpus_per_node=4 would"
    ):
        Topology.build(config(8, intra))


def test_rings_on_a_tpu_slice_take_one_link_at_a_time() -> None:
    """With 16 ranks, K and V go from neighbour to neighbour but where a row ends; no link carries two at once."""
    files = conf_files("cluster")
    cluster = Cluster.build(conf_content(files["tpuv4"], files))
    layout = mask_of(False).layout("contiguous")
    p = Problem(n=16, seqlen=2**16, heads=16, kv_heads=16, head_dim=128, mask=mask_of(False), layout=layout)
    sent = 2 * 2 * 4096 * 16 * 128
    plan = build("ring", {}).plan(p, "forward", cluster.profile(p))
    run = simulate(plan, p, cluster)
    assert run.makespan_s >= 15 * sent / 4.5e10
    assert run.makespan_s < 1.05 * max(15 * sent / 4.5e10, float(run.busy_s.max()))
