"""Planning a pack: what a rank works out for documents that it hasn't seen before, and how long that takes here.

A trainer plans each batch. That is the assignment of tokens, the plans of both phases, their lowering, and for one rank
the rows that it sends and the regions that its kernels compute. What torch does with them, and the proof of the plans,
are no part of it.
"""

from __future__ import annotations

import time
from dataclasses import fields, replace
from statistics import median

from sp_bench.lower import TransportKind, lower
from sp_bench.plan.cast_rows import find_regions, keys_of, rows_from, rows_to
from sp_bench.plan.costs import CostProfile
from sp_bench.plan.demand import demand, untouched_partials
from sp_bench.plan.documents import Packed
from sp_bench.plan.method import Method
from sp_bench.plan.ops import Fused, Gathered, GroupCast, Pass, Plan
from sp_bench.plan.problem import Problem
from sp_bench.plan.transfers import rows_sent
from sp_bench.plan.union import kernel_calls

TIMES, ENOUGH_S = 3, 1.0
"""A pack is planned so often, unless that takes longer; the median time counts."""


def planning_ms(method: Method, problem: Problem, costs: CostProfile, transport: TransportKind) -> float:
    """The processor time of this machine, in ms, for one rank to plan a pack like the problem's that it hasn't seen
    before.

    Every option of the method is chosen. It is that of the first rank. What else the machine does is not in it.
    """
    times_s, kept = list[float](), list[dict[str, Plan]]()
    while len(times_s) < TIMES and sum(times_s) < ENOUGH_S:
        times_s.append(_planning_s(method, problem, costs, transport, kept))
    return 1e3 * median(times_s)


def _planning_s(
    method: Method, problem: Problem, costs: CostProfile, transport: TransportKind, kept: list[dict[str, Plan]]
) -> float:
    """The plans are added to `kept`: a trainer has those of the packs before, some of which are the same programs."""
    mask = problem.mask
    assert isinstance(mask, Packed), "whole sequences are planned once"
    # Of a class of its own no cache knows it.
    new: Packed = type(mask.__class__.__name__, (type(mask),), {})(*(getattr(mask, each.name) for each in fields(mask)))
    started = time.thread_time()
    kept.append(plan_pack(method, replace(problem, mask=new), costs, transport))
    return time.thread_time() - started


def plan_pack(method: Method, problem: Problem, costs: CostProfile, transport: TransportKind) -> dict[str, Plan]:
    """The plans of a pack by phase, with all worked out that the first rank's executions need of the mask.

    `problem` has the pack, and any layout: it is assigned anew.
    """
    problem, rank = method.assigned(replace(problem, layout=method.layout_of(problem.mask, problem.n))), 0
    plans = {phase: method.plan(problem, phase, costs) for phase in ("forward", "backward")}
    for plan in plans.values():
        lower(plan, problem, transport)
        demand(plan, problem)
        untouched_partials(plan, problem)
        find_regions(plan, problem, rank)
        for _, op in plan:
            match op:
                case Gathered():
                    keys_of(op, problem, rank)
                case Fused():
                    kernel_calls(op, problem, rank)
                case GroupCast():
                    for member in op.members:
                        rows_to(op, problem, rank, member)
                    rows_from(op, problem, rank)
                case Pass() if op.against is not None:
                    rows_sent(op, problem, rank)
    return plans
