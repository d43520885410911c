"""Timeouts: the first use of a connection has a longer one."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, cast

import pytest
import torch.distributed.distributed_c10d as c10d

from sp_bench.run.patience import FIRST_USE, before_use, first_timeout, use_of
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


def test_bound_uses_tell_what_uses_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of several on one group."""
    told: list[timedelta] = []
    monkeypatch.setattr(c10d, "_set_pg_timeout", lambda timeout, group: told.append(timeout))
    order, found = (0, 0, 0, 1, 0, 1, 2, 1, 0, 2), list[list[timedelta]]()
    for bound in (True, False):
        told, group = [], cast(Any, Group())
        each = [
            (use_of if bound else partial(partial, before_use))(group, set(uses), SHORT) for uses in ("a", "ab", "c")
        ]
        for place in order:
            each[place]()
        found.append(told)
    assert found[0] == found[1] and len(found[0]) == 6


def test_transfers_that_connect_have_longer(ranks: Ranks) -> None:
    """On groups of gloo, whose timeouts are set and read as NCCL's are: each new peer, each kind of collective."""
    long = FIRST_USE.total_seconds() + 9
    for found in ranks.run(device_jobs.timeouts_of_uses, 9.0):
        assert found == [long, 9, long, 9, long, 9, 9]
