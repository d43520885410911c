"""Ranks begin phases together: by the hosts' barrier and, on GPUs, one on their streams."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sp_bench.measure import devices, start
from sp_bench.measure.samples import START, Row, Samples
from sp_bench.point.timed import start_skew_ms
from sp_bench.run.devices import clock_of
from sp_bench.run.patience import first_timeout
from tests.measure import jobs
from tests.support.ranks import WORLD, Ranks


def test_on_a_stream_ranks_wait_where_the_phase_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The all-reduce is queued behind the hosts' barrier, and the phase's mark behind it."""
    events: list[Any] = []

    class Clock:
        def mark(self) -> int:
            events.append("mark")
            return len(events)

        def seconds(self, began: int, ended: int) -> int:
            return ended - began

        def delay(self) -> None:
            events.append("a short wait is queued")

    class Work:
        def wait(self) -> None:
            events.append("the stream waits")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda: events.append("hosts meet"))
    monkeypatch.setattr(dist, "all_reduce", lambda x, group, async_op: events.append((group, async_op)) or Work())
    together = start.Start(Clock(), torch.device("cpu"), "group")  # pyright: ignore
    assert together.waited_s(together.together()) == 3
    queued = ["hosts meet", "a short wait is queued"]
    assert events == [*queued, "mark", ("group", True), "the stream waits", "mark"]
    events.clear()
    alone = start.Start(Clock(), torch.device("cpu"), None)  # pyright: ignore
    assert alone.waited_s(alone.together()) is None
    assert events == [*queued, "mark"], "the phase's launches follow while the GPU is in the wait"


def test_a_gpus_short_wait_is_a_kernel_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", asked.append)
    clock_of(torch.device("cuda", 0)).delay()
    clock_of(torch.device("cpu")).delay()
    assert len(asked) == 1 and 1e-4 < asked[0] / 2e9 < 5e-3, "seconds at 2 GHz"


def test_the_communicator_of_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes one CTA, and is for GPUs that ranks have for themselves."""

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self._timeout, self.config = None, SimpleNamespace(max_ctas=-1)

    asked: list[Any] = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("NCCL", (), {"Options": Options}), raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="world"))
    monkeypatch.setattr(start, "own_group", lambda *ranks, **how: asked.append((ranks, how)) or "group")
    monkeypatch.setattr(start.torch, "zeros", lambda size, device: device)
    for name, value in {"devices": devices.Devices(kind="cuda"), "index": 1, "group_timeout": timedelta(9)}.items():
        monkeypatch.setattr(devices._Process, name, value)
    assert devices.start_here(None)._group == "group"  # pyright: ignore[reportArgumentType]
    ((ranks, how),) = asked
    assert (ranks, how["backend"]) == (("world", range(4), "start of phases"), "nccl")
    assert how["options"].config.max_ctas == 1
    assert how["timeout"] == how["options"]._timeout == first_timeout(timedelta(9))
    monkeypatch.setattr(devices._Process, "devices", devices.Devices(kind="cuda", shared=True))
    assert devices.start_here(None)._group is None  # pyright: ignore[reportArgumentType]


def test_ranks_wait_for_each_other(ranks: Ranks) -> None:
    for found in ranks.run(jobs.begin_together, True):
        assert len(found) == 3 and all(waited_s >= 0 for waited_s in found)
    assert ranks.run(jobs.begin_together, False) == [[None] * 3] * WORLD


def test_the_skew_of_starts_is_that_of_the_phase_with_most() -> None:
    waited_s = {"forward": [[0.1, 0.3, 0.2], [0.0, 0.0, 0.0]], "backward": [[0.5, 0.0, 0.0], [0.4, 0.0, 0.1]]}
    rows = [
        Row(rank, i, phase, START, seconds)
        for phase, of_phase in waited_s.items() for rank, row in enumerate(of_phase) for i, seconds in enumerate(row)
    ]  # fmt: skip
    assert start_skew_ms(("forward", "backward"), Samples.of(rows)) == pytest.approx(200)
    assert start_skew_ms(("forward",), Samples.of([])) is None
