"""Shaped hosts for tests, where this machine and user can have them."""

from __future__ import annotations

import pytest

from sp_bench.errors import RequestError
from sp_bench.labs.shaped.description import Hosts
from sp_bench.labs.shaped.hosts import ShapedHosts, refuse_what_can_not_be_made

LINK_BYTES_PER_S = 2e7
BURST_BYTES = 32768


def described(**figures: float) -> Hosts:
    """Hosts with links of 20 MB/s, unless `figures` say otherwise."""
    plain = {"link_bytes_per_s": LINK_BYTES_PER_S, "burst_bytes": BURST_BYTES, "payload_share": 0.95, "latency_s": 1e-3}
    return Hosts.build(plain | figures)


@pytest.fixture(scope="session")
def can_be_made() -> None:
    """Skip a test where hosts can't be made."""
    try:
        refuse_what_can_not_be_made(described())
    except RequestError as error:
        pytest.skip(str(error))


@pytest.fixture
def pair(can_be_made: None) -> ShapedHosts:
    """Two hosts."""
    with ShapedHosts(described(), (0, 1)) as hosts:
        yield hosts
