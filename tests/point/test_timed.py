"""Figures of a record from measured times."""

from __future__ import annotations

import pytest

from sp_bench.measure.memory import MemoryPeak
from sp_bench.measure.result import RankResult
from sp_bench.measure.samples import Row, Samples
from sp_bench.point.timed import breakdown_alone, exposed, with_host_share
from sp_bench.records.quantities import Breakdown
from sp_bench.workload import GateErrors


def test_communication_is_exposed_for_no_less_than_no_time() -> None:
    """On overloaded cores blocks alone may take longer than the step. The record says so in a note."""
    alone = Breakdown(compute_ms=7.0, compute_only_ms_median=9.0)
    assert exposed(alone, 10.5) == (Breakdown(compute_ms=7.0, compute_only_ms_median=9.0, exposed_comm_ms=1.5), [])
    found, (note,) = exposed(alone, 8.75)
    assert found.exposed_comm_ms == 0
    assert note.startswith("exposed_comm_ms is 0: the step took 0.25 ms less than its blocks alone")
    assert exposed(Breakdown(compute_ms=7.0), 8.0)[0].exposed_comm_ms == pytest.approx(1)
    assert exposed(Breakdown(), 8.0) == (Breakdown(), [])


def ranks(*, on_gpus: bool) -> list[RankResult]:
    return [RankResult(gate=GateErrors(), memory=MemoryPeak(device_bytes=9 * on_gpus))]


@pytest.mark.parametrize(
    ("host_ms", "on_gpus", "says"), [(8.1, True, True), (8.0, True, False), (8.1, False, False), (None, True, False)]
)
def test_a_step_that_the_host_bounds_says_so(host_ms: float | None, on_gpus: bool, says: bool) -> None:
    """On a CPU the interpreter's time is part of the blocks'."""
    found, notes = with_host_share(Breakdown(interpreter_ms=host_ms), 10.0, ranks(on_gpus=on_gpus))
    assert found.host_share == (host_ms / 10 if host_ms and on_gpus else None)
    assert [note[:42] for note in notes] == ["host-bound: queueing the step takes 81% of"] * says


def test_without_marks_only_the_host_s_time_is_known() -> None:
    """As of a step on GPUs whose parts nobody asked for; of the replay of a graph nothing is."""
    (rank,) = ranks(on_gpus=True)

    class Asked:
        parts = False

    rows = [Row(0, iteration, "forward", "caller", 2e-3, 0.0) for iteration in range(3)]
    found = breakdown_alone(Asked(), Samples.of(rows), [rank])  # pyright: ignore[reportArgumentType]
    assert found == Breakdown(interpreter_ms=2.0)
    assert breakdown_alone(Asked(), Samples.of([]), [rank]) == Breakdown()  # pyright: ignore[reportArgumentType]
