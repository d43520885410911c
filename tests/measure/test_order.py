"""The order in which points are timed."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from sp_bench.measure import job


def orders(monkeypatch: pytest.MonkeyPatch, points: int, iters: int, warmup: int) -> tuple[list[int], list[list[int]]]:
    """What warm up, and what is timed, iteration by iteration, on a rank whose points do nothing."""
    reported: list[Any] = []
    timed: list[int] = []

    class Bench:
        engine = SimpleNamespace(kernel_name=lambda: "none", close=lambda: None)

        def __init__(self, spec: Any) -> None:
            self.spec = spec

        def watch_memory(self, result: Any) -> None: ...

        def step(self, result: Any) -> None:
            assert reported[-1] == self.spec.index
            timed.append(self.spec.index)

        def finite(self) -> bool:
            return True

    monkeypatch.setattr(job, "_Bench", Bench)
    monkeypatch.setattr(job, "report", reported.append)
    monkeypatch.setattr(job, "described", dict)
    problem = SimpleNamespace(dtype="float32")
    specs = [SimpleNamespace(index=i, verify=False, alone=None, problem=problem) for i in range(points)]
    job.measure(specs, iters, warmup)  # type: ignore[arg-type]
    rounds = [timed[i : i + points] for i in range(0, len(timed), points)]
    return timed, rounds


def test_points_are_timed_in_turn_and_none_always_after_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, rounds = orders(monkeypatch, points=5, iters=20, warmup=2)
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in rounds) and len(rounds) == 22
    first = Counter(order[0] for order in rounds)
    assert len(first) == 5 and max(first.values()) < 11
    followers = Counter(zip(timed, timed[1:], strict=False))
    assert max(followers.values()) < 11
    assert orders(monkeypatch, points=5, iters=20, warmup=2) == (timed, rounds), "the same on all ranks"
