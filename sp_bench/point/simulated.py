"""Simulate a point."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from sp_bench import account, draw
from sp_bench.check import check_all
from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.plan.ops import BLOCKS
from sp_bench.point.backing import validated
from sp_bench.point.choose import choose_attentions
from sp_bench.point.counted import counted, executed, peaks
from sp_bench.point.outcome import Outcome
from sp_bench.point.request import Request
from sp_bench.point.simulated_record import simulated_record
from sp_bench.point.variants import Choice
from sp_bench.records import Record
from sp_bench.records.quantities import Breakdown, Memory
from sp_bench.records.timeline import SimulatedTimeline
from sp_bench.simulate import WAITING, simulate
from sp_bench.simulate.beside import alone_s, ring_traffic
from sp_bench.simulate.bounds import by_link_class, link_bytes, lower_bounds
from sp_bench.workload.base import SUNK


def outcome(request: Request) -> Outcome:
    """The record of a simulated point with its timeline, its trace and the times of its ranks."""
    record, choice = simulate_point(request)
    return Outcome(record, timeline_of(choice), trace=trace_of(choice, request.trace), ranks=time_by_rank(choice))


def least_compute_s(request: Request) -> float:
    """Seconds that a point's ranks compute by its cluster's figures, without transfers.

    Raises RequestError if no plan fits in memory, or it is too large to simulate.
    """
    every = executed(request.workload, choose_attentions(request))
    return sum(times * request.cluster.least_compute_s(each.runs[phase].work_s) for times, phase, each in every)


def phases_ms(request: Request, cluster: Cluster) -> dict[str, float]:
    """Milliseconds of each phase on a cluster, with the plans that the request's own chooses.

    Raises RequestError as least_compute_s does.
    """
    choice = choose_attentions(request)
    by_phase = {name: 1e3 * _summed_s(request, name, cluster) for name in choice.plans}
    for times, name, each in executed(request.workload, choice):
        by_phase[name] += 1e3 * times * simulate(each.plans[name], each.problem, cluster).makespan_s
    return by_phase


def refuse_unknown(request: Request) -> None:
    """Raise RequestError for what isn't known on this cluster of steps that have more than attention."""
    request.cluster.device.matmul_flops_per_s(request.problem.dtype)
    if request.cluster.stragglers:
        rule = "slow ranks are simulated for the attention only"
        raise RequestError("stragglers", rule, "workload=attention would work")


def simulate_point(request: Request, most_s: float = math.inf) -> tuple[Record, Choice]:
    """The record of a simulated point, and the simulation of its plans. Raises TooSlowError as choose does.

    The chosen plans are proven before their time is recorded. It is one value, so the record has no spread.
    """
    choice = choose_attentions(request, most_s)
    for each in choice.attentions:
        check_all(each.plans, each.problem)
    plans = counted(request, choice)
    runs = [(phase, times, each.runs[phase]) for times, phase, each in executed(request.workload, choice)]
    times_ms = {phase: 1e3 * _summed_s(request, phase, request.cluster) for phase in choice.runs}
    for phase, times, run in runs:
        times_ms[phase] += 1e3 * times * run.makespan_s
    step_ms = sum(times_ms.values())
    by_link, bound_ms, bound_by = _bounds(request, choice)
    busy_ms = 1e3 * np.sum([times * run.busy_s for _, times, run in runs], axis=0)
    inside = Breakdown(
        bound_ms=bound_ms,
        bound_by=bound_by,
        compute_ms=float(busy_ms.max()),
        exposed_comm_ms=step_ms - float(busy_ms.max()),
        rank_idle_ms_max=1e3 * sum(times * float(run.idle_s.max()) for _, times, run in runs),
        rank_imbalance=float(busy_ms.max() / busy_ms.mean()),
    )
    record = simulated_record(
        request,
        choice,
        plans,
        validated(request, choice),
        step_ms=step_ms,
        phases_ms=times_ms,
        inside=inside,
        traffic=replace(plans.traffic, comm_bytes_by_link=by_link),
        memory=_memory(request, choice, plans.memory),
        others=(request.workload.prompt(request.problem), request.workload.described(request.problem)),
        notes=[SUNK] if request.asked().sinks else [],
    )
    return record, choice


