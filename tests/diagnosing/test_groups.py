"""The doctor's first look at several GPUs: every group is made and carries a message each way, or is named."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sp_bench.diagnosing import examine
from sp_bench.diagnosing.groups import judge_groups, used_groups
from sp_bench.diagnosing.rank_jobs import message_each_way
from sp_bench.measure.pool import RankFailure
from sp_bench.plan.groups import Group
from tests.support.ranks import WORLD, Ranks


def test_all_groups_of_all_methods_carry_messages(ranks: Ranks) -> None:
    """Over gloo, on real ranks."""
    used = used_groups(WORLD)
    assert {one.group.size for one in used if isinstance(one.group, Group)} == {3, 9}
    (row,) = judge_groups(WORLD, lambda job, one: ranks.run(message_each_way, one))
    assert (row.status, row.found) == ("ok", f"{len(used)} kinds of groups carry a message each way")


def test_groups_are_each_tried_once() -> None:
    for n in (2, 8):
        words = [str(one) for one in used_groups(n)]
        assert max(Counter(words).values()) == 1 and any("collectives" in one for one in words)
        assert any(f"messages of {n} ranks" in one for one in words)


@pytest.mark.parametrize("how", ["raises", "is wrong"])
def test_those_that_fail_are_named(how: str) -> None:
    """One that hangs or dies ends its ranks; others are tried with new ones."""
    used, tried = used_groups(8), []

    def run(job: str, one: Any) -> list[str]:
        assert job == "message_each_way"
        tried.append(one)
        if one == used[2] and how == "raises":
            raise RankFailure(3, "has been silent for 120 s")
        return ["", "rank 1 got [0.0] from ranks [2.0]"] if one == used[2] else ["", ""]

    (row,) = judge_groups(8, run)
    assert tried == used
    assert (row.status, row.check) == ("fail", str(used[2]))
    assert ("silent" in row.found) == (how == "raises")


def test_several_gpus_begin_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the kernels and the links."""
    done: list[str] = []

    class StopError(Exception):
        pass

    def kernels(*_: object) -> list[Any]:
        raise StopError

    monkeypatch.setattr(examine, "judge_groups", lambda ranks, run: done.append(f"groups of {ranks}") or [])
    monkeypatch.setattr(examine, "_kernels", kernels)
    for device, ranks, wanted in (("cuda", 2, ["groups of 2"]), ("cpu", 2, [])):
        done.clear()
        monkeypatch.setattr(examine, "_Ward", NoRanks)
        monkeypatch.setattr(examine, "judge_allocation", lambda *_: [])
        monkeypatch.setattr(examine, "judge_hosts", lambda *_: [])
        monkeypatch.setattr(examine, "judge_settings", lambda *_: [])
        with pytest.raises(StopError):
            examine.examine(ranks, None, device, ("bfloat16",), 64)
        assert done == wanted


class NoRanks:
    """Ranks of which nothing is known."""

    def __init__(self, *_: object) -> None:
        self.n = 2

    def __enter__(self) -> NoRanks:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, job: str, *_: object) -> list[Any]:
        return []
