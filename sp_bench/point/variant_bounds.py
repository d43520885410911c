"""Lower bounds on the time of a method's variants: in what order they are simulated, and which are not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from sp_bench import account
from sp_bench.cluster import Cluster
from sp_bench.plan.method import Method
from sp_bench.plan.ops import Plan
from sp_bench.plan.problem import Problem
from sp_bench.point.block_bounds import blocks_s, looked_at
from sp_bench.point.request import Request
from sp_bench.point.variants import unplanned
from sp_bench.simulate import least_s, relaxed_s
from sp_bench.simulate.bounds import link_bytes, lower_bounds
from sp_bench.simulate.operations import work_s

MANY_RANKS = 128
"""Ranks from which on simulating all of them takes longer than an estimate by those that are unlike."""
ROUNDING = 1e-9
"""A bound that is as long as the time itself may be longer by so much of it."""


def by_bound(
    cluster: Cluster,
    variants: Sequence[tuple[Method, Problem, Mapping[str, Plan]]],
    timed: Sequence[tuple[float, int]],
    *,
    estimates: bool,
    most_s: float = math.inf,
) -> Iterator[tuple[dict[str, float], int]]:
    """Lower bounds in seconds on each phase of variants, each the plans of its phases, with their indices, those whose
    sum is the lowest first.

    The first bounds are closed forms of what blocks take, for which nothing is planned (`blocks_s`), if `estimates` are
    wanted. Only where the bound so far is below `most_s` and all times that are known by then, `timed`, what the plans
    send is part of it, then what ranks compute; and then, of many ranks, what takes all of them longer to find: the
    step with one link that flows share, and what simulating one of each kind says (simulate.relaxed_s, least_s), if
    `estimates` are wanted. Each is found for one phase after the other, as the first may be enough.
    """
    refined = len(variants) > 1 or most_s < math.inf
    by_phase = _first_bounds(cluster, variants, estimates=refined and estimates)
    waiting = [(sum(bounds_s.values()), i) for i, bounds_s in enumerate(by_phase)]
    heapify(waiting)
    functions = [[sent_s, *(_refinements(problem.n, estimates) if refined else [])] for _, problem, _ in variants]
    sent = dict[tuple[Method, Problem, str], float]()
    left = [[(each, phase) for each in some for phase in by_phase[i]] for i, some in enumerate(functions)]
    while waiting:
        bound_s, i = heappop(waiting)
        ruled_out = bound_s > most_s or bound_s >= min(timed, default=(math.inf,))[0]
        # Something has to be simulated before anything can be ruled out.
        first = not timed and math.isinf(most_s) and bool(left[i]) and left[i][0][0] is least_s
        if not left[i] or first or (ruled_out and (estimates or left[i][0][0] is not sent_s)):
            yield by_phase[i], i
            continue
        (refined_s, phase), (method, problem, plans) = left[i].pop(0), variants[i]
        sender = method.sends_as, problem, phase
        known_s = sent.get(sender) if refined_s is sent_s else None
        seconds = refined_s(plans[phase], problem, cluster) if known_s is None else known_s
        if refined_s is sent_s:
            sent[sender] = seconds
        by_phase[i][phase] = max(by_phase[i][phase], seconds)
        heappush(waiting, (sum(by_phase[i].values()), i))


def _first_bounds(
    cluster: Cluster, variants: Sequence[tuple[Method, Problem, Mapping[str, Plan]]], *, estimates: bool
) -> list[dict[str, float]]:
    """Lower bounds in seconds on each variant's phases for which nothing is planned; 0.0 without `estimates`."""
    return [
        {phase: (1 - ROUNDING) * blocks_s(method, problem, phase, cluster) if estimates else 0.0 for phase in plans}
        for method, problem, plans in variants
    ]


def _refinements(n: int, estimates: bool) -> list:
    """Functions with further bounds on the time of a phase, those that take less time first."""
    return [_computed_s, _relaxed_s, least_s] if estimates and n >= MANY_RANKS else [_computed_s]


def sent_s(plan: Plan, problem: Problem, cluster: Cluster) -> float:
    """A lower bound on the time of a phase by what it sends."""
    crossing = link_bytes(cluster.network(problem.n), account.traffic(plan, problem, cluster))
    return max(lower_bounds(plan, problem, cluster, crossing, 0.0).values())


def _relaxed_s(plan: Plan, problem: Problem, cluster: Cluster) -> float:
    """A lower bound on the time of a phase by all that is simulated of it, but that flows share one link, not all."""
    return (1 - ROUNDING) * relaxed_s(plan, problem, cluster)


def _computed_s(plan: Plan, problem: Problem, cluster: Cluster) -> float:
    """A lower bound on the time of a phase by what the busiest rank computes, of MOST_LOOKED_AT of them."""
    if cluster.stragglers.jitter:  # noise may make blocks faster than their figures
        return 0.0
    return cluster.least_compute_s(work_s(plan, problem, cluster, np.array(looked_at(cluster, problem.n))))


def least_computed_s(request: Request) -> float:
    """A lower bound in seconds on the step of a request's fastest variant, by what blocks take: nothing is planned. 0.0
    for methods that `blocks_s` knows nothing of.

    Raises RequestError if the method can't serve it.
    """
    cluster, bounds_s = request.cluster.even, dict[Problem, float]()
    for method, problem in unplanned(request, [request.ours]):
        problem = method.assigned(problem)
        if problem not in bounds_s:
            bounds_s[problem] = sum(blocks_s(method, problem, phase, cluster) for phase in request.workload.plan_phases)
    return min(bounds_s.values())
