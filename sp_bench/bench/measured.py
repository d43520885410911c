"""Measured points: those with equally many ranks share one pool of processes and are timed in turn."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import numpy as np

from sp_bench import account, records
from sp_bench.bench.choose import Choice, choose
from sp_bench.bench.outcome import account_for, by_lane, plain, rates_for
from sp_bench.bench.request import Request, refuse_what_does_not_fit
from sp_bench.check import check_all
from sp_bench.errors import RequestError
from sp_bench.measure.pool import RankError, RankFailure, RankPool
from sp_bench.measure.spec import Measured, Spec
from sp_bench.measure.stats import summarise
from sp_bench.records import Record

Samples = dict[str, list[list[float]]]
"""Milliseconds by name, then rank, then iteration."""


Point = tuple[Record, Choice | None, Samples | None]


def measure_points(requests: Sequence[Request], progress: Callable[[int], None]) -> list[Point]:
    """Measure points of equal gpus, iters and warmup in one pool of ranks, iteration by iteration in turn.

    `progress` is called with the number of steps done. Where a rank fails, the point under way is to blame, and the
    others are measured again without it.
    """
    choices = [choose(request) for request in requests]
    for choice in choices:
        check_all(choice.plans, choice.problem)
    first = requests[0]
    together = sum(account.peak_bytes(choice.plans.values(), choice.problem) for choice in choices)
    refuse_what_does_not_fit(first.problem.n, together, first.config)
    specs = [
        Spec(
            plans=choice.plans, problem=choice.problem, kernel=request.kernel, verify=request.verify, seed=request.seed
        )
        for request, choice in zip(requests, choices, strict=True)
    ]
    try:
        with RankPool(first.problem.n, max(request.timeout_s for request in requests)) as pool:
            by_rank = pool.run(
                "sp_bench.measure.job:measure", specs, first.iters, first.warmup, progress=lambda _: progress(1)
            )
    except RankFailure as failure:
        # Ranks may be at different points; it is the failing rank's that is to blame.
        under_way = failure.progress
        if under_way is None and len(requests) > 1:
            return [point for request in requests for point in measure_points([request], progress)]
        under_way = under_way or 0
        failed: Point = (requests[under_way].record(_status(failure), str(failure)), None, None)
        others = [request for i, request in enumerate(requests) if i != under_way]
        points = measure_points(others, progress) if others else []
        return [*points[:under_way], failed, *points[under_way:]]
    return [
        _point(request, choice, [rank[i] for rank in by_rank])
        for i, (request, choice) in enumerate(zip(requests, choices, strict=True))
    ]


def _status(failure: Exception) -> str:
    """What a failure is in a record; torch says that memory is out in words only."""
    if isinstance(failure, RankError) and isinstance(failure.cause, RequestError):
        return "unsupported"
    out_of_memory = ("MemoryError", "DefaultCPUAllocator", "out of memory")
    return "oom" if any(words in str(failure) for words in out_of_memory) else "failed"


def _point(request: Request, choice: Choice, ranks: list[Measured]) -> Point:
    record = request.record("ok")
    record.iters, record.warmup = request.iters, request.warmup
    record.provenance = {**records.provenance(), "ranks_by_host": {platform.node(): list(range(request.problem.n))}}
    account_for(record, request, choice)
    errors = ranks[0].errors
    record.err_out, record.err_dq = errors.get("out"), errors.get("dq")
    record.err_dk, record.err_dv = errors.get("dk"), errors.get("dv")
    wrong = next(filter(None, (rank.wrong(request.problem.dtype) for rank in ranks)), "")
    if wrong:
        record.status, record.error = "incorrect", f"the correctness gate: {wrong}"
        return record, choice, None
    _count_sent(record, choice, ranks)
    forward_ms, backward_ms = _slowest(ranks, "forward_s"), _slowest(ranks, "backward_s")
    spread = summarise(forward_ms + backward_ms, request.seed)
    record.step_ms_median, record.step_ms_p25, record.step_ms_p75 = spread.median, spread.p25, spread.p75
    record.step_ms_ci95_low, record.step_ms_ci95_high = spread.ci95_low, spread.ci95_high
    record.forward_ms_median = float(np.median(forward_ms))
    if "backward" in request.phases:
        record.backward_ms_median = float(np.median(backward_ms))
    blocks_ms = 1e3 * np.median([rank.blocks_s for rank in ranks], axis=1)
    record.compute_ms = float(blocks_ms.max())
    record.exposed_comm_ms = record.step_ms_median - record.compute_ms
    record.rank_imbalance = float(blocks_ms.max() / blocks_ms.mean())
    record.kernel = ranks[0].kernel
    rates_for(record, request)
    names = ("forward_s", "backward_s", "blocks_s", "waits_s")
    samples = {name[:-1] + "ms": [[1e3 * x for x in getattr(rank, name)] for rank in ranks] for name in names}
    return record, choice, samples


def _slowest(ranks: list[Measured], name: str) -> np.ndarray:
    """Milliseconds of each iteration, which are those of its slowest rank."""
    return 1e3 * np.array([getattr(rank, name) for rank in ranks]).max(axis=0)


def _count_sent(record: Record, choice: Choice, ranks: list[Measured]) -> None:
    """Volume from the tensors that were sent, which must be what the plan says on every rank."""
    volumes = {phase: account.volume(plan, choice.problem) for phase, plan in choice.plans.items()}
    total = 0
    for rank, measured in enumerate(ranks):
        sent = by_lane(measured.sent_bytes)
        planned = by_lane({phase: volume.of(rank) for phase, volume in volumes.items()})
        if sent != planned:
            record.status, record.error = "incorrect", f"rank {rank} sent {sent}, and the plan says {planned}"
        total += sum(sent.values())
    record.comm_bytes_per_gpu = plain(total / len(ranks))
