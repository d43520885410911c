"""Points that share a process: packed by a GPU's memory, and tried again alone where it wasn't enough."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import account
from sp_bench.cli.compose import Composer
from sp_bench.machine import Devices
from sp_bench.measure.pool import RankError
from sp_bench.point import Request, measured, resolve
from sp_bench.point.measured import USABLE, packs
from sp_bench.point.outcome import Outcome
from sp_bench.workload import Spec


@given(st.lists(st.integers(0, 10), min_size=1, max_size=12), st.integers(1, 20))
def test_packs_fit_and_have_every_point_once(sizes: list[int], capacity: int) -> None:
    found = packs(sizes, capacity)
    assert sorted(i for pack in found for i in pack) == list(range(len(sizes)))
    assert all(pack == sorted(pack) for pack in found)
    assert all(len(pack) == 1 or sum(sizes[i] for i in pack) <= capacity for pack in found)
    assert packs(sizes, None) == [list(range(len(sizes)))]


class Card:
    """A pool of ranks on GPUs: points keep what they have, as torch's allocator does, and the gate runs first."""

    def __init__(self, memory_bytes: float, more: float = 1.0) -> None:
        self.memory_bytes, self.more = memory_bytes, more
        self.seen: list[list[str]] = []

    def run(self, job: str, specs: list[Spec], *args: Any, **kwargs: Any) -> list[list[str]]:
        held = 0.0
        self.seen.append([spec.plans["forward"].ops[0].__class__.__name__ for spec in specs])
        for index, spec in enumerate(specs):
            held += self.more * account.peak_bytes(spec.plans.values(), spec.problem)
            if held > self.memory_bytes:
                error = RankError(0, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", None)
                error.progress = index
                raise error
        return [["result"] * len(specs)]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Ring, Mesh and TokenRing on an 80 GB card: each alone has room, and all together don't."""
    methods = ("ring", "mesh", "tokenring")
    with Composer() as composer:
        points = [
            resolve(composer.compose((f"method={m}", "gpus=8", "seqlen=1M", "cluster=h100_ndr400"))) for m in methods
        ]
    monkeypatch.setattr(measured, "homes_for", lambda *args, **how: None)
    monkeypatch.setattr(measured, "ranks_by_host", lambda pool: {"here": [0]})
    monkeypatch.setattr(
        measured, "outcome_of", lambda request, *args: Outcome(request.record("ok", notes=request.notes))
    )
    return [replace(point, mode="measure", devices=Devices(kind="cuda")) for point in points]


def run(card: Card, points: list[Request], monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    @contextmanager
    def ranks(*args: Any) -> Any:
        yield card

    monkeypatch.setattr(measured, "open_ranks", ranks)
    return measured.measure_points(points, lambda steps: None)


def test_a_sweep_that_is_larger_than_the_card_is_measured_in_packs(
    sweep: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(80e9)
    sizes = [measured._least_bytes(point, measured.choose_attentions(point)) for point in sweep]
    assert max(sizes) < USABLE * 80e9 < sum(sizes)
    outcomes = run(card, sweep, monkeypatch)
    assert [outcome.record.status for outcome in outcomes] == ["ok"] * 3
    assert [outcome.record.method for outcome in outcomes] == ["ring", "mesh", "tokenring"]
    assert 1 < len(card.seen) <= 3
    notes = [note for outcome in outcomes for note in outcome.record.notes or () if "timed in turn with" in note]
    assert len(notes) == 3


def test_what_runs_out_of_memory_beside_others_is_tried_alone(
    sweep: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels take more than the plans say; then a point alone decides."""
    sizes = [measured._least_bytes(point, measured.choose_attentions(point)) for point in sweep]
    beside = Card(80e9, more=min(80e9 / max(sizes), 1.3))
    assert [o.record.status for o in run(beside, sweep, monkeypatch)] == ["ok"] * 3
    small = Card(max(sizes) * 0.99)
    statuses = [o.record.status for o in run(small, sweep, monkeypatch)]
    assert statuses == ["oom" if size == max(sizes) else "ok" for size in sizes]
