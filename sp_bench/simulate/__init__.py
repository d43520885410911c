"""Execute a plan on a model of a cluster: a flow-level network and a table of kernel costs.

What the model has: latency and max-min fair bandwidth on every GPU's switch port and NIC, the plan's waits, block and
fold times. What it lacks as yet: kernels slowed down by transfers, fabric contention, jitter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sp_bench.plan import BLOCKS, Plan, Problem, Transfer
from sp_bench.simulate.cluster import Cluster
from sp_bench.simulate.flows import solve
from sp_bench.simulate.graph import PlanGraph, Segment, build_graph

__all__ = ["Cluster", "Run", "Span", "simulate"]

FEW_TASKS = 4_000
"""Up to here plain Python beats the start of a compiler."""


@dataclass(frozen=True)
class Span:
    """What one stream of a rank did from start to end."""

    stream: str
    label: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Run:
    """One simulated phase."""

    plan: Plan
    graph: PlanGraph
    start_s: np.ndarray
    finish_s: np.ndarray

    @property
    def makespan_s(self) -> float:
        """Until the last rank has ended."""
        return float(self.finish_s.max(initial=0.0))

    @property
    def busy_s(self) -> np.ndarray:
        """Seconds that each rank computes: (n,)."""
        return self.graph.busy_s

    def spans(self, rank: int) -> list[Span]:
        """The timeline of one rank."""
        spans = []
        for item in self.graph.items:
            tasks = self.graph.tasks_of(item, rank)
            if isinstance(item.what, Segment):
                stream, label = BLOCKS, f"{len(item.what.ops)} operations from {self.plan.ops[item.what.ops[0]]}"
            else:
                op = self.plan.ops[item.what]
                assert isinstance(op, Transfer)
                stream, label = op.lane, str(op.send)
            spans.append(Span(stream, label, float(self.start_s[tasks].min()), float(self.finish_s[tasks].max())))
        return spans


def simulate(plan: Plan, problem: Problem, cluster: Cluster, *, use_symmetry: bool = True) -> Run:
    """Run one plan on a cluster, all ranks starting together. Raises RequestError if it is too large to simulate.

    Where plan and cluster leave ranks that can't be told apart, one of each kind is simulated, with the same result
    (symmetry.py); `use_symmetry=False` simulates all of them.
    """
    graph = build_graph(plan, problem, cluster, use_symmetry=use_symmetry)
    timing = solve(graph.tasks, "python" if graph.tasks.delay_s.size < FEW_TASKS else "auto")
    return Run(plan, graph, timing.start_s, timing.finish_s)
