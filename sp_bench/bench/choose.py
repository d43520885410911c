"""Choose among a method's variants (tile=auto) by simulated time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sp_bench import account
from sp_bench.bench.request import Request
from sp_bench.plan import CostProfile, Method, Plan
from sp_bench.simulate import Run, simulate


@dataclass(frozen=True)
class Choice:
    """A variant of the method with its plans, their simulation, and the variants that it was chosen from."""

    method: Method
    plans: dict[str, Plan]
    runs: dict[str, Run]
    candidates: list[dict[str, Any]] | None

    @property
    def total_s(self) -> float:
        return sum(run.makespan_s for run in self.runs.values())


def choose(request: Request) -> Choice:
    """The variant with the least simulated time over the request's phases.

    Variants are simulated in order of a lower bound on their time, max(blocks of the busiest rank, bytes over each
    port), and those whose bound is above the best time so far are not simulated.
    """
    costs = request.cluster.profile(request.problem)
    variants = request.method.candidates(request.problem)
    planned = [(method, _plans(method, request, costs)) for method in variants]
    bounded = sorted(((_bound_s(request, plans), i) for i, (_, plans) in enumerate(planned)))
    best: Choice | None = None
    rows: dict[int, dict[str, Any]] = {}
    for bound_s, i in bounded:
        method, plans = planned[i]
        a_b = method.tile_shape(request.problem.n) or (None, None)
        rows[i] = {"tile_a": a_b[0], "tile_b": a_b[1], "bound_ms": bound_s * 1e3, "step_ms": None}
        if best and bound_s >= best.total_s:
            continue
        runs = {phase: simulate(plan, request.problem, request.cluster) for phase, plan in plans.items()}
        here = Choice(method, plans, runs, None)
        rows[i]["step_ms"] = here.total_s * 1e3
        if best is None or here.total_s < best.total_s:
            best = here
    assert best is not None, "a method has at least one variant"
    ordered = [rows[i] for i in sorted(rows)]
    return Choice(best.method, best.plans, best.runs, ordered if len(variants) > 1 else None)


def _plans(method: Method, request: Request, costs: CostProfile) -> dict[str, Plan]:
    return {phase: method.plan(request.problem, phase, costs) for phase in request.phases}


def _bound_s(request: Request, plans: dict[str, Plan]) -> float:
    """A time that no execution of the plans can go below on this cluster."""
    problem, cluster = request.problem, request.cluster
    total_s = 0.0
    for phase, plan in plans.items():
        sent = account.volume(plan, problem).total_bytes
        across = account.sent_across_nodes(plan, problem, cluster.node_of)
        ports_s = max(across.max() / cluster.inter.bytes_per_s, (sent - across).max() / cluster.intra.bytes_per_s)
        blocks_s = account.blocks(plan, problem) @ cluster.block_s(problem, phase)
        total_s += max(ports_s, blocks_s.max())
    return float(total_s)
