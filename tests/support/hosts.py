"""A description of shaped hosts."""

from __future__ import annotations

from sp_bench.labs.shaped.description import Hosts

LINK_BYTES_PER_S = 2e7


BURST_BYTES = 32768


def described(**figures: float) -> Hosts:
    """Hosts with links of 20 MB/s, unless `figures` say otherwise."""
    plain = {"link_bytes_per_s": LINK_BYTES_PER_S, "burst_bytes": BURST_BYTES, "payload_share": 0.95, "latency_s": 1e-3}
    return Hosts.build(plain | figures)
