"""When blocks hide Ring Attention's transfers: by the paper's condition, and by the kernel rates of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from sp_bench import account
from sp_bench.analysis.number import Number, computed
from sp_bench.analysis.section import source
from sp_bench.cli.compose import Composer
from sp_bench.cluster.cluster import Cluster
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL, Mask
from sp_bench.plan.ops import Plan
from sp_bench.plan.problem import Problem, flops_per_pair
from sp_bench.plan.tensors import KV, O
from sp_bench.simulate.bounds import link_bytes

PAPER = "Liu et al. 2023, section 3"
CONDITION = source("ring.condition")
CONDITION_BY_RATES = source("ring.condition-rates")
TRANSFERS = source("ring.transfers")
STEP = 128
"""Block sizes are multiples of this many tokens: those of a thread block."""
FARTHEST = 2**18
"""The largest block, in tokens."""
HEADS, HEAD_DIM = 32, 128


@dataclass(frozen=True)
class Setting:
    """A ring on one or more nodes of a cluster of conf/cluster."""

    cluster: str
    nodes: int

    @cached_property
    def _cluster(self) -> Cluster:
        return cluster_named(self.cluster)

    @property
    def gpus(self) -> int:
        """The GPUs of all nodes."""
        assert self._cluster.topology.gpus_per_node
        return self._cluster.topology.gpus_per_node * self.nodes

    def problem(self, block: int, mask: Mask = FULL) -> Problem:
        """Attention with `block` tokens on each GPU, 32 heads of 128, in bfloat16."""
        n, layout = self.gpus, mask.layout("auto")
        return Problem(n=n, seqlen=n * block, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, mask=mask, layout=layout)

    @property
    def peak_flops(self) -> float | None:
        """The dense bfloat16 peak of a device in FLOP/s; None if its file has none."""
        peak = self._cluster.device.peak_tflops.get("bfloat16")
        return None if peak is None else peak * 1e12

    def hop_bytes_per_s(self) -> float:
        """The rate of the slowest hop in bytes/s, without its latency."""
        problem = self.problem(STEP)
        plan = ring_plan(problem, "forward")
        load_s, _ = load(self._cluster, plan, problem)
        return (problem.n - 1) * problem.chunk_bytes(KV, wire=True) / load_s

    def paper_tokens(self) -> Number:
        """The least block in tokens by the paper's condition, F / B."""
        if self.peak_flops is None:
            return Number(None, "computed", (CONDITION,), f"cluster={self.cluster} has no peak")
        return computed(self.peak_flops / self.hop_bytes_per_s(), CONDITION)

    def least_tokens(self, mask: Mask = FULL) -> Number:
        """The least block in tokens by kernel rates, folds and latencies."""
        hop_s, latency_s = self._hop(mask)
        # The device's peak rules out most blocks; the time of one by its kernel takes long to find.
        may_be_short = [c for c in range(STEP, FARTHEST, STEP) if self._peak_s(c, mask) < latency_s + c * hop_s]
        short = (c for c in reversed(may_be_short) if self._block_s(c, mask) < latency_s + c * hop_s)
        return computed(next(short, 0) + STEP, CONDITION_BY_RATES)

    def _peak_s(self, block: int, mask: Mask) -> float:
        """Seconds that no kernel call for a block of a full or causal mask is below; 0.0 where the device's peak isn't
        known.
        """
        pairs = block**2 if mask == FULL else block * (block - 1) / 2
        flops = HEADS * flops_per_pair("forward", HEAD_DIM, HEAD_DIM) * pairs
        return flops / self.peak_flops if self.peak_flops else 0.0

    def _hop(self, mask: Mask) -> tuple[float, float]:
        """Seconds of a hop for each token of a block, and its latency in seconds."""
        problem = self.problem(STEP, mask)
        load_s, latency_s = load(self._cluster, ring_plan(problem, "forward"), problem)
        return load_s / (problem.n - 1) / STEP, latency_s / (problem.n - 1)

    def _block_s(self, block: int, mask: Mask) -> float:
        device, problem = self._cluster.device, self.problem(block, mask)
        return float(device.block_s(problem, "forward").min()) + device.fold_s(problem, O)


@cache
def cluster_named(name: str) -> Cluster:
    """The cluster of a file in conf/cluster."""
    with Composer() as composer:
        return Cluster.build(composer.compose([f"cluster={name}"])["cluster"])


@cache
def _ring_plan(n: int, phase: str) -> Plan:
    problem = Problem(n=n, seqlen=n, heads=1, kv_heads=1, head_dim=1, mask=FULL, layout=LAYOUTS["contiguous"])
    return getattr(build("ring", {"layout": "contiguous"}), phase)(problem, COMPUTE_BOUND)


def ring_plan(problem: Problem, phase: str) -> Plan:
    """Ring's plan of a phase. It depends on the number of ranks alone."""
    return _ring_plan(problem.n, phase)


def load(cluster: Cluster, plan: Plan, problem: Problem) -> tuple[float, float]:
    """All transfers of a ring's plan: seconds on the busiest link or of the slowest flow, and seconds of latency."""
    network, ranks = cluster.network(problem.n), np.arange(problem.n)
    traffic = account.traffic(plan, problem)
    seconds = (link_bytes(network, traffic) / network.link_bytes_per_s).max()
    latency_s = 0.0
    for target, sent in traffic:
        routes = network.routes(ranks, target)
        seconds = max(seconds, (sent / routes.rate_cap).max())
        latency_s = max(latency_s, float(routes.latency_s.max()))
    return float(seconds), (problem.n - 1) * latency_s


def transfers_ms(cluster: str, problem: Problem, phases: tuple[str, ...]) -> Number:
    """Milliseconds that the transfers of Ring's plans take if nothing is computed."""
    total = sum(sum(load(cluster_named(cluster), ring_plan(problem, phase), problem)) for phase in phases)
    return computed(1e3 * total, TRANSFERS)
