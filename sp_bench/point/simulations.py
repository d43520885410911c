"""The simulations that points can have, by the workloads' `simulated_as`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from sp_bench.cluster import Cluster
from sp_bench.point import prefill, simulated, training
from sp_bench.point.outcome import Outcome
from sp_bench.point.request import Request


class Simulation(Protocol):
    """How a kind of workloads is simulated. Each raises RequestError for a point that is too large."""

    def outcome(self, request: Request) -> Outcome:
        """The outcome of a simulated point."""
        ...

    def least_compute_s(self, request: Request) -> float:
        """Seconds that its ranks compute, without transfers."""
        ...

    def phases_ms(self, request: Request, cluster: Cluster) -> dict[str, float]:
        """Milliseconds of each phase on a cluster, with the plans that the request's own chooses."""
        ...


SIMULATIONS: Mapping[str, Simulation] = {"attention": simulated, "training": training, "prefill": prefill}


def simulation_of(request: Request) -> Simulation:
    """The simulation of a request's workload."""
    return SIMULATIONS[request.workload.simulated_as]
