"""Measure points. Those with the same number of ranks share one pool and are timed in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from sp_bench import account
from sp_bench.check import check_all
from sp_bench.errors import RequestError, out_of_memory
from sp_bench.measure.homes import homes_for
from sp_bench.measure.pool import RankError, RankFailure, RankHang
from sp_bench.measure.ranks import open_ranks, ranks_by_host
from sp_bench.measure.thread_dump import as_json
from sp_bench.peers.peer import Peer
from sp_bench.plan.ops import Plan
from sp_bench.plan.tensors import DKV, DQ, KV, ODOQ
from sp_bench.point.choose import choose_attentions
from sp_bench.point.measured_record import outcome_of
from sp_bench.point.outcome import Outcome
from sp_bench.point.refusals import refuse_what_does_not_fit
from sp_bench.point.request import Request
from sp_bench.point.variants import Choice, costs_for
from sp_bench.termination import raise_if_terminated
from sp_bench.workload import Spec
from sp_bench.workload.base import PlannedAttention


def measure_points(requests: Sequence[Request], progress: Callable[[int], None]) -> list[Outcome]:
    """Measure points of equal gpus, iters and warmup, in turn iteration by iteration in one pool of ranks.

    On GPUs whose memory isn't enough for all of them together, they are measured in several pools (sharing.packs).
    `progress` is called with the number of steps done. If a rank fails, the point under way is to blame, and the others
    are measured again without it. One that ran out of memory beside others is tried again alone.
    """
    choices = [None if isinstance(request.method, Peer) else choose_attentions(request) for request in requests]
    for request, choice in zip(requests, choices, strict=True):
        for each in choice.attentions if choice else ():
            check_all(executed_plans(request, each), each.problem)
    outcomes: dict[int, Outcome] = {}
    together = _packs(requests, choices)
    for pack in together:
        some = [_told(requests[i], len(pack), len(requests)) if len(together) > 1 else requests[i] for i in pack]
        outcomes |= zip(pack, _measure_together(some, [choices[i] for i in pack], progress), strict=True)
    return [outcomes[i] for i in range(len(requests))]


def _packs(requests: Sequence[Request], choices: Sequence[Choice | None]) -> list[list[int]]:
    first = requests[0]
    memory = first.cluster.device.memory_bytes if first.devices.kind == "cuda" else None
    return packs(list(map(_least_bytes, requests, choices)), memory * USABLE if memory else None)


def _told(request: Request, here: int, of: int) -> Request:
    note = f"timed in turn with {here} of {of} points, as their memory together is more than a GPU's"
    return replace(request, notes=[*request.notes, note])


def _measure_together(
    requests: Sequence[Request], choices: Sequence[Choice | None], progress: Callable[[int], None]
) -> list[Outcome]:
    first = requests[0]
    processes = 1 if first.alone else first.problem.n
    local_ranks = first.launch.ranks_here if first.launch else processes
    held: Counter[str] = Counter()
    if first.devices.kind == "cpu":
        for request, choice in zip(requests, choices, strict=True):
            held.update({"attention": _least_bytes(request, choice)})
            held.update(dict(request.workload.held_bytes(request.cluster.device, request.problem)))
    refuse_what_does_not_fit(local_ranks, held, first.config)
    specs = [spec for pair in zip(requests, choices, strict=True) for spec in _specs(*pair)]
    each = len(specs) // len(requests)
    started = datetime.now(UTC).isoformat()
    try:
        timeout_s = max(request.timeout_s for request in requests)
        # A peer posts transfers from its compute thread, and all points timed in turn must get the same cores.
        transfers_first = not any(spec.peer for spec in specs)
        hosts = None
        if not first.launch and not first.alone:
            hosts = homes_for(first.cluster, first.problem.n, transfers_first=transfers_first)
        with open_ranks(processes, timeout_s, first.launch, hosts, first.devices) as pool:
            hosts_of_ranks = ranks_by_host(pool)
            by_rank = pool.run(
                "sp_bench.measure.job:measure", specs, first.iters, first.warmup, progress=lambda _: progress(1)
            )
    except RankFailure as failure:
        raise_if_terminated()
        # Ranks may be at different points. The failing rank's point is to blame.
        under_way = failure.progress
        if under_way is None and len(requests) > 1:
            return [point for request in requests for point in measure_points([request], progress)]
        under_way = (under_way or 0) // each
        hang = as_json(failure.dumps) if isinstance(failure, RankHang) else None
        if _status(failure) == "oom" and len(requests) > 1:  # others may have had the memory
            (failed,) = measure_points([requests[under_way]], progress)
        else:
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
    """The chosen plans, and those of untimed phases whose results the timed ones need."""
    costs = costs_for(request, choice.problem)
    return {
        phase: choice.plans.get(phase) or choice.method.plan(choice.problem, phase, costs)
        for phase in request.workload.executed(request.phases)
    }


def _specs(request: Request, choice: Choice | None) -> list[Spec]:
    """The specs of a point: one or, with mode=alone, one for each of its ranks."""
    spec = spec_of(request, choice)
    return [replace(spec, alone=rank) for rank in request.alone] or [spec]


def spec_of(request: Request, choice: Choice | None) -> Spec:
    """The part of a point that ranks get; without a choice, of a peer's."""
    return Spec(
        workload=request.workload,
        problem=choice.problem if choice else request.problem,
        plans=executed_plans(request, choice) if choice else {},
        attentions=tuple(PlannedAttention(each.problem, executed_plans(request, each)) for each in choice.attentions)
        if choice
        else (),
        peer=request.method if isinstance(request.method, Peer) else None,
        kernel=request.kernel,
        sm_margin=request.sm_margin,
        seed=request.seed,
        verify=request.verify,
        parts=request.parts,
        transport=request.cluster.transport_options,
    )


def _least_bytes(request: Request, choice: Choice | None) -> int:
    """Memory a rank needs at least: the plans' peak or, for a peer, its inputs and outputs."""
    if choice:
        transport = request.cluster.transport
        return max(
            account.peak_bytes(executed_plans(request, each).values(), each.problem, transport)
            for each in choice.attentions
        )
    return sum(request.problem.chunk_bytes(tensor, wire=False) for tensor in (ODOQ, KV, DQ, DKV))


def _status(failure: Exception) -> str:
    """The record's status for a failure."""
    if isinstance(failure, RankError) and isinstance(failure.cause, RequestError):
        return "unsupported"
    if isinstance(failure, RankHang):
        return "timeout"
    return "oom" if out_of_memory(failure) else "failed"


USABLE = 0.85
"""The share of a GPU's memory that points can have beside CUDA's context, NCCL's buffers, kernels' workspaces and
fragments."""


def packs(sizes: Sequence[int], capacity: float | None) -> list[list[int]]:
    """The indices of points of these bytes, in order, in as few packs as first-fit finds; one pack without a capacity.

    A point that is larger than the capacity has a pack to itself, and is tried: its size is an upper bound.
    """
    if capacity is None:
        return [list(range(len(sizes)))]
    bins: list[list[int]] = []
    room: list[float] = []
    for index, size in enumerate(sizes):
        fits = next((i for i, left in enumerate(room) if size <= left), None)
        if fits is None:
            bins.append([])
            room.append(capacity)
            fits = len(bins) - 1
        bins[fits].append(index)
        room[fits] -= size
    return bins
