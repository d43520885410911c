"""Simulate a training step: layer by layer, its attention beside the collectives of the parameters of the next one.

A layer begins on all ranks together. While it computes, the parameters of the next one are gathered over the same links
as its attention's transfers, and in the backward the gradients of the last one are reduced; a layer ends when both
have. The first layer's parameters, and those outside the layers, are waited for. On ranks that share cores, what all of
them compute takes as many times longer, and collectives are waited for, as gloo's are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from sp_bench import account
from sp_bench.check import check_all
from sp_bench.cluster import Cluster
from sp_bench.errors import RequestError
from sp_bench.plan.problem import Problem
from sp_bench.point.backing import validated
from sp_bench.point.choose import Choice, DeviceMemoryError, choose_attentions
from sp_bench.point.counted import counted, with_sums
from sp_bench.point.outcome import Outcome
from sp_bench.point.request import LEAST_STEP, Request
from sp_bench.point.simulated import refuse_unknown
from sp_bench.point.simulated_record import simulated_record
from sp_bench.records import Record
from sp_bench.records.quantities import Breakdown, Memory, TrainingStep
from sp_bench.simulate.beside import alone_s, beside, ring_traffic
from sp_bench.simulate.bounds import by_link_class, link_bytes, link_classes
from sp_bench.simulate.graph import build_graph
from sp_bench.workload.base import SUNK
from sp_bench.workload.costs import TrainingCosts, too_large

if TYPE_CHECKING:
    from sp_bench.workload import Train

ALONG = "each layer's parameters are gathered, and gradients reduced, beside the layer before it (FSDP)"
TENSOR = "tensor parallel: each layer's sums of activations over {} consecutive GPUs are hidden by nothing"
WAITED = "each layer's parameters are gathered, and gradients reduced, while nothing computes (FSDP over gloo)"
COPIED = "what a layer keeps is copied to the host beside the next layer, and back while nothing computes (offload)"
FUSED = "matrix products at their best rate or memory speed, elementwise operations once through memory"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer in one phase, in seconds."""

    whole_s: float
    attention_s: float
    """From its beginning to its last block."""
    busy_s: float
    """Blocks and folds of the busiest rank."""
    least_s: float
    """The same without messages, which take time of cores that ranks share."""
    dense_s: float
    summed_s: float
    """Sums over tensor-parallel GPUs."""
    copied_s: float = 0.0
    """Copies of activations to the host or back that nothing hides."""

    @property
    def waits_s(self) -> float:
        """The part of it that neither computes nor waits for its attention or sums: a collective that ends later."""
        return self.whole_s - self.attention_s - self.dense_s - self.summed_s - self.copied_s

    def beside_copies(self, copied_s: float) -> Layer:
        """The layer beside copies, of what the one before it keeps, to the host."""
        longer_s = max(copied_s - self.whole_s, 0.0)
        return replace(self, whole_s=self.whole_s + longer_s, copied_s=longer_s)

    def after_copies(self, copied_s: float) -> Layer:
        """The layer after copies from the host, for which it waits."""
        return replace(self, whole_s=self.whole_s + copied_s, copied_s=copied_s)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """A whole step, in seconds."""

    phases_s: dict[str, float]
    """By phase: forward, backward, update."""
    attention_s: float
    """The attention of all layers, with its waits for transfers."""
    full_attention_s: float
    """The part of it that is of the first of the step's attentions: of layers of two kinds, of those that see all."""
    busy_s: float
    """Blocks and folds of the busiest rank."""
    dense_s: float
    """Matrix products and elementwise operations of all layers."""
    sync_s: float
    """Sums of gradients, and gathers that nothing hides."""
    summed_s: float
    """Sums of activations over tensor-parallel GPUs."""
    copied_s: float
    """Copies of activations to the host and back that nothing hides."""
    computed_s: float
    """All that computes."""
    least_s: float
    """The same without messages, which take time of cores that ranks share."""


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
    times = _times(choice, costs, parts, whole)
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
    return _times(choice, costs, parts, request.cluster).least_s


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


def _times(choice: Choice, costs: TrainingCosts, parts: Sequence[Cluster], whole: Cluster) -> StepTimes:
    """The step of the chosen plans: layer by layer, and what stands around the layers.

    `parts` are the clusters of all tensor-parallel places, `whole` is that of all GPUs.
    """
    degree = len(parts)
    sum_s = alone_s([whole.network(costs.gpus)], degree, costs.tensor_sum_bytes, 2 * (degree - 1))
    full, sums, ranks = costs.training.recompute == "full", costs.tensor_sums, costs.ranks
    layers = [_both_phases(each, costs, parts, sum_s) for each in choice.attentions]
    networks = [part.network(ranks, idle=True) for part in parts]
    first_s = alone_s(networks, ranks, costs.gathered_bytes, ranks - 1)
    outside_s = alone_s(networks, ranks, costs.outside_bytes, 2 * (ranks - 1))
    sync_s = alone_s(networks, ranks, costs.summed_bytes, 2 * (ranks - 1))
    turns, edge_s = costs.turns, sums["outside"] * sum_s
    times = [turns * count for count in costs.model.layers_by_attention]

    def of_all(seconds: Callable[[Layer, Layer], float]) -> float:
        """The sum over all layers of this of their forward and backward."""
        return sum(count * seconds(*layer) for count, layer in zip(times, layers, strict=True))

    def attention_s(forward: Layer, backward: Layer) -> float:
        return (1 + full) * forward.attention_s + backward.attention_s

    busy_s = of_all(lambda forward, backward: (1 + full) * forward.busy_s + backward.busy_s)
    dense_s = of_all(lambda forward, backward: forward.dense_s + backward.dense_s - full * forward.attention_s)
    around_s = dense_s + turns * costs.loss_s() + costs.optimizer_s()
    gathers_s = turns * (first_s + outside_s) + of_all(lambda forward, backward: forward.waits_s + backward.waits_s)
    return StepTimes(
        phases_s={
            "forward": turns * (first_s + costs.loss_s() + edge_s) + of_all(lambda forward, _: forward.whole_s),
            "backward": turns * outside_s + of_all(lambda _, backward: backward.whole_s),
            "update": sync_s + costs.optimizer_s(),
        },
        attention_s=of_all(attention_s),
        full_attention_s=times[0] * attention_s(*layers[0]),
        busy_s=busy_s,
        dense_s=dense_s,
        sync_s=sync_s + gathers_s,
        summed_s=of_all(lambda forward, backward: forward.summed_s + backward.summed_s) + turns * edge_s,
        copied_s=of_all(lambda forward, backward: forward.copied_s + backward.copied_s),
        computed_s=busy_s + around_s,
        least_s=of_all(lambda forward, backward: (1 + full) * forward.least_s + backward.least_s) + around_s,
    )


