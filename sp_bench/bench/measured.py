"""Measured points: those with equally many ranks share one pool of processes and are timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from sp_bench import account, records
from sp_bench.bench.choose import Choice, choose
from sp_bench.bench.inside import describe_alone, describe_devices, inside_for
from sp_bench.bench.outcome import account_for, by_lane, describe_peer, plain, rates_for
from sp_bench.bench.request import Request, refuse_what_does_not_fit
from sp_bench.check import check_all
from sp_bench.errors import RequestError
from sp_bench.measure.homes import homes_for
from sp_bench.measure.pool import RankError, RankFailure, RankHang
from sp_bench.measure.ranks import by_host, open_ranks
from sp_bench.measure.spec import TIMES, Measured, Spec, from_first_start
from sp_bench.measure.stats import summarise
from sp_bench.measure.termination import raise_if_terminated
from sp_bench.measure.where import as_json
from sp_bench.peers.peer import Peer
from sp_bench.records import Record

Samples = dict[str, list[list[float]]]
"""Milliseconds by name, then rank, then iteration."""


class Point(NamedTuple):
    """What became of a point."""

    record: Record
    choice: Choice | None = None
    samples: Samples | None = None
    hang: dict[str, Any] | None = None
    """Where each rank was when none answered any more (measure.where), by rank."""


def measure_points(requests: Sequence[Request], progress: Callable[[int], None]) -> list[Point]:
    """Measure points of equal gpus, iters and warmup in one pool of ranks, iteration by iteration in turn.

    `progress` is called with the number of steps done. Where a rank fails, the point under way is to blame, and the
    others are measured again without it.
    """
    choices = [None if isinstance(request.method, Peer) else choose(request) for request in requests]
    for choice in choices:
        if choice:
            check_all(choice.plans, choice.problem)
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
        first_go_transfers = not any(spec.peer for spec in specs)
        hosts = None
        if not first.launch and not alone:
            hosts = homes_for(first.cluster, first.problem.n, transfers_first=first_go_transfers)
        processes = 1 if alone else first.problem.n
        with open_ranks(processes, timeout_s, first.launch, hosts, first.devices) as pool:
            ranks_by_host = by_host(pool)
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
        hang = as_json(failure.where) if isinstance(failure, RankHang) else None
        failed = Point(requests[under_way].record(_status(failure), str(failure)), hang=hang)
        others = [request for i, request in enumerate(requests) if i != under_way]
        points = measure_points(others, progress) if others else []
        return [*points[:under_way], failed, *points[under_way:]]
    return [
        _point(
            request, choice, [m for rank in by_rank for m in rank[each * i : each * (i + 1)]], ranks_by_host, started
        )
        for i, (request, choice) in enumerate(zip(requests, choices, strict=True))
    ]


def _specs(request: Request, choice: Choice | None) -> list[Spec]:
    """What each process is told: one thing or, where ranks are executed alone, one for each of them."""
    peer = request.method if isinstance(request.method, Peer) else None
    spec = Spec(
        phases=request.phases,
        plans=choice.plans if choice else {},
        peer=peer,
        problem=choice.problem if choice else request.problem,
        kernel=request.kernel,
        verify=request.verify,
        parts=request.parts,
        seed=request.seed,
    )
    alone = request.alone
    return [replace(spec, alone=rank) for rank in alone] if alone else [spec]


def _least_bytes(request: Request, choice: Choice | None) -> int:
    """What a rank holds at least: by the plans or, of a peer, its inputs and outputs."""
    if choice:
        return account.peak_bytes(choice.plans.values(), choice.problem)
    return sum(request.problem.chunk_bytes(tensor, wire=False) for tensor in ("odoq", "kv", "dq", "dkv"))


def _status(failure: Exception) -> str:
    """What a failure is in a record; torch says that memory is out in words only."""
    if isinstance(failure, RankError) and isinstance(failure.cause, RequestError):
        return "unsupported"
    if isinstance(failure, RankHang):
        return "timeout"
    out_of_memory = ("MemoryError", "DefaultCPUAllocator", "out of memory")
    return "oom" if any(words in str(failure) for words in out_of_memory) else "failed"


def _point(
    request: Request, choice: Choice | None, ranks: list[Measured], hosts: dict[str, list[int]], started: str
) -> Point:
    """`started` is when this run of points began, which tells those that were timed in turn from others."""
    record = request.record("ok")
    record.iters, record.warmup = request.iters, request.warmup
    record.nodes = len(hosts) if request.launch else record.nodes
    record.provenance = {**records.provenance(), "ranks_by_host": hosts, "measured_at": started}
    if choice:
        account_for(record, request, choice)
    elif isinstance(request.method, Peer):
        describe_peer(record, request, request.method)
    errors = ranks[0].errors
    record.err_out, record.err_dq = errors.get("out"), errors.get("dq")
    record.err_dk, record.err_dv = errors.get("dk"), errors.get("dv")
    wrong = next(filter(None, (rank.wrong(request.problem.dtype) for rank in ranks)), "")
    if wrong:
        record.status, record.error = "incorrect", f"the correctness gate: {wrong}"
        return Point(record, choice)
    describe_devices(record, request, ranks[0])
    if choice and request.alone:
        _count_sent(record, choice, ranks, request.alone)
        describe_alone(record, request, ranks)
        _memory_for(record, ranks)
        return Point(record, choice, _samples(request, ranks, inside=True))
    from_first_start(ranks)
    _times_for(record, request, ranks)
    if choice:
        _count_sent(record, choice, ranks, range(len(ranks)))
        _parts_for(record, request, ranks)
    else:
        _sent_by_peer(record, ranks)
    _memory_for(record, ranks)
    _interfaces_for(record, ranks, hosts)
    _cores_for(record, ranks)
    record.kernel = ranks[0].kernel
    rates_for(record, request)
    return Point(record, choice, _samples(request, ranks, inside=choice is not None))


def _times_for(record: Record, request: Request, ranks: list[Measured]) -> None:
    """Every statistic is of iterations, each phase of which takes as long as its slowest rank."""
    step_ms = _medians_for(record, request, ranks, "")
    spread = summarise(step_ms, request.seed)
    record.step_ms_median, record.step_ms_p25, record.step_ms_p75 = spread.median, spread.p25, spread.p75
    record.step_ms_ci95_low, record.step_ms_ci95_high = spread.ci95_low, spread.ci95_high
    own_ms = 1e3 * np.median([np.add(rank.forward_s, rank.backward_s) for rank in ranks], axis=1)
    record.rank_step_ms_min, record.rank_step_ms_max = float(own_ms.min()), float(own_ms.max())


def _parts_for(record: Record, request: Request, ranks: list[Measured]) -> None:
    """What a plan's blocks and transfers take in the step, and alone."""
    assert record.step_ms_median is not None
    blocks_ms = inside_for(record, ranks)
    record.rank_imbalance = float(blocks_ms.max() / blocks_ms.mean())
    record.exposed_comm_ms = record.step_ms_median - float(blocks_ms.max())
    if request.parts:
        record.compute_only_ms_median = float(np.median(_medians_for(record, request, ranks, "compute_only_")))
        transfers_ms = _medians_for(record, request, ranks, "communication_only_")
        record.communication_only_ms_median = float(np.median(transfers_ms))
        record.exposed_comm_ms = record.step_ms_median - record.compute_only_ms_median


