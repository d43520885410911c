"""Shaped hosts for tests, where this machine and user can have them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sp_bench.errors import RequestError
from sp_bench.labs.shaped.hosts import ShapedHosts, refuse
from tests.support.hosts import described


@pytest.fixture(scope="session")
def can_be_made() -> None:
    """Skip a test where hosts can't be made."""
    try:
        refuse(described())
    except RequestError as error:
        pytest.skip(str(error))


@pytest.fixture
def pair(can_be_made: None) -> Iterator[ShapedHosts]:
    """Two hosts with a link between them."""
    with ShapedHosts(described(), (0, 1)) as hosts:
        yield hosts
