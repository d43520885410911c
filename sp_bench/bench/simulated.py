"""One simulated point."""

from __future__ import annotations

import numpy as np

from sp_bench.bench.choose import Choice, choose
from sp_bench.bench.outcome import account_for, rates_for
from sp_bench.bench.request import Request
from sp_bench.check import check_all
from sp_bench.records import Record


def simulate_point(request: Request) -> tuple[Record, Choice]:
    """The record of a simulated point, and the simulation behind it.

    The chosen plans are proven first. Times are the model's: one value, no samples, so no spread.
    """
    choice = choose(request)
    check_all(choice.plans, choice.problem)
    record = request.record("ok")
    account_for(record, request, choice)
    record.kernel = "published"
    times_ms = {phase: run.makespan_s * 1e3 for phase, run in choice.runs.items()}
    busy_ms = 1e3 * np.sum([run.busy_s for run in choice.runs.values()], axis=0)
    record.forward_ms_median = times_ms["forward"]
    record.backward_ms_median = times_ms.get("backward")
    record.step_ms_median = sum(times_ms.values())
    record.compute_ms = float(busy_ms.max())
    record.exposed_comm_ms = record.step_ms_median - record.compute_ms
    record.rank_imbalance = float(busy_ms.max() / busy_ms.mean())
    rates_for(record, request)
    return record, choice