def _memory_for(record: Record, ranks: list[Measured]) -> None:
    """What the ranks held, in place of what the plans say that they can hold."""
    live, grown, given = ([getattr(r, name) for r in ranks] for name in ("live_bytes", "grown_bytes", "device_bytes"))
    if any(given):
        record.peak_mem_source = "torch's allocator on the GPU, from before the inputs to its peak in the first step"
        record.peak_mem_bytes_max, record.peak_mem_bytes_min = max(given), min(given)
        return
    record.peak_rss_growth_bytes_max, record.peak_rss_growth_bytes_min = max(grown), min(grown)
    if any(live):  # a peer's tensors can't be seen
        record.peak_mem_source = "the executor's live tensors"
        record.peak_mem_bytes_max, record.peak_mem_bytes_min = max(live), min(live)


def _samples(request: Request, ranks: list[Measured], *, inside: bool) -> Samples:
    """`inside`: with what a step spent its time on, which is not known of a peer."""
    names = [name for name in TIMES if name.removesuffix("_s").endswith(request.phases)]
    names += ("core_s", "compute_only_core_s", "communication_only_core_s")
    names += ("blocks_s", "waits_s", "kernels_s", "folds_s", "caller_s") * inside
    given = [name for name in names if getattr(ranks[0], name)]
    return {name[:-1] + "ms": [[1e3 * x for x in getattr(rank, name)] for rank in ranks] for name in given}


