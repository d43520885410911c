"""Fixtures that the tests of sp_bench.conform share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sp_bench.conform.ranks import Worlds


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds() as made:
        yield made
