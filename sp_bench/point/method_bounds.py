"""Lower bounds on the step of a method's fastest variant: nothing is simulated."""

from __future__ import annotations

from dataclasses import replace

from sp_bench.plan.method import Method
from sp_bench.plan.problem import Problem
from sp_bench.point.choose import unplanned, variants
from sp_bench.point.request import Request
from sp_bench.point.variant_bounds import blocks_s, sent_s


def least_s(request: Request) -> float:
    """A lower bound in seconds on the step of a request's fastest variant, by what links carry and blocks take: nothing
    is simulated.

    Raises RequestError if the method can't serve it.
    """
    assert isinstance(request.method, Method), "a peer has no plans to choose among"
    asked = replace(request, cluster=request.cluster.even)
    return min(
        sum(
            max(sent_s(plan, one.problem, asked.cluster), blocks_s(one.method, one.problem, phase, asked.cluster))
            for phase, plan in one.plans.items()
        )
        for one in variants(asked, [request.method])
    )


def least_computed_s(request: Request) -> float:
    """The same by what blocks take: nothing is planned, either. 0.0 for methods that `blocks_s` knows nothing of.

    Raises RequestError if the method can't serve it.
    """
    assert isinstance(request.method, Method), "a peer has no plans to choose among"
    cluster, bounds_s = request.cluster.even, dict[Problem, float]()
    for method, problem in unplanned(request, [request.method]):
        problem = method.assigned(problem)
        if problem not in bounds_s:
            bounds_s[problem] = sum(blocks_s(method, problem, phase, cluster) for phase in request.plan_phases)
    return min(bounds_s.values())
