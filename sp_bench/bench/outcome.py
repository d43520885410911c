"""Fill in a point's record: what is counted from its plans, and what its times amount to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sp_bench import account
from sp_bench.bench.choose import Choice
from sp_bench.bench.inside import same_model
from sp_bench.bench.request import Request
from sp_bench.peers.peer import Peer
from sp_bench.records import Record


def account_for(record: Record, request: Request, choice: Choice) -> None:
    """Volume, bounds, memory and tile, from the plans of the chosen variant."""
    problem, method, n = choice.problem, choice.method, choice.problem.n
    record.tile_a, record.tile_b = method.tile_shape(n) or (None, None)
    record.variant = method.variant(n) or None
    record.candidates = choice.candidates
    volumes = {phase: account.volume(plan, problem) for phase, plan in choice.plans.items()}
    network = request.cluster.network(n)
    across = [account.sent_across_nodes(plan, problem, network.node_of) for plan in choice.plans.values()]
    record.comm_bytes_per_gpu = plain(sum(volume.total_bytes for volume in volumes.values()))
    record.comm_bytes_busiest_gpu = sum(volume.max_bytes for volume in volumes.values())
    record.comm_bytes_expected = plain(sum(method.bytes_sent(problem, phase) for phase in request.phases))
    record.comm_bytes_lower_bound = sum(
        account.lower_bound_bytes(problem, phase, kept=bool(plan.kept)) for phase, plan in choice.plans.items()
    )
    record.comm_bytes_statistics = plain(sum(volume.statistic_bytes for volume in volumes.values()))
    record.comm_bytes_by_lane = by_lane({phase: volume.sent_bytes for phase, volume in volumes.items()})
    record.comm_bytes_across_nodes_max = int(np.sum(across, axis=0).max())
    record.peak_mem_bytes_expected = account.peak_bytes(choice.plans.values(), problem)
    record.peak_mem_bytes_max, record.peak_mem_source = record.peak_mem_bytes_expected, "computed from the plans"
    stretched = request.cluster.device.notes(problem) if request.mode == "simulate" else []
    record.notes = [*request.notes, *stretched] or None
    if record.comm_bytes_per_gpu != record.comm_bytes_expected:
        counted, formula = record.comm_bytes_per_gpu, record.comm_bytes_expected
        record.status, record.error = "incorrect", f"the plan sends {counted} bytes, the closed form says {formula}"


def describe_peer(record: Record, request: Request, peer: Peer) -> None:
    """What is known of a peer, which has no plan."""
    record.variant, record.notes = peer.variant(request.problem) or None, request.notes or None


def by_lane(sent: Mapping[str, Mapping[tuple[str, ...], float]]) -> dict[str, float]:
    """Sent bytes with their keys as text: phase/lane/tensor/field, or phase/operation of a peer."""
    return {"/".join((phase, *key)): plain(size) for phase, counts in sent.items() for key, size in counts.items()}


def plain(size: float) -> float:
    """A mean over ranks as a whole number where it is one."""
    return int(size) if size == int(size) else size


def rates_for(record: Record, request: Request) -> None:
    """Throughput and MFU from the median step."""
    if not record.step_ms_median:
        return
    step_s, problem = record.step_ms_median / 1e3, request.problem
    flops = sum(account.model_flops(problem, phase) for phase in request.phases)
    record.iters_per_s = 1 / step_s
    record.tokens_per_s = problem.batch * problem.seqlen / step_s
    record.tflops_per_gpu = flops / step_s / problem.n / 1e12
    # A measured rank may be on another device than the figures are of.
    found, figures = record.device_name or "", request.cluster.device.name
    known = found == figures or same_model(found, figures)
    peak_tflops = request.cluster.device.peak_tflops.get(problem.dtype) if known else None
    record.mfu = record.tflops_per_gpu / peak_tflops if peak_tflops else None
