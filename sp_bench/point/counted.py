"""The parts of a record that are counted from plans, and the rates of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sp_bench import account
from sp_bench.cluster.device import same_model
from sp_bench.peers.peer import Peer
from sp_bench.plan.documents import Documents
from sp_bench.point.planning import planning_ms
from sp_bench.point.request import Request
from sp_bench.point.variants import Choice, costs_for
from sp_bench.records.quantities import Memory, Rates, Setup, Traffic
from sp_bench.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The parts of a record that plans determine before anything runs."""

    setup: Setup
    traffic: Traffic = field(default_factory=Traffic)
    memory: Memory = field(default_factory=Memory)
    wrong: str = ""
    """Set if the plans don't send as many bytes as the method's closed form says; otherwise empty."""


def counted(request: Request, choice: Choice | None) -> Counted:
    """Variant, volume, lower bound and memory of the chosen plans. A peer, without plans, has its variant only."""
    if choice is None:
        assert isinstance(request.method, Peer)
        return Counted(setup=replace(request.setup(), variant=request.method.variant(request.problem) or None))
    problem, method = choice.problem, choice.method
    tile_a, tile_b = method.tile_shape(problem.n) or (None, None)
    attentions = choice.attentions
    padded = [each.problem.padded for each in attentions if each.problem.padded]
    setup = replace(
        request.setup(),
        layout=problem.layout.name,
        tile_a=tile_a,
        tile_b=tile_b,
        variant=_variant(attentions) or None,
        padded_heads=max((one.heads for one in padded), default=None),
        padded_kv_heads=max((one.kv_heads for one in padded), default=None),
        work_imbalance=account.work_imbalance(
            (times, each.plans[phase], each.problem)
            for times, phase, each in executed(request.workload, choice)
            if phase == next(iter(each.plans))
        ),
        work_imbalance_lower_bound=account.least_imbalance(problem),
        candidates=None if choice.earlier else choice.candidates,
        planning_ms=_planning_ms(request, choice),
    )
    traffic = _traffic(request, choice)
    # Of a training step: of its attention.
    peak_bytes = max(map(sum, zip(peaks(request, attentions), _standing(request, attentions), strict=True)))
    memory = Memory(
        peak_mem_bytes_max=peak_bytes, peak_mem_source="computed from the plans", peak_mem_bytes_expected=peak_bytes
    )
    sent, formula = traffic.comm_bytes_per_gpu, traffic.comm_bytes_expected
    differ = formula is not None and sent != formula
    wrong = f"the plan sends {sent} bytes, the closed form says {formula}" if differ else ""
    return Counted(setup=setup, traffic=traffic, memory=memory, wrong=wrong)


def peaks(request: Request, attentions: Sequence[Choice]) -> list[int]:
    """account.peak_bytes of each of a step's attentions."""
    return [account.peak_bytes(each.plans.values(), each.problem, request.cluster.transport) for each in attentions]


def _standing(request: Request, attentions: Sequence[Choice]) -> list[int]:
    """Bytes that a measured rank holds during each attention for the others: buffers of the size of the largest, and
    what the workload keeps.
    """
    if request.mode == "simulate" or len(attentions) == 1:
        return [0] * len(attentions)
    every, transport = [each.problem for each in attentions], request.cluster.transport
    buffers = [account.buffer_bytes(each.plans.values(), each.problem, transport) for each in attentions]
    kept = [request.workload.standing_bytes(problem, every) for problem in every]
    return [max(buffers) - own + more for own, more in zip(buffers, kept, strict=True)]


def _variant(attentions: Sequence[Choice]) -> str:
    """The variants of all attentions, each once; with their layouts where these differ."""
    layouts = {each.problem.layout.name for each in attentions}
    of_layout = (f"{each.variant} {each.problem.layout.name}".strip() for each in attentions)
    return "; ".join(dict.fromkeys(of_layout if len(layouts) > 1 else (each.variant for each in attentions)))


def _planning_ms(request: Request, choice: Choice) -> float | None:
    """planning.planning_ms of a pack of documents; None for what is planned once."""
    problem = choice.problem
    if not isinstance(problem.mask, Documents):
        return None
    method = replace(choice.method, layout=problem.layout.name)
    return planning_ms(method, problem, costs_for(request, problem), request.cluster.transport)


def volumes_of(choice: Choice) -> list[dict[str, account.Volume]]:
    """The volume of one execution of each plan, by its phase, for each of the step's attentions."""
    return [
        {phase: account.volume(plan, each.problem) for phase, plan in each.plans.items()} for each in choice.attentions
    ]


Executed = tuple[int, str, Choice]
"""(how often a step executes a plan, its phase, the choice of the attention that it is of)."""


def executed(workload: Workload, choice: Choice) -> list[Executed]:
    """Every plan that a step executes."""
    return [
        (workload.executions(i)[phase], phase, each) for i, each in enumerate(choice.attentions) for phase in each.plans
    ]


