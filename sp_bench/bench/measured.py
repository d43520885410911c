"""Measured points: those with equally many ranks share one pool of processes and are timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from sp_bench import account
from sp_bench.bench.choose import Choice, choose
from sp_bench.bench.measured_record import outcome_of
from sp_bench.bench.outcome import Outcome
from sp_bench.bench.request import Request, refuse_what_does_not_fit
from sp_bench.check import check_all
from sp_bench.errors import RequestError
from sp_bench.measure.homes import homes_for
from sp_bench.measure.pool import RankError, RankFailure, RankHang
from sp_bench.measure.ranks import open_ranks, ranks_by_host
from sp_bench.measure.spec import Spec
from sp_bench.measure.termination import raise_if_terminated
from sp_bench.measure.thread_dump import as_json
from sp_bench.peers.peer import Peer
from sp_bench.plan.ops import Plan


def measure_points(requests: Sequence[Request], progress: Callable[[int], None]) -> list[Outcome]:
    """Measure points of equal gpus, iters and warmup in one pool of ranks, iteration by iteration in turn.

    `progress` is called with the number of steps done. Where a rank fails, the point under way is to blame, and the
    others are measured again without it.
    """
    choices = [None if isinstance(request.method, Peer) else choose(request) for request in requests]
    for request, choice in zip(requests, choices, strict=True):
        if choice:
            check_all(executed_plans(request, choice), choice.problem)
    first = requests[0]
    together = sum(map(_least_bytes, requests, choices))
    alone = first.alone
    here = 1 if alone else first.launch.ranks_here if first.launch else first.problem.n
    together = 0 if first.devices.kind == "cuda" else together
    refuse_what_does_not_fit(here, together, first.config)
    specs = [spec for pair in zip(requests, choices, strict=True) for spec in _specs(*pair)]
    each = len(specs) // len(requests)
    started = datetime.now(UTC).isoformat()
    try:
        timeout_s = max(request.timeout_s for request in requests)
        # A peer posts its transfers where it computes, and all that are timed in turn get the same cores.
        first_go_transfers = not any(spec.workload.peer for spec in specs)
        hosts = None
        if not first.launch and not alone:
            hosts = homes_for(first.cluster, first.problem.n, transfers_first=first_go_transfers)
        processes = 1 if alone else first.problem.n
        with open_ranks(processes, timeout_s, first.launch, hosts, first.devices) as pool:
            hosts_of_ranks = ranks_by_host(pool)
            by_rank = pool.run(
                "sp_bench.measure.job:measure", specs, first.iters, first.warmup, progress=lambda _: progress(1)
            )
    except RankFailure as failure:
        raise_if_terminated()
        # Ranks may be at different points; it is the failing rank's that is to blame.
        under_way = failure.progress
        if under_way is None and len(requests) > 1:
            return [point for request in requests for point in measure_points([request], progress)]
        under_way = (under_way or 0) // each
        hang = as_json(failure.dumps) if isinstance(failure, RankHang) else None
        failed = Outcome(requests[under_way].record(_status(failure), str(failure)), hang=hang)
        others = [request for i, request in enumerate(requests) if i != under_way]
        points = measure_points(others, progress) if others else []
        return [*points[:under_way], failed, *points[under_way:]]
    return [
        outcome_of(
            request, choice, [r for rank in by_rank for r in rank[each * i : each * (i + 1)]], hosts_of_ranks, started
        )
        for i, (request, choice) in enumerate(zip(requests, choices, strict=True))
    ]


def executed_plans(request: Request, choice: Choice) -> dict[str, Plan]:
    """The chosen plans, and those of phases that aren't timed but leave what the timed ones start with."""
    costs = request.cluster.profile(request.problem)
    return {
        phase: choice.plans.get(phase) or choice.method.plan(request.problem, phase, costs)
        for phase in request.workload.executed(request.phases)
    }


def _specs(request: Request, choice: Choice | None) -> list[Spec]:
    """What each process is asked: one thing or, where ranks are executed alone, one for each of them."""
    workload = request.workload(
        phases=request.phases,
        problem=choice.problem if choice else request.problem,
        plans=executed_plans(request, choice) if choice else {},
        peer=request.method if isinstance(request.method, Peer) else None,
        kernel=request.kernel,
        seed=request.seed,
    )
    each = [replace(workload, alone=rank) for rank in request.alone] or [workload]
    return [Spec(workload=one, verify=request.verify, parts=request.parts) for one in each]


def _least_bytes(request: Request, choice: Choice | None) -> int:
    """What a rank holds at least: by the plans or, of a peer, its inputs and outputs."""
    if choice:
        return account.peak_bytes(executed_plans(request, choice).values(), choice.problem)
    return sum(request.problem.chunk_bytes(tensor, wire=False) for tensor in ("odoq", "kv", "dq", "dkv"))


def _status(failure: Exception) -> str:
    """What a failure is in a record; torch says that memory is out in words only."""
    if isinstance(failure, RankError) and isinstance(failure.cause, RequestError):
        return "unsupported"
    if isinstance(failure, RankHang):
        return "timeout"
    out_of_memory = ("MemoryError", "DefaultCPUAllocator", "out of memory")
    return "oom" if any(words in str(failure) for words in out_of_memory) else "failed"