def _medians_for(record: Record, request: Request, ranks: list[Measured], part: str) -> np.ndarray:
    """Set the medians of the phases of a part of the step, and return all of it, in milliseconds of each iteration.

    A phase takes as long as its slowest rank: the next one begins when all have ended it.
    """
    both_ms = np.zeros(record.iters or 0)
    for phase in request.phases:
        slowest_ms = 1e3 * np.array([getattr(rank, f"{part}{phase}_s") for rank in ranks]).max(axis=0)
        setattr(record, f"{part}{phase}_ms_median", float(np.median(slowest_ms)))
        both_ms += slowest_ms
    return both_ms


def _count_sent(record: Record, choice: Choice, ranks: list[Measured], numbers: Sequence[int]) -> None:
    """Volume from the tensors that were sent, which must be what the plan says on every rank that was executed."""
    volumes = {phase: account.volume(plan, choice.problem) for phase, plan in choice.plans.items()}
    total = 0
    for rank, measured in zip(numbers, ranks, strict=True):
        sent = by_lane(measured.sent_bytes)
        planned = by_lane({phase: volume.of(rank) for phase, volume in volumes.items()})
        if sent != planned:
            record.status, record.error = "incorrect", f"rank {rank} sent {sent}, and the plan says {planned}"
        total += sum(sent.values())
    if len(ranks) == choice.problem.n:
        record.comm_bytes_per_gpu = plain(total / len(ranks))


def _sent_by_peer(record: Record, ranks: list[Measured]) -> None:
    """Volume from the operations of torch.distributed; not known where some of them can't be counted."""
    sent = [by_lane(rank.sent_bytes) for rank in ranks]
    totals = [sum(by_operation.values()) for by_operation in sent]
    if not any(totals) and len(ranks) > 1:
        return
    record.comm_bytes_per_gpu, record.comm_bytes_busiest_gpu = plain(sum(totals) / len(ranks)), int(max(totals))
    names = dict.fromkeys(name for by_operation in sent for name in by_operation)
    record.comm_bytes_by_lane = {name: plain(sum(x.get(name, 0) for x in sent) / len(ranks)) for name in names}


def _interfaces_for(record: Record, ranks: list[Measured], hosts: Mapping[str, Sequence[int]]) -> None:
    """What the links' counters say that hosts sent, where there are such."""
    first = [ranks[on_host[0]].interface_sent_bytes for on_host in hosts.values()]
    if all(first):
        record.interface_bytes_per_gpu = float(np.median(np.sum(first, axis=0)) / len(ranks))


def _cores_for(record: Record, ranks: list[Measured]) -> None:
    """How long cores were busy; the first rank of each machine tells, of which several hosts may be on one."""
    tell = {rank.machine: rank for rank in reversed(ranks)}.values()
    for part in ("core", "compute_only_core", "communication_only_core"):
        told = [getattr(rank, f"{part}_s") for rank in tell]
        if all(told):
            setattr(record, f"{part}_ms_mean", 1e3 * float(np.sum(told)) / len(told[0]))
