"""Times of a point by a cluster's figures alone, without a record."""

from __future__ import annotations

from sp_bench.cluster import Cluster
from sp_bench.point.choose import choose
from sp_bench.point.request import Request
from sp_bench.point.training import least_training_s, simulate_training
from sp_bench.simulate import simulate
from sp_bench.workload import Train


def least_compute_s(request: Request) -> float:
    """Seconds that a point's ranks compute by its cluster's figures, without transfers.

    Raises RequestError if no plan fits in memory, or it is too large to simulate.
    """
    if isinstance(request.workload, Train):
        return least_training_s(request)
    return sum(request.cluster.least_compute_s(run.work_s) for run in choose(request).runs.values())


def simulated_ms(request: Request, cluster: Cluster) -> dict[str, float]:
    """Milliseconds of a point by phase, on a cluster that differs from the request's by its figures alone.

    The plans are those that the request's own cluster chooses. Raises RequestError as least_compute_s does.
    """
    if isinstance(request.workload, Train):
        record = simulate_training(request, cluster)
        return {phase: getattr(record, f"{phase}_ms_median") for phase in request.phases}
    choice = choose(request)
    return {name: 1e3 * simulate(plan, choice.problem, cluster).makespan_s for name, plan in choice.plans.items()}
