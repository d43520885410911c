"""Simulate a training step: choose its plans, time its layers (step_times), and record it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from sp_bench import account
from sp_bench.check import check_all
from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.plan.problem import Problem
from sp_bench.point.backing import validated
from sp_bench.point.choose import DeviceMemoryError, choose_attentions
from sp_bench.point.counted import counted, executed, with_sums
from sp_bench.point.outcome import Outcome
from sp_bench.point.request import LEAST_STEP, Request
from sp_bench.point.simulated import refuse_unknown
from sp_bench.point.simulated_record import simulated_record
from sp_bench.point.step_times import StepTimes, step_times
from sp_bench.point.variants import Choice
from sp_bench.records import Record
from sp_bench.records.quantities import Breakdown, Memory, TrainingStep
from sp_bench.simulate.beside import ring_traffic
from sp_bench.simulate.bounds import by_link_class, link_bytes, link_classes
from sp_bench.workload.base import SUNK
from sp_bench.workload.costs import TrainingCosts, too_large

if TYPE_CHECKING:
    from sp_bench.workload import Train

ALONG = "each layer's parameters are gathered, and gradients reduced, beside the layer before it (FSDP)"
TENSOR = "tensor parallel: each layer's sums of activations over {} consecutive GPUs are hidden by nothing"
WAITED = "each layer's parameters are gathered, and gradients reduced, while nothing computes (FSDP over gloo)"
COPIED = "what a layer keeps is copied to the host beside the next layer, and back while nothing computes (offload)"
FUSED = "matrix products at their best rate or memory speed, elementwise operations once through memory"


def outcome(request: Request) -> Outcome:
    """The outcome of a simulated training step (simulate_training)."""
    return Outcome(simulate_training(request))


def phases_ms(request: Request, cluster: Cluster) -> dict[str, float]:
    """Milliseconds of each phase on a cluster, with the plans that the request's own chooses.

    Raises RequestError as simulate_training does.
    """
    record = simulate_training(request, cluster)
    return {phase: getattr(record, f"{phase}_ms_median") for phase in request.phases}


def simulate_training(request: Request, cluster: Cluster | None = None) -> Record:
    """The record of a simulated training step. Raises RequestError if it doesn't fit the device's memory.

    Slow ranks are refused: only the attention's model knows them. With a `cluster`, the plans that the request's own
    chooses are simulated on that one.
    """
    return simulate_chosen(request, cluster)[0]


def simulate_chosen(request: Request, cluster: Cluster | None = None) -> tuple[Record, Choice]:
    """The same record, and the variant of the attention that was chosen."""
    costs = _costs(request)
    refuse_unknown(request)
    held = costs.held_bytes()
    choice = _choose(replace(request, cluster=_parts(costs, request.cluster)[0]), costs, held)
    for each in choice.attentions:
        check_all(each.plans, each.problem)
    if cluster:
        request = replace(request, cluster=cluster)
        costs = _costs(request)
    whole, parts = request.cluster, _parts(costs, request.cluster)
    degree = len(parts)
    request = replace(request, cluster=parts[0])
    times = step_times(choice, costs, parts, whole)
    plans, validation = counted(request, choice), validated(request, choice)
    held |= {"attention": plans.memory.peak_mem_bytes_expected or 0}
    step_ms = 1e3 * sum(times.phases_s.values())
    by_link, bound_s, bound_by = _bound(request, choice, costs, parts, whole, times.computed_s)
    record = simulated_record(
        request,
        choice,
        plans,
        validation,
        step_ms=step_ms,
        phases_ms={phase: 1e3 * seconds for phase, seconds in times.phases_s.items()},
        inside=Breakdown(
            bound_ms=1e3 * bound_s,
            bound_by=bound_by,
            compute_ms=1e3 * times.computed_s,
            exposed_comm_ms=step_ms - 1e3 * times.computed_s,
        ),
        traffic=replace(with_sums(plans.traffic, _tensor_bytes(costs)), comm_bytes_by_link=by_link),
        memory=Memory(
            peak_mem_bytes_max=sum(held.values()),
            peak_mem_source="parameters, gradients, optimizer, activations, and the attention's from its plans",
            peak_mem_bytes_expected=sum(held.values()),
        ),
        others=(_described(request, costs, times, held),),
        notes=_notes(request.cluster, costs, degree),
    )
    return record, choice


def _described(request: Request, costs: TrainingCosts, times: StepTimes, held: Mapping[str, int]) -> TrainingStep:
    """The parts of the step, and its memory by kind."""
    return replace(
        request.workload.described(request.problem),
        attention_ms=1e3 * times.attention_s,
        full_attention_ms=1e3 * times.full_attention_s if request.workload.in_one_layout else None,
        attention_exposed_ms=1e3 * (times.attention_s - times.busy_s),
        dense_ms=1e3 * times.dense_s,
        loss_ms=1e3 * costs.turns * costs.loss_s(),
        gradient_sync_ms=1e3 * times.sync_s,
        tensor_sum_ms=1e3 * times.summed_s,
        offload_ms=1e3 * times.copied_s,
        optimizer_ms=1e3 * costs.optimizer_s(),
        host_bytes=costs.host_bytes,
        **{f"{kind}_bytes": size for kind, size in held.items()},
    )


def _notes(cluster: Cluster, costs: TrainingCosts, degree: int) -> list[str]:
    """Remarks on what overlaps in the step, and on rates that are taken to be the best."""
    device = cluster.device
    notes = [FUSED] * (device.elementwise_bytes_per_s == device.memory_bytes_per_s)
    notes += [WAITED if cluster.cores else ALONG] * costs.sharded
    notes += [COPIED] * costs.training.offload
    notes += [SUNK] * costs.model.sinks
    return notes + [TENSOR.format(degree)] * (degree > 1)


def least_compute_s(request: Request) -> float:
    """Seconds that the ranks compute in a step, without transfers. Raises RequestError if it doesn't fit the device."""
    costs = _costs(request)
    parts = _parts(costs, request.cluster)
    choice = _choose(replace(request, cluster=parts[0]), costs, costs.held_bytes())
    return step_times(choice, costs, parts, request.cluster).least_s