def _both_phases(choice: Choice, costs: TrainingCosts, parts: Sequence[Cluster], sum_s: float) -> tuple[Layer, Layer]:
    """The forward and the backward of a layer with the chosen plans; `sum_s` is a sum over tensor-parallel GPUs."""
    full, sums, ranks = costs.training.recompute == "full", costs.tensor_sums, costs.ranks
    dense_s = costs.before_s(), costs.after_s()
    forward = _layer(choice, "forward", parts, ranks, costs.gathered_bytes, 1, dense_s, (0.0, 2 * sum_s))
    forward = forward.beside_copies(costs.copied_s)
    backward = _layer(
        choice,
        "backward",
        parts,
        ranks,
        costs.gathered_bytes + costs.reduced_bytes,
        2,
        (costs.again_s() + forward.attention_s * full + costs.after_backward_s(), costs.before_backward_s()),
        ((sums["backward"] - 1) * sum_s, sum_s),
    )
    return forward, backward.after_copies(costs.copied_s)


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
    method, profile, transport = request.method, request.cluster.profile(problem), request.cluster.transport
    return min(
        account.peak_bytes(
            [m.plan(problem, phase, profile) for phase in request.plan_phases], m.assigned(problem), transport
        )
        for m in method.on_nodes(problem, request.cluster.neighbours(problem.n))  # pyright: ignore[reportAttributeAccessIssue]  # no peer trains
    )


def _layer(
    choice: Choice,
    phase: str,
    parts: Sequence[Cluster],
    ranks: int,
    sent_bytes: float,
    collectives: int,
    dense_s: tuple[float, float],
    summed_s: tuple[float, float],
) -> Layer:
    """One layer of a phase beside the collectives of all `ranks`; `dense_s` and `summed_s` stand before and after its
    attention.
    """
    problem, before_s, steps = choice.problem, dense_s[0] + summed_s[0], collectives * (ranks - 1)
    graphs = [build_graph(choice.plans[phase], problem, part, use_symmetry=False) for part in parts]
    networks, waited_s = [part.network(ranks) for part in parts], 0.0
    if parts[0].cores:
        idle = [part.network(ranks, idle=True) for part in parts]
        waited_s, sent_bytes = alone_s(idle, ranks, sent_bytes, steps), 0.0
    timing = beside(graphs, networks, sent_bytes, steps, before_s)
    return Layer(
        whole_s=max(timing.attention_s + dense_s[1] + summed_s[1], timing.collective_s) + waited_s,
        attention_s=timing.attention_s - before_s,
        busy_s=float(timing.busy_s.max()),
        least_s=max(part.least_compute_s(graph.work_s(graph.tasks)) for part, graph in zip(parts, graphs, strict=True)),
        dense_s=sum(dense_s),
        summed_s=sum(summed_s),
    )


def _tensor_bytes(costs: TrainingCosts) -> float:
    """Bytes that each GPU sends in a step within its tensor-parallel group."""
    layers, sums = costs.model.layers, costs.tensor_sums
    return costs.turns * costs.tensor_sum_bytes * (layers * (sums["forward"] + sums["backward"]) + sums["outside"])


def _bound(
    request: Request,
    choice: Choice,
    costs: TrainingCosts,
    parts: Sequence[Cluster],
    whole: Cluster,
    computed_s: float,
) -> tuple[dict[str, float], float, str]:
    """(bytes across each class of links per GPU, a lower bound on the step in s, what sets it)."""
    problem, degree, network = choice.problem, len(parts), whole.network(costs.gpus)
    # To the GPUs with its place in other tensor-parallel groups, beside the attention.
    sent = sum(sum(request.workload.sent_otherwise(p, request.problem).values()) for p in request.phases)
    of_attention, crossed = np.zeros((2, network.link_bytes_per_s.size))
    for part in parts:
        own, every = part.network(problem.n), part.network(costs.ranks)
        for i, each in enumerate(choice.attentions):
            times = request.workload.executions(i)
            for phase, plan in each.plans.items():
                of_attention += times[phase] * link_bytes(own, account.traffic(plan, each.problem, part))
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
