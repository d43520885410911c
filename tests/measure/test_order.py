"""The order in which points are timed."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from sp_bench.measure import job
from sp_bench.measure.result import MemoryPeak, RankResult
from sp_bench.run.executor import Action
from sp_bench.workload import RankContext


def order(monkeypatch: pytest.MonkeyPatch, points: int, iters: int, warmup: int) -> list[int]:
    """The order in which points are done, those of the warm-up first, on a rank where they do nothing."""
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


@pytest.mark.parametrize("graphs", [True, False])
def test_the_memory_of_graphs_is_that_of_their_capture(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it, parts are captured: in no iteration that is timed, and in no memory that is measured."""
    done: list[str] = []

    class Step:
        sent_bytes: ClassVar[Counter[tuple[str, ...]]] = Counter()
        engine = SimpleNamespace(transport=SimpleNamespace(outside_bytes=0))

        def untimed(self) -> None: ...

        def capture(self) -> None:
            done.append("capture")

        def run(self, phase: str, action: Action, live: Any = None) -> None:
            done.append(action.value if live is None else "counted")

        def memory(self) -> dict[str, int]:
            return {}

    class Memory:
        def __init__(self, device: Any) -> None: ...

        def forget_peak(self) -> None:
            done.append("forget")

        def peak(self, live_bytes: int, outside_bytes: int) -> MemoryPeak:
            done.append("peak")
            return MemoryPeak()

    no_transport = lambda *_: pytest.fail("nothing is transferred")  # noqa: E731
    context = RankContext(0, torch.device("cpu"), no_transport, alive=lambda: None, cuda_graph=graphs)
    monkeypatch.setattr(job, "_context", lambda index, spec: context)
    monkeypatch.setattr(job, "MemoryWatch", Memory)
    workload = SimpleNamespace(phases=("forward",), prepare=lambda spec, context: Step())
    asked = SimpleNamespace(workload=workload, alone=None, verify=False, parts=True)
    job.TimedPoint(0, asked)  # type: ignore[arg-type]
    whole = ["forget", "counted"]
    of_graphs = ["forget", "capture", "peak", Action.COMPUTE.value, Action.COMMUNICATION.value]
    assert done == [*whole, *(of_graphs if graphs else ["peak"])]