def _traffic(request: Request, choice: Choice) -> Traffic:
    every, by_plan = executed(request.workload, choice), volumes_of(choice)
    of_plans = (volume for each in by_plan for volume in each.values())
    volumes = [(times, volume) for (times, _, _), volume in zip(every, of_plans, strict=True)]
    sent = [{phase: volume.sent_bytes for phase, volume in each.items()} for each in by_plan]
    others = sum(sum(request.workload.sent_otherwise(phase, choice.problem).values()) for phase in request.phases)
    cluster = request.cluster
    node_of = cluster.network(choice.problem.n).node_of
    across = [
        times * account.sent_across_nodes(each.plans[phase], each.problem, node_of, cluster)
        for times, phase, each in every
    ]
    return Traffic(
        comm_bytes_per_gpu=plain(others + sum(times * volume.total_bytes for times, volume in volumes)),
        comm_bytes_busiest_gpu=others + sum(times * volume.max_bytes for times, volume in volumes),
        comm_bytes_expected=_closed_form(every, others),
        comm_bytes_lower_bound=sum(
            times * account.lower_bound_bytes(each.problem, phase, kept=bool(each.plans[phase].kept))
            for times, phase, each in every
        ),
        comm_bytes_least=_least(every),
        comm_bytes_statistics=plain(sum(times * volume.statistic_bytes for times, volume in volumes)),
        comm_bytes_by_lane=by_lane(in_phases(request, sent)),
        comm_bytes_across_nodes_max=int(np.sum(across, axis=0).max()),
    )


def _least(every: Sequence[Executed]) -> float | None:
    """account.least_bytes of a step's phases."""
    least_of = [(times, account.least_bytes(each.problem, phase)) for times, phase, each in every]
    known = [times * least for times, least in least_of if least is not None]
    return sum(known) if len(known) == len(least_of) else None


def with_sums(traffic: Traffic, within: float) -> Traffic:
    """The traffic with `within` bytes that each GPU sends for sums inside its tensor-parallel group."""
    expected = traffic.comm_bytes_expected
    assert traffic.comm_bytes_per_gpu is not None
    return replace(
        traffic,
        comm_bytes_per_gpu=round(traffic.comm_bytes_per_gpu + within),
        comm_bytes_busiest_gpu=None,
        comm_bytes_expected=None if expected is None else round(expected + within),
        comm_bytes_by_lane=None,
        comm_bytes_across_nodes_max=None,
    )


def in_phases(request: Request, sent: Sequence[Mapping[str, Mapping[tuple[str, ...], float]]]) -> dict[str, Counter]:
    """Bytes sent in each timed phase by key, from those of one execution of each plan of each attention, by phase."""
    by_phase = {}
    for phase in request.phases:
        of_phase = Counter(dict(request.workload.sent_otherwise(phase, request.problem)))
        for attention, of_plans in enumerate(sent):
            for plan_phase, times in request.workload.times_executed(phase, attention).items():
                of_phase.update({key: times * size for key, size in of_plans[plan_phase].items()})
        by_phase[phase] = of_phase
    return by_phase


def _closed_form(every: Sequence[Executed], others: int) -> float | None:
    """The bytes that a GPU sends by the method's formula; None for a pack, of which most methods send a part."""
    if not all(each.problem.mask.sends_unseen or each.method.counts_rows for _, _, each in every):
        return None
    return plain(others + sum(times * each.method.bytes_sent(each.problem, phase) for times, phase, each in every))


def by_lane(sent: Mapping[str, Mapping[tuple[str, ...], float]]) -> dict[str, float]:
    """Sent bytes with keys as text: phase/lane/tensor/field, or phase/operation for a peer."""
    return {"/".join((phase, *key)): plain(size) for phase, counts in sent.items() for key, size in counts.items()}


def plain(size: float) -> float:
    """A mean over ranks, as an int if it is whole."""
    return int(size) if size == int(size) else size


def rates(request: Request, step_ms: float, device_name: str | None) -> Rates:
    """Throughput and MFU of a step. `device_name` is the ranks' device, which may differ from the cluster's."""
    if not step_ms:
        return Rates()
    step_s, problem = step_ms / 1e3, request.problem
    flops = sum(request.workload.flops(phase, problem) for phase in request.phases)
    tflops_per_gpu = flops / step_s / problem.n / 1e12
    ran_on, figures = device_name or "", request.cluster.device.name
    known = ran_on == figures or same_model(ran_on, figures)
    peak_tflops = request.cluster.device.peak_tflops.get(problem.dtype) if known else None
    return Rates(
        iters_per_s=1 / step_s,
        tokens_per_s=request.workload.tokens(problem) / step_s,
        tflops_per_gpu=tflops_per_gpu,
        mfu=tflops_per_gpu / peak_tflops if peak_tflops else None,
    )
