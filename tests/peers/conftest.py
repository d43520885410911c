"""Pools of as many ranks as a case has: peers take all of them, and leave their packages' state behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sp_bench.measure.pool import RankPool


@pytest.fixture(scope="package")
def world() -> Iterator[Callable[[int], RankPool]]:
    """The pool of n ranks, started at its first use and again after a test has ended it."""
    pools: dict[int, RankPool] = {}

    def of(n: int) -> RankPool:
        if n not in pools or not pools[n].alive:
            pools[n] = RankPool(n, timeout_s=120.0)
        return pools[n]

    yield of
    for pool in pools.values():
        pool.close()
