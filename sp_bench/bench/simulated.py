"""One simulated point."""

from __future__ import annotations

from typing import Any

import numpy as np

from sp_bench import account, draw
from sp_bench.bench.choose import Choice, choose
from sp_bench.bench.outcome import account_for, rates_for
from sp_bench.bench.request import Request
from sp_bench.check import check_all
from sp_bench.records import Record
from sp_bench.simulate.bounds import by_link_class, link_bytes, lower_bounds


def simulate_point(request: Request) -> tuple[Record, Choice]:
    """The record of a simulated point, and the simulation behind it.

    The chosen plans are proven first. Times are the model's: one value, no samples, so no spread.
    """
    choice = choose(request)
    check_all(choice.plans, choice.problem)
    record = request.record("ok")
    account_for(record, request, choice)
    record.kernel = request.cluster.device.figures(choice.problem)
    times_ms = {phase: run.makespan_s * 1e3 for phase, run in choice.runs.items()}
    _bounds_for(record, request, choice)
    busy_ms = 1e3 * np.sum([run.busy_s for run in choice.runs.values()], axis=0)
    record.forward_ms_median = times_ms["forward"]
    record.backward_ms_median = times_ms.get("backward")
    record.step_ms_median = sum(times_ms.values())
    record.compute_ms = float(busy_ms.max())
    record.exposed_comm_ms = record.step_ms_median - record.compute_ms
    record.rank_imbalance = float(busy_ms.max() / busy_ms.mean())
    rates_for(record, request)
    return record, choice


def _bounds_for(record: Record, request: Request, choice: Choice) -> None:
    """What the step takes at least and why, and what its links carry."""
    network = request.cluster.network(choice.problem.n)
    by_name: dict[str, float] = {}
    crossed = np.zeros(network.link_bytes_per_s.size)
    for phase, run in choice.runs.items():
        plan = choice.plans[phase]
        crossing = link_bytes(network, account.traffic(plan, choice.problem))
        bounds_s = lower_bounds(
            plan, choice.problem, request.cluster, crossing, request.cluster.least_compute_s(run.work_s)
        )
        name = max(bounds_s, key=lambda key: bounds_s[key])
        by_name[name] = by_name.get(name, 0.0) + bounds_s[name]
        crossed += crossing
    record.bound_ms, record.bound_by = 1e3 * sum(by_name.values()), max(by_name, key=lambda key: by_name[key])
    record.rank_idle_ms_max = 1e3 * sum(float(run.idle_s.max()) for run in choice.runs.values())
    record.comm_bytes_by_link = {
        name: sent / choice.problem.n for name, sent in by_link_class(network, crossed).items()
    }


def time_by_rank(choice: Choice) -> dict[str, list[float]]:
    """By phase and kind, each rank's milliseconds: busy computing, exposed to transfers, idle when it has ended."""
    found = {}
    for phase, run in choice.runs.items():
        for name, seconds in (("busy", run.busy_s), ("exposed", run.exposed_s), ("idle", run.idle_s)):
            found[f"{phase}_{name}_ms"] = (1e3 * seconds).tolist()
    return found


def trace_of(choice: Choice, ranks: int) -> dict[str, Any] | None:
    """The timeline of the first ranks, one phase after the other."""
    if not ranks:
        return None
    spans, start_s = [], 0.0
    for phase, run in choice.runs.items():
        for rank in range(min(ranks, choice.problem.n)):
            spans += [(rank, s.stream, s.label, start_s + s.start_s, start_s + s.end_s) for s in run.spans(rank)]
        spans.append((-1, "phases", phase, start_s, start_s + run.makespan_s))
        start_s += run.makespan_s
    return draw.chrome_trace(spans)
