"""The record of a measured point, from its plans and its ranks' results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sp_bench import records
from sp_bench.cluster.device import same_model
from sp_bench.lower import TransportKind
from sp_bench.lower.staging import adds_up_on_the_way
from sp_bench.measure.gpu_watch import gpu_state
from sp_bench.measure.result import RankResult
from sp_bench.measure.samples import Samples
from sp_bench.plan.dataflow import dataflow
from sp_bench.plan.ops import Block, Fold, Plan, ReduceScatter, Transfer, TreeReduce
from sp_bench.plan.problem import DTYPE_BYTES, Problem
from sp_bench.point.counted import by_lane, counted, in_phases, rates, volumes_of
from sp_bench.point.outcome import Outcome
from sp_bench.point.request import Request
from sp_bench.point.timed import (
    breakdown,
    breakdown_alone,
    cores,
    exposed,
    interface_bytes,
    memory,
    prompt,
    sent_per_gpu,
    timeline_of,
    timing,
    timing_alone,
    traffic_of_peer,
    training_step,
    with_host_share,
)
from sp_bench.point.variants import Choice
from sp_bench.records.quantities import Breakdown, Exactness, Setup
from sp_bench.records.record import Part
from sp_bench.workload import GateErrors

GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
"""Whether NCCL registers the buffers of captured transfers, as it doesn't of others; it does unless this is 0."""


def outcome_of(
    request: Request,
    choice: Choice | None,
    ranks: Sequence[RankResult],
    hosts: Mapping[str, Sequence[int]],
    started: str,
) -> Outcome:
    """The record and samples of a point that all ranks have finished.

    `ranks` has the result of each rank, `hosts` the ranks on each host. `started` is when this run of points began,
    equal for points timed in turn.
    """
    asked = replace(request.asked(), iters=request.iters, warmup=request.warmup)
    provenance = {**records.provenance(), "ranks_by_host": hosts, "measured_at": started}
    plans = counted(request, choice)
    setup = replace(plans.setup, nodes=len(hosts)) if request.launch else plans.setup
    exactness = exactness_of(ranks[0].gate, ranks[0].timed)
    if wrong := next(filter(None, (rank.wrong(request.problem.dtype) for rank in ranks)), ""):
        parts = (asked, setup, plans.traffic, plans.memory, exactness)
        error = f"the correctness gate: {wrong}{_what_may_work(request, choice, ranks[0].gate)}"
        return Outcome(request.record("incorrect", error, *parts, notes=request.notes, provenance=provenance))
    provenance |= {"device": {**ranks[0].device, "nccl_settings": request.devices.nccl}}
    provenance |= {"communicators": list(ranks[0].communicators)} if ranks[0].communicators else {}
    setup, notes = _ran_on(request, setup, ranks)
    wrong = plans.wrong
    if choice:
        wrong = _sent_otherwise(request, choice, ranks) or wrong
    samples = Samples.joined(rank.samples for rank in ranks)
    held = memory(plans.memory, ranks)
    if request.alone:
        alone, inside = timing_alone(samples), breakdown_alone(request, samples, ranks)
        inside, remarks = with_host_share(inside, alone.alone_ms_median, ranks)
        notes += remarks
        all_parts: list[Part] = [alone, inside, plans.traffic, held]
    else:
        machines = [rank.machine for rank in ranks]
        samples = samples.from_first_start(dict(enumerate(machines)))
        times = timing(request, samples)
        assert times.step_ms_median is not None
        inside = breakdown(request, samples, ranks) if choice else Breakdown()
        inside, remarks = exposed(inside, times.step_ms_median)
        inside, queued = with_host_share(inside, times.step_ms_median, ranks)
        notes += [*remarks, *queued]
        traffic = replace(plans.traffic, comm_bytes_per_gpu=sent_per_gpu(ranks)) if choice else traffic_of_peer(ranks)
        traffic = replace(traffic, interface_bytes_per_gpu=interface_bytes(ranks, hosts))
        all_parts = [times, cores(inside, samples, machines), traffic, held]
        all_parts.append(rates(request, times.step_ms_median, setup.device_name))
        all_parts += [training_step(request, samples, ranks), prompt(request, samples, times.step_ms_median)]
    state, remarks = gpu_state([rank.gpu for rank in ranks])
    all_parts, notes = [*all_parts, state], [*notes, *remarks]
    status = "incorrect" if wrong else "ok"
    parts = (asked, setup, exactness, *all_parts)
    record = request.record(status, wrong or None, *parts, notes=notes, provenance=provenance)
    return Outcome(record, None if request.alone else timeline_of(samples), samples)


