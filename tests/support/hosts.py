"""Descriptions of shaped hosts, and clusters of them."""

from __future__ import annotations

from dataclasses import replace

from sp_bench.cluster import Cluster
from sp_bench.labs.shaped.description import Hosts
from sp_bench.reading import read
from tests.support.clusters import cluster
from tests.support.typed import there

LINK_BYTES_PER_S = 2e7
BURST_BYTES = 32768


def described(**figures: float) -> Hosts:
    """Hosts with links of 20 MB/s, unless `figures` say otherwise."""
    plain = {"link_bytes_per_s": LINK_BYTES_PER_S, "burst_bytes": BURST_BYTES, "payload_share": 0.95, "latency_s": 1e-3}
    return read(Hosts, plain | figures, "cluster.hosts")


def on_hosts(
    cores: int,
    bytes_per_s: float,
    byte_core_s: float,
    link_cores: float = 0.0,
    message_core_s: float = 0.0,
    per_host: int = 1,
) -> Cluster:
    """Hosts whose links have that rate, and messages no latency."""
    hosts = Hosts(
        link_bytes_per_s=2 * bytes_per_s,
        payload_share=0.5,
        burst_bytes=1,
        latency_s=0.0,
        ranks_per_host=per_host,
        byte_core_s=byte_core_s,
        link_cores=link_cores,
        message_core_s=message_core_s,
    )
    where = cluster(gpus_per_node=per_host, bytes_per_s=4 * bytes_per_s)
    inter = there(where.topology.inter).replace(latency_s=0.0, nics_per_node=1)
    return replace(where, cores=cores, hosts=hosts, topology=where.topology.replace(inter=inter))