def _parts(costs: TrainingCosts, cluster: Cluster) -> tuple[Cluster, ...]:
    """The cluster of each tensor-parallel place. The ranks of the first data-parallel group come first.

    Raises RequestError for groups that share nodes with a part of another: they wouldn't be alike.
    """
    groups, degree, node = costs.training.data_parallel, costs.training.tensor_parallel, cluster.topology.gpus_per_node
    size = costs.problem.n * degree
    if groups > 1 and node and size % node and node % size:
        rule = f"has groups of {size} GPUs, and nodes of {cluster.name} have {node}: all groups are taken to be alike"
        works = "groups that fill nodes, or of which a node holds a whole number, would work"
        raise RequestError(f"train.data_parallel={groups}", rule, works)
    return cluster.tensor_parts(costs.gpus, degree, listed=groups > 1)


def _costs(request: Request) -> TrainingCosts:
    """The costs beside the attention on the request's cluster."""
    workload, cluster = cast("Train", request.workload), request.cluster
    crowding = cluster.crowding(request.problem.n * workload.training.tensor_parallel * workload.groups)
    return workload.costs(request.problem, cluster.device, crowding)


def _choose(request: Request, costs: TrainingCosts, held: dict[str, int]) -> Choice:
    """The variant with the fastest attention, of those that fit beside what else is held."""
    device = request.cluster.device
    if device.memory_bytes is None:
        return choose_attentions(request)
    rest = device.memory_bytes - sum(held.values())
    if rest <= 0:
        raise too_large(costs, held)
    cluster = replace(request.cluster, device=replace(device, memory_bytes=rest))
    try:
        return choose_attentions(replace(request, cluster=cluster))
    except DeviceMemoryError:
        raise too_large(costs, held | {"attention": least_attention_bytes(request)}) from None


def least_attention_bytes(request: Request) -> int:
    """The peak of the attention's variant that holds least; of several attentions, of the one that needs most."""
    return max(_least_bytes(request, problem) for problem in request.workload.attentions(request.problem))


def _least_bytes(request: Request, problem: Problem) -> int:
    method, profile, transport = request.ours, request.cluster.profile(problem), request.cluster.transport
    return min(
        account.peak_bytes(
            [m.plan(problem, phase, profile) for phase in request.workload.plan_phases], m.assigned(problem), transport
        )
        for m in method.on_nodes(problem, request.cluster.neighbours(problem.n))
    )


def _tensor_bytes(costs: TrainingCosts) -> float:
    """Bytes that each GPU sends in a step within its tensor-parallel group."""
    layers, sums = costs.model.layers, costs.tensor_sums
    return costs.turns * costs.tensor_sum_bytes * (layers * (sums["forward"] + sums["backward"]) + sums["outside"])


def _bound(
    request: Request, choice: Choice, costs: TrainingCosts, parts: Sequence[Cluster], whole: Cluster, computed_s: float
) -> tuple[dict[str, float], float, str]:
    """(bytes across each class of links per GPU, a lower bound on the step in s, what sets it)."""
    problem, degree, network = choice.problem, len(parts), whole.network(costs.gpus)
    # To the GPUs with its place in other tensor-parallel groups, beside the attention.
    sent = sum(sum(request.workload.sent_otherwise(p, request.problem).values()) for p in request.phases)
    of_attention, crossed = np.zeros((2, network.link_bytes_per_s.size))
    for part in parts:
        own, every = part.network(problem.n), part.network(costs.ranks)
        for times, phase, each in executed(request.workload, choice):
            of_attention += times * link_bytes(own, account.traffic(each.plans[phase], each.problem, part))
        if costs.ranks > 1:
            crossed += link_bytes(every, ring_traffic(every, costs.ranks, sent))
    if degree > 1:
        crossed += link_bytes(network, ring_traffic(network, degree, _tensor_bytes(costs)))
    crossed += of_attention
    bounds_s = {"compute": computed_s} | {
        name: float((crossed[links] / network.link_bytes_per_s[links]).max(initial=0.0))
        for name, links in link_classes(network).items()
    }
    bound_by = max(bounds_s, key=lambda name: bounds_s[name])
    others = (costs.training.data_parallel - 1) * of_attention  # the groups are alike
    by_link = {name: size / costs.gpus for name, size in by_link_class(network, crossed + others).items()}
    return by_link, bounds_s[bound_by], bound_by


def longest(request: Request) -> int:
    """The longest sequence whose training step fits the device: a multiple of LEAST_STEP tokens for each rank.

    Raises RequestError if not even the shortest fits, or the device's memory is not limited.
    """
    device, step = request.cluster.device, LEAST_STEP * request.problem.n
    memory_bytes = device.memory_bytes
    if memory_bytes is None:
        rule = f"the memory of {device.name} is not known"
        raise RequestError("seqlen=max", rule, "cluster.device.memory_bytes=8e10 would work")

    def missing(count: int) -> RequestError | None:
        problem = request.problem.scaled(count * step)
        asked = replace(request, problem=problem)
        costs = _costs(asked)
        held = costs.held_bytes() | {"attention": least_attention_bytes(asked)}
        return too_large(costs, held) if sum(held.values()) > memory_bytes else None

    if error := missing(1):
        raise error
    low, high = 1, 2
    while not missing(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if missing(middle) else (middle, high)
    return low * step
