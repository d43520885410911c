"""A lower bound on the step of a method's fastest variant: nothing is planned."""

from __future__ import annotations

from sp_bench.plan.method import Method
from sp_bench.plan.problem import Problem
from sp_bench.point.choose import unplanned
from sp_bench.point.request import Request
from sp_bench.point.variant_bounds import blocks_s


def least_computed_s(request: Request) -> float:
    """A lower bound in seconds on the step of a request's fastest variant, by what blocks take: nothing is planned. 0.0
    for methods that `blocks_s` knows nothing of.

    Raises RequestError if the method can't serve it.
    """
    assert isinstance(request.method, Method), "a peer has no plans to choose among"
    cluster, bounds_s = request.cluster.even, dict[Problem, float]()
    for method, problem in unplanned(request, [request.method]):
        problem = method.assigned(problem)
        if problem not in bounds_s:
            bounds_s[problem] = sum(blocks_s(method, problem, phase, cluster) for phase in request.plan_phases)
    return min(bounds_s.values())
