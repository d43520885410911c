"""Fill in a point's record: what is counted from its plans, and what its times amount to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sp_bench import account
from sp_bench.bench.choose import Choice
from sp_bench.bench.request import Request
from sp_bench.records import Record


def account_for(record: Record, request: Request, choice: Choice) -> None:
    """Volume, bounds, memory and tile, from the plans of the chosen variant."""
    problem, method = request.problem, choice.method
    record.tile_a, record.tile_b = method.tile_shape(problem.n) or (None, None)
    record.tile_candidates = choice.candidates
    volumes = {phase: account.volume(plan, problem) for phase, plan in choice.plans.items()}
    across = [account.sent_across_nodes(plan, problem, request.cluster.node_of) for plan in choice.plans.values()]
    record.comm_bytes_per_gpu = sum(volume.total_bytes for volume in volumes.values())
    record.comm_bytes_expected = sum(method.bytes_sent(problem, phase) for phase in request.phases)
    record.comm_bytes_lower_bound = sum(account.lower_bound_bytes(problem, phase) for phase in request.phases)
    record.comm_bytes_statistics = sum(volume.statistic_bytes for volume in volumes.values())
    record.comm_bytes_by_lane = by_lane({phase: volume.sent_bytes for phase, volume in volumes.items()})
    record.comm_bytes_across_nodes_max = int(np.sum(across, axis=0).max())
    record.peak_mem_bytes_max = account.peak_bytes(choice.plans.values(), problem)
    record.notes = request.notes or None
    if record.comm_bytes_per_gpu != record.comm_bytes_expected:
        counted, formula = record.comm_bytes_per_gpu, record.comm_bytes_expected
        record.status, record.error = "incorrect", f"the plan sends {counted} bytes, the closed form says {formula}"


def by_lane(sent: Mapping[str, Mapping[tuple[str, str, str], int]]) -> dict[str, int]:
    """Sent bytes with their keys as text: phase/lane/tensor/field."""
    return {"/".join((phase, *key)): size for phase, counts in sent.items() for key, size in counts.items()}


def rates_for(record: Record, request: Request) -> None:
    """Throughput and MFU from the median step."""
    if not record.step_ms_median:
        return
    step_s, problem = record.step_ms_median / 1e3, request.problem
    flops = sum(account.model_flops(problem, phase) for phase in request.phases)
    record.iters_per_s = 1 / step_s
    record.tokens_per_s = problem.batch * problem.seqlen / step_s
    record.tflops_per_gpu = flops / step_s / problem.n / 1e12
    peak_tflops = request.cluster.device.peak_tflops.get(problem.dtype)
    record.mfu = record.tflops_per_gpu / peak_tflops if peak_tflops else None