def _what_may_work(request: Request, choice: Choice | None, gate: GateErrors) -> str:
    """Advice on errors that may be of sums which are rounded wherever ranks pass them on; empty of other errors."""
    problem = request.problem
    wire, held = problem.wire_dtype, problem.accumulate_dtype
    if choice is None or DTYPE_BYTES[wire] >= DTYPE_BYTES[held] or not gate.may_be_rounding(problem.dtype):
        return ""
    if not any(_sends_sums(plan, choice.problem, request.cluster.transport) for plan in choice.plans.values()):
        return ""
    return f"; sums are rounded to {wire} at each hop: if that is why, wire_dtype={held} works"


def _sends_sums(plan: Plan, problem: Problem, transport: TransportKind) -> bool:
    """Whether ranks pass on partial results to which something was added, or which are added up on their way."""
    flow = dataflow(plan)
    adds = ((index, op) for index, op in plan if isinstance(op, Block | Fold))
    summed = {chunk for index, op in adds for chunk in op.writes if not flow.starts(index, chunk)}

    def of_sums(op: Transfer) -> bool:
        by_library = isinstance(op, ReduceScatter) and adds_up_on_the_way(op, problem, transport)
        return by_library or isinstance(op, TreeReduce) or not summed.isdisjoint(op.reads)

    return any(op.tensor.is_partial and of_sums(op) for _, op in plan.transfers if op.reads)


def exactness_of(gate: GateErrors, timed: GateErrors) -> Exactness:
    """The errors of the gate's problem and of what was timed, which are the same on all ranks."""
    errors = {f"err_{name}": error for name, error in gate.overall.items()}
    errors |= {f"err_timed_{name}": error for name, error in timed.overall.items()}
    queries, keys = timed.rows or (None, None)
    lengths = {"err_seqlen": gate.seqlen, "err_timed_seqlen": timed.seqlen}
    return Exactness(**errors, **lengths, err_timed_query_rows=queries, err_timed_key_rows=keys)


def _ran_on(request: Request, setup: Setup, ranks: Sequence[RankResult]) -> tuple[Setup, list[str]]:
    """The setup with the kernel and device that the ranks used, and the point's notes."""
    device, figures, notes = ranks[0].device.get("device", ""), setup.device_name or "", list(request.notes)
    first = ranks[0]
    margin = min((rank.sm_margin for rank in ranks if rank.sm_margin is not None), default=None)
    ctas = min((rank.lane_ctas for rank in ranks if rank.lane_ctas is not None), default=None)
    setup = replace(setup, kernel=first.kernel, sm_margin=margin, lane_ctas=ctas)
    if request.cluster.transport_options.cuda_graph:
        registers = first.device.get(GRAPH_REGISTER, "1")
        setup = replace(setup, transport=f"{setup.transport}, {GRAPH_REGISTER}={registers}")
    notes += dict.fromkeys(note for rank in ranks for note in rank.notes)
    if why := first.timed.uncompared:
        notes.append(f"no rows of what was timed were compared with exact ones: {why}")
    if request.devices.kind == "cuda" or request.alone:
        setup = replace(setup, device_name=device)
        if not same_model(device, figures):
            notes.append(
                f"ranks are on {device}; the figures of cluster={request.cluster.name} are of {figures}, and chose the"
                " variant"
            )
    if request.alone:
        setup = replace(setup, alone_ranks=list(request.alone), nodes=None)
        listed, gpus = ", ".join(map(str, request.alone)), request.problem.n
        notes.append(
            f"rank{'s' * (len(ranks) > 1)} {listed} of {gpus}, alone: what was to come is a copy of what was to go, so"
            " that these are times of kernels, folds, copies and interpreter, not of a step; results were not checked"
        )
    return setup, notes


def _sent_otherwise(request: Request, choice: Choice, ranks: Sequence[RankResult]) -> str:
    """An error for the last rank that sent other bytes than its plan says; empty if there is none."""
    volumes, wrong, numbers = volumes_of(choice), "", request.alone or range(len(ranks))
    for rank, result in zip(numbers, ranks, strict=True):
        sent = by_lane(result.sent_bytes)
        planned = by_lane(
            in_phases(request, [{phase: volume.of(rank) for phase, volume in each.items()} for each in volumes])
        )
        if sent != planned:
            wrong = f"rank {rank} sent {sent}, and the plan says {planned}"
    return wrong
