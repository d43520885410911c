"""Compare the traced operations of a point with its simulation, and fit the cluster's figures to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from sp_bench.calibrating.cluster_file import rounded
from sp_bench.calibrating.speed import at_speed
from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.lower.staging import is_sum
from sp_bench.plan.ops import AllGather, Plan, ReduceScatter, Transfer
from sp_bench.plan.schedule import Segment
from sp_bench.plan.transfers import peers
from sp_bench.point import Request
from sp_bench.point.choose import choose
from sp_bench.point.variants import Choice
from sp_bench.run.annotations import Mark
from sp_bench.simulate import Run, simulate
from sp_bench.tracing.kineto import Sample, Trace

BLOCKS, INSIDE, ACROSS = "blocks", "inside nodes", "across nodes"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A transfer, or operations of blocks without a wait between them, on the ranks that were traced."""

    phase: str
    label: str
    kind: str
    """blocks, or a transfer's inside nodes or across nodes."""
    measured_s: float
    """The median over executions. Of blocks the mean over ranks; of a transfer the fastest rank's: a rank that is early
    waits for its peer within the transfer."""
    simulated_s: float

    @property
    def error(self) -> float:
        """simulated / measured - 1."""
        return self.simulated_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The time of a phase on the slowest of the traced ranks, in seconds."""

    phase: str
    measured_s: float
    simulated_s: float
    refit_s: float


def compared(request: Request, traces: Mapping[int, Trace]) -> tuple[list[Row], Choice]:
    """A row for each item of the simulation, and the simulated choice. `traces` are by rank.

    Traces of another's code, which names no operations, have rows for transfers only (`by_kernels`).
    Raises RequestError if an operation of the plans is not in a trace: it is of another point.
    """
    choice = choose(request)
    traces = {rank: trace if trace.ops else by_kernels(trace, choice.plans, rank) for rank, trace in traces.items()}
    rows = [row for phase, run in choice.runs.items() for row in _rows(phase, run, request.cluster, traces)]
    return rows, choice


def by_kernels(trace: Trace, plans: Mapping[str, Plan], rank: int) -> Trace:
    """A trace of another's code with the plans' transfers: NCCL's kernels of each kind, in order, step for step.

    Raises RequestError if it doesn't have as many in each step as the plans: it is of another algorithm.
    """
    marks: dict[str, list[Mark]] = {}
    for phase, plan in plans.items():
        for index, op in plan.transfers:
            if any(group.member(rank, shift) != rank for group, shift in peers(op)):
                marks.setdefault(_kernel_of(op), []).append(Mark(phase, index))
    ops: dict[Mark, list[Sample]] = {}
    for kernel, of_step in marks.items():
        kernels = [one for one in trace.collectives if one.name == kernel]
        if not kernels or len(kernels) % len(of_step):
            rule = f"has {len(kernels)} {kernel} kernels of NCCL, and a step of the plan {len(of_step)}"
            fix = "whole steps of the point's algorithm would work"
            raise RequestError(f"the trace of rank {rank}", rule, fix)
        for i, one in enumerate(kernels):
            sample = Sample(start_s=one.start_s, end_s=one.start_s + one.seconds)
            ops.setdefault(of_step[i % len(of_step)], []).append(sample)
    return replace(trace, ops=ops)


def _kernel_of(op: Transfer) -> str:
    """The name of NCCL's kernel for a transfer; an all-to-all is sends and receives."""
    if isinstance(op, AllGather):
        return "AllGather"
    return "ReduceScatter" if isinstance(op, ReduceScatter) and is_sum(op) else "SendRecv"


def _rows(phase: str, run: Run, cluster: Cluster, traces: Mapping[int, Trace]) -> list[Row]:
    node, rows = cluster.node_of(run.plan.n), []
    spans = {rank: run.spans(rank) for rank in traces}
    for i, item in enumerate(run.graph.items):
        indices = item.what.ops if isinstance(item.what, Segment) else [item.what]
        measured = [
            sum(_median_s(trace, Mark(phase, index), rank) for index in indices) for rank, trace in traces.items()
        ]
        simulated = [spans[rank][i].end_s - spans[rank][i].start_s for rank in traces]
        op = run.plan.ops[indices[0]]
        kind, over_ranks = BLOCKS, np.mean
        if isinstance(op, Transfer):
            crosses = any(
                node[rank] != node[group.member(rank, shift)] for rank in traces for group, shift in peers(op)
            )
            kind, over_ranks = ACROSS if crosses else INSIDE, np.min
        more = f" and {len(indices) - 1} more" if len(indices) > 1 else ""
        measured_s, simulated_s = float(over_ranks(measured)), float(over_ranks(simulated))
        if measured_s > 0 and simulated_s > 0:  # else nothing is sent or computed on these ranks
            label = f"{indices[0]}: {op}{more}"
            rows.append(Row(phase=phase, label=label, kind=kind, measured_s=measured_s, simulated_s=simulated_s))
    return rows


def _median_s(trace: Trace, mark: Mark, rank: int) -> float:
    """The median duration of an operation on a rank. Raises RequestError if it was not traced."""
    if samples := trace.ops.get(mark):
        return median(sample.end_s - sample.start_s for sample in samples)
    if not any(other.phase == mark.phase for other in trace.ops):
        rule = f"has no operation of the {mark.phase}"
        raise RequestError(f"the trace of rank {rank}", rule, "the point that was traced would work")
    return 0.0  # no kernel ran


def refit(request: Request, rows: Sequence[Row], name: str) -> dict[str, Any]:
    """The cluster's config with kernels and memory, and links, as fast as all rows of their kind together say."""
    of_kind = {kind: [row for row in rows if row.kind == kind] for kind in (BLOCKS, INSIDE, ACROSS)}
    factors = {
        kind: sum(row.simulated_s for row in of) / sum(row.measured_s for row in of)
        for kind, of in of_kind.items() if of
    }  # fmt: skip
    config = at_speed(request.config["cluster"], factors.get(BLOCKS, 1.0))
    for kind, tier in ((INSIDE, "intra"), (ACROSS, "inter")):
        if kind in factors and config.get(tier):
            section, factor = dict(config[tier]), factors[kind]
            section["bytes_per_s"] = rounded(section["bytes_per_s"] * factor)
            section["latency_s"] = rounded(section["latency_s"] / factor)
            config[tier] = section
    fitted = ", ".join(
        f"{kind} {factor:.3g} times as fast, by {len(of_kind[kind])}" for kind, factor in factors.items()
    )
    sources = {**(config.get("sources") or {}), "refit": f"from traced operations: {fitted} of them"}
    return {**config, "name": name, "sources": sources}


def steps(choice: Choice, traces: Mapping[int, Trace], config: Mapping[str, Any]) -> list[Steps]:
    """The time of each phase, traced, simulated, and simulated with the refitted cluster."""
    cluster, times = Cluster.build(config), []
    for phase, run in choice.runs.items():
        ranks = list(traces)
        times.append(
            Steps(
                phase=phase,
                measured_s=max(_phase_s(trace, phase) for trace in traces.values()),
                simulated_s=float(run.ended_s[ranks].max()),
                refit_s=float(simulate(choice.plans[phase], choice.problem, cluster).ended_s[ranks].max()),
            )
        )
    return times


def _phase_s(trace: Trace, phase: str) -> float:
    """The median time from a phase's first operation to the end of its last, over its executions."""
    of_phase = [samples for mark, samples in trace.ops.items() if mark.phase == phase]
    count = min(map(len, of_phase))
    return median(max(s[i].end_s for s in of_phase) - min(s[i].start_s for s in of_phase) for i in range(count))
