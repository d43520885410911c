"""Timeouts: the first use of a connection has a longer one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed.distributed_c10d as c10d

from sp_bench.run.patience import FIRST_USE, before_use, first_timeout
from tests.run import device_jobs
from tests.support.ranks import Ranks

SHORT = timedelta(seconds=9)


class Group:
    """In a process group's place."""


def test_a_timeout_is_told_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[timedelta, Group]] = []
    monkeypatch.setattr(c10d, "_set_pg_timeout", lambda timeout, group: told.append((timeout, group)))
    one, other, long = Group(), Group(), first_timeout(SHORT)
    for group, uses in ((one, "a"), (one, "b"), (one, "ab"), (other, "a"), (one, "a"), (one, "ac"), (one, "c")):
        before_use(group, set(uses), SHORT)  # pyright: ignore[reportArgumentType]
    assert told == [(long, one), (SHORT, one), (long, other), (long, one), (SHORT, one)]


def test_transfers_that_connect_have_longer(ranks: Ranks) -> None:
    """On groups of gloo, whose timeouts are set and read as NCCL's are: each new peer, each kind of collective."""
    long = FIRST_USE.total_seconds() + 9
    for found in ranks.run(device_jobs.timeouts_of_uses, 9.0):
        assert found == [long, 9, long, 9, long, 9, 9]
