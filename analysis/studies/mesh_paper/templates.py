"""Simulate one plan on many clusters that differ in their numbers only. The task graph is built once.

A task's delay is linear in the latency and in the seconds of blocks, so graphs on three clusters give it for all.
Results equal those of sp_bench.simulate.simulate up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sp_bench.cluster import Cluster
from sp_bench.cluster.device import DeviceCosts
from sp_bench.cluster.kernel_table import Curve, KernelTable
from sp_bench.plan.mask import Mask
from sp_bench.plan.ops import Plan
from sp_bench.plan.problem import Problem
from sp_bench.simulate import settle
from sp_bench.simulate.graph import PlanGraph, build_graph

UNIT_TFLOPS, NO_WORK_TFLOPS = 1.0, 1e30
"""Rates at which a block takes its FLOPs x 1e-12 s, and no time."""


def flat_rate(device: DeviceCosts, phase: str, mask: Mask) -> float:
    """The TFLOP/s of a device whose kernels have one rate for each phase and mask, whatever the size."""
    curve = device.tables[0].rates[f"{phase}_{mask.name}"]
    assert isinstance(curve, Curve) and curve.rates.size == 1
    return float(curve.rates[0])


def with_rate(cluster: Cluster, tflops: float) -> Cluster:
    """The cluster with the rate `tflops` for all blocks."""
    table = cluster.device.tables[0]
    curve = Curve(np.zeros(1), np.array([tflops]))
    changed: KernelTable = replace(table, rates=dict.fromkeys(table.rates, curve))
    return replace(cluster, device=replace(cluster.device, tables=(changed,)))


def with_network(cluster: Cluster, latency_s: float, flow_bytes_per_s: float) -> Cluster:
    """The cluster with `latency_s` everywhere and a cap on transfers across nodes."""
    topology = cluster.topology
    assert topology.inter
    intra = topology.intra.replace(latency_s=latency_s)
    inter = topology.inter.replace(latency_s=latency_s, flow_bytes_per_s=flow_bytes_per_s)
    return replace(cluster, topology=topology.replace(intra=intra, inter=inter))


@dataclass(frozen=True, eq=False)
class Template:
    """The task graph of one plan, with its delays split into constants, latencies and work."""

    problem: Problem
    phase: str
    graph: PlanGraph
    """The graph. Its delays are the constants, and its rate caps are finite only across nodes."""
    latencies: np.ndarray
    """The number of latencies that each task waits: (T,)."""
    work: np.ndarray
    """Seconds of each task's blocks at UNIT_TFLOPS: (T,)."""

    @classmethod
    def build(cls, plan: Plan, problem: Problem, cluster: Cluster) -> Template:
        """The template of a plan, from any cluster of the right shape."""
        still = with_rate(with_network(cluster, 0.0, 1.0), NO_WORK_TFLOPS)
        graph = build_graph(plan, problem, still)
        delays = graph.tasks.delay_s
        late = build_graph(plan, problem, with_network(still, 1.0, 1.0)).tasks.delay_s - delays
        slow = build_graph(plan, problem, with_rate(still, UNIT_TFLOPS)).tasks.delay_s - delays
        return cls(problem, plan.phase, graph, late, slow)

    def makespan_s(self, cluster: Cluster) -> float:
        """Seconds of the plan on a cluster of this shape that has one latency for all transfers."""
        topology, device = cluster.topology, cluster.device
        assert topology.inter and topology.inter.latency_s == topology.intra.latency_s
        rate = flat_rate(device, self.phase, self.problem.mask)
        base, quotient = self.graph.tasks, self.graph.quotient
        rates = np.empty(base.link_bytes_per_s.size)
        rates[quotient.link_orbit] = cluster.network(self.problem.n).link_bytes_per_s
        across = np.isfinite(base.rate_cap)
        tasks = replace(
            base,
            delay_s=base.delay_s + self.latencies * topology.inter.latency_s + self.work * UNIT_TFLOPS / rate,
            rate_cap=np.where(across, topology.inter.flow_bytes_per_s, topology.intra.flow_bytes_per_s),
            link_bytes_per_s=rates,
        )
        timing, _ = settle(replace(self.graph, tasks=tasks), device.transfer_slowdown)
        return timing.makespan_s
