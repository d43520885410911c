"""One section of a cluster file says what hosts are made and what is simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sp_bench.cli.compose import Composer
from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.labs.shaped.description import Hosts
from sp_bench.reading import read
from tests.support.clusters import problem

with Composer() as composer:
    SHAPED = dict(composer.compose(["cluster=shaped"])["cluster"])
LINK_BYTES_PER_S = 1e7
SHARE = 0.9


def cluster(**hosts: Any) -> Cluster:
    """The file's cluster, with links of 10 MB/s of which messages get 90%."""
    plain = {"link_bytes_per_s": LINK_BYTES_PER_S, "payload_share": SHARE, "flow_bytes_per_s": None}
    return Cluster.build(SHAPED | {"hosts": SHAPED["hosts"] | plain | hosts})


def alone_bytes_per_s(of: Cluster, gpus: int, *pair: int) -> float:
    """The rate that one message between two ranks gets."""
    network = of.network(gpus)
    source, target = (np.array([rank]) for rank in pair)
    return float(network.alone_bytes_per_s(network.routes(source, target))[0])


def test_a_host_is_a_node_and_its_link_the_nic() -> None:
    four = cluster(ranks_per_host=2, latency_s=0.25, crowd_latency_s=0.0)
    assert four.node_of(6).tolist() == [0, 0, 1, 1, 2, 2]
    assert alone_bytes_per_s(four, 6, 0, 5) == SHARE * LINK_BYTES_PER_S
    assert alone_bytes_per_s(four, 6, 0, 1) == four.topology.intra.bytes_per_s
    routes = four.network(6).routes(np.array([0, 0]), np.array([5, 1]))
    assert routes.latency_s.tolist() == [0.25, four.topology.intra.latency_s]
    assert routes.inter.tolist() == [True, False]


def test_messages_wait_longer_for_cores_that_more_ranks_share() -> None:
    crowded = replace(cluster(latency_s=0.25, crowd_latency_s=0.5), cores=2)
    ends = np.array([0]), np.array([1])
    assert [crowded.network(n).routes(*ends).latency_s[0] for n in (2, 4, 8)] == [0.25, 0.75, 1.75]
    p = problem(8)
    assert crowded.profile(p).inter_latency_s == 1.75
    assert crowded.profile(p).intra_latency_s == crowded.topology.intra.latency_s


def test_hosts_of_a_leaf_share_its_uplink() -> None:
    leaves = cluster(
        hosts_per_leaf=2, uplink_bytes_per_s=4e6, uplink_latency_s=0.5, latency_s=0.25, crowd_latency_s=0.0
    )
    assert alone_bytes_per_s(leaves, 4, 0, 1) == SHARE * LINK_BYTES_PER_S
    assert alone_bytes_per_s(leaves, 4, 0, 2) == pytest.approx(SHARE * 4e6)
    assert leaves.network(4).routes(np.array([0, 0]), np.array([1, 2])).latency_s.tolist() == [0.25, 0.75]


def test_an_uplink_that_is_never_full_does_not_limit() -> None:
    leaves = cluster(hosts_per_leaf=2, uplink_bytes_per_s=1e9)
    assert alone_bytes_per_s(leaves, 4, 0, 2) == SHARE * LINK_BYTES_PER_S


def test_cores_limit_a_message() -> None:
    assert alone_bytes_per_s(cluster(flow_bytes_per_s=5e6), 2, 0, 1) == 5e6


def test_hosts_are_used_whole() -> None:
    with pytest.raises(RequestError, match="gpus=5: nodes of shaped have 2 GPUs, and are used whole; gpus=4 or 6"):
        cluster(ranks_per_host=2).refuse(5)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ({"link_bytes_per_s": 0}, "cluster.hosts.link_bytes_per_s=0: must be a finite number above 0"),
        ({"link_bytes_per_s": None}, "cluster.hosts.link_bytes_per_s=null: must be a finite number above 0"),
        ({"burst_bytes": 1.5}, "cluster.hosts.burst_bytes=1.5: must be a whole number of at least 1"),
        ({"ranks_per_host": 0}, "cluster.hosts.ranks_per_host=0: must be a whole number"),
        (
            {"payload_share": 1.5},
            "cluster.hosts.payload_share=1.5: must be .* at most 1; cluster.hosts.payload_share",
        ),
        ({"latency_s": -1}, "cluster.hosts.latency_s=-1: must be a finite number of at least 0"),
        ({"hosts_per_leaf": 2}, "cluster.hosts.hosts_per_leaf=2: goes with uplink_bytes_per_s, which is None; both"),
        ({"uplink_bytes_per_s": 1e6}, "cluster.hosts.hosts_per_leaf=None: goes with uplink_bytes_per_s, which is 1000"),
        ({"link_bytes": 1}, "cluster.hosts.link_bytes: there is no such key; did you mean cluster.hosts.link_bytes"),
    ],
)
def test_bad_figures_are_refused(hosts: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        cluster(**hosts)


def test_all_of_it_must_be_there() -> None:
    with pytest.raises(RequestError, match="cluster.hosts.link_bytes_per_s: is missing"):
        read(Hosts, {"burst_bytes": 32768}, "cluster.hosts")
    with pytest.raises(RequestError, match="cluster.gpus_per_node: is missing"):
        Cluster.build({key: value for key, value in SHAPED.items() if key not in ("hosts", "gpus_per_node")})


def test_what_follows_from_hosts_is_not_given_twice() -> None:
    with pytest.raises(RequestError, match="cluster.inter: follows from cluster.hosts; cluster without inter would"):
        Cluster.build(SHAPED | {"inter": {"bytes_per_s": 1.0, "latency_s": 1.0}})


def test_a_laboratory_is_found_by_its_name() -> None:
    """Files that name none have hosts of this one."""
    unnamed = Cluster.build({key: value for key, value in SHAPED.items() if key != "lab"})
    assert isinstance(unnamed.hosts, Hosts) and unnamed.hosts == Cluster.build(SHAPED).hosts
    with pytest.raises(RequestError, match=r"cluster.lab=shape: there is no such lab; did you mean shaped\?"):
        Cluster.build(SHAPED | {"lab": "shape"})