def _memory(request: Request, choice: Choice, memory: Memory) -> Memory:
    """The memory of the attention that takes most, with what is held beside it."""
    beside = [request.workload.beside_bytes(request.problem, each.problem) for each in choice.attentions]
    if not any(beside):
        return memory
    peak = max(map(sum, zip(peaks(request, choice.attentions), beside, strict=True)))
    source = "computed from the plans, with the caches of all layers"
    return replace(memory, peak_mem_bytes_max=peak, peak_mem_bytes_expected=peak, peak_mem_source=source)


def _summed_s(request: Request, phase: str, cluster: Cluster) -> float:
    """Seconds of what ranks sum after a phase, the gradient of sinks, by a ring that nothing hides."""
    n, sent = request.problem.n, sum(request.workload.sent_otherwise(phase, request.problem).values())
    return alone_s([cluster.network(n, idle=True)], n, sent, 2 * (n - 1))


def _bounds(request: Request, choice: Choice) -> tuple[dict[str, float], float, str]:
    """(bytes across each class of links per GPU, a lower bound on the step in ms, what sets most of the bound)."""
    network = request.cluster.network(choice.problem.n)
    by_name: dict[str, float] = {}
    crossed = np.zeros(network.link_bytes_per_s.size)
    for times, phase, each in executed(request.workload, choice):
        plan, problem = each.plans[phase], each.problem
        crossing = link_bytes(network, account.traffic(plan, problem, request.cluster))
        least_s = request.cluster.least_compute_s(each.runs[phase].work_s)
        bounds_s = lower_bounds(plan, problem, request.cluster, crossing, least_s)
        if problem.decodes and request.cluster.device.reads_bind(problem):
            bounds_s = {"memory" if key == "compute" else key: seconds for key, seconds in bounds_s.items()}
        name, seconds = max(bounds_s.items(), key=lambda bound: bound[1])
        by_name[name] = by_name.get(name, 0.0) + times * seconds
        crossed += times * crossing
    for phase in choice.runs:
        sent = sum(request.workload.sent_otherwise(phase, request.problem).values())
        if sent:
            crossed += link_bytes(network, ring_traffic(network, choice.problem.n, sent))
    by_link = {name: sent / choice.problem.n for name, sent in by_link_class(network, crossed).items()}
    return by_link, 1e3 * sum(by_name.values()), max(by_name, key=lambda key: by_name[key])


def time_by_rank(choice: Choice) -> dict[str, list[float]]:
    """Each rank's milliseconds, by phase and kind: busy computing, exposed to transfers, idle after its end."""
    by_kind = {}
    for phase, run in choice.runs.items():
        for name, seconds in (("busy", run.busy_s), ("exposed", run.exposed_s), ("idle", run.idle_s)):
            by_kind[f"{phase}_{name}_ms"] = (1e3 * seconds).tolist()
    return by_kind


def timeline_of(choice: Choice) -> SimulatedTimeline:
    """The timeline of the rank that shows best what the step waits for (Run.shown_rank of the longest phase)."""
    runs = max(choice.attentions, key=lambda each: each.total_s).runs
    rank = max(runs.values(), key=lambda run: run.makespan_s).shown_rank
    lanes: dict[str, list[tuple[float, float]]] = {}
    blocks: list[tuple[float, float]] = []
    waits: list[tuple[float, float]] = []
    start_s = 0.0
    for run in runs.values():
        for span in run.waits(rank):
            shown = waits if span.stream == WAITING else lanes.setdefault(span.stream, [])
            shown.append((start_s + span.start_s, start_s + span.end_s))
        computed = (span for span in run.spans(rank) if span.stream == BLOCKS)
        blocks += [(start_s + span.start_s, start_s + span.end_s) for span in computed]
        start_s += run.makespan_s
    return SimulatedTimeline(rank=rank, phases=[*runs], end_s=start_s, lanes=lanes, blocks=blocks, waits=waits)


def trace_of(choice: Choice, ranks: int) -> dict[str, Any] | None:
    """The timelines of the first `ranks` ranks as a Chrome trace, one phase after the other; None for 0 ranks."""
    if not ranks:
        return None
    spans, start_s = [], 0.0
    for phase, run in choice.runs.items():
        for rank in range(min(ranks, choice.problem.n)):
            spans += [(rank, s.stream, s.label, start_s + s.start_s, start_s + s.end_s) for s in run.spans(rank)]
        spans.append((-1, "phases", phase, start_s, start_s + run.makespan_s))
        start_s += run.makespan_s
    return draw.chrome_trace(spans)
