"""The order in which points are timed."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from sp_bench.measure import job
from sp_bench.measure.spec import RankResult


def order(monkeypatch: pytest.MonkeyPatch, points: int, iters: int, warmup: int) -> list[int]:
    """Which point is done when, those of the warm-up first, on a rank where they do nothing."""
    reported: list[Any] = []
    timed: list[int] = []

    class TimedPoint:
        def __init__(self, index: int, spec: Any) -> None:
            self.index = index

        def iterate(self, iteration: int | None) -> None:
            assert reported[-1] == self.index
            timed.append(self.index)
            numbers.append(iteration)

        def result(self, gate: Any) -> RankResult:
            return RankResult(gate=gate)

    numbers: list[int | None] = []
    monkeypatch.setattr(job, "TimedPoint", TimedPoint)
    monkeypatch.setattr(job, "report", lambda point, step=True: reported.append(point))
    specs = [SimpleNamespace(verify=False, problem=SimpleNamespace(dtype="float32"))] * points
    job.measure(specs, iters, warmup)  # type: ignore[arg-type]
    assert numbers == [None] * warmup * points + [i for i in range(iters) for _ in range(points)]
    return timed


def test_points_are_timed_in_turn_and_none_always_after_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = order(monkeypatch, points=5, iters=20, warmup=2)
    rounds = [timed[i : i + 5] for i in range(0, len(timed), 5)]
    assert all(sorted(points) == [0, 1, 2, 3, 4] for points in rounds) and len(rounds) == 22
    first = Counter(points[0] for points in rounds)
    assert len(first) == 5 and max(first.values()) < 11
    followers = Counter(zip(timed, timed[1:], strict=False))
    assert max(followers.values()) < 11
    assert order(monkeypatch, points=5, iters=20, warmup=2) == timed, "the same on all ranks"
