"""Simulate a forward without a backward, chunk by chunk and layer by layer: a prompt, or a denoising step.

A layer's attention begins on all ranks together, after its matrix products for q, k and v, and what follows it begins
when the last rank has its output. The cache of a prompt lies on the ranks by tokens, so that a later chunk's attention
sends what its plan sends of all keys so far. A denoising step is one chunk, and leaves no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np

from sp_bench import account
from sp_bench.check import check_all
from sp_bench.cluster import Cluster
from sp_bench.plan.problem import Problem
from sp_bench.point.backing import validated
from sp_bench.point.choose import DeviceMemoryError, chosen_of, simulated
from sp_bench.point.counted import counted, with_sums
from sp_bench.point.outcome import Outcome
from sp_bench.point.request import Request
from sp_bench.point.simulated import refuse_unknown
from sp_bench.point.simulated_record import simulated_record
from sp_bench.point.variants import Choice
from sp_bench.records import Record
from sp_bench.records.quantities import Breakdown, Memory, TrainingStep
from sp_bench.simulate.beside import alone_s, beside, ring_traffic
from sp_bench.simulate.bounds import by_link_class, link_bytes, link_classes, lower_bounds
from sp_bench.simulate.graph import build_graph
from sp_bench.workload import Denoise, Prefill
from sp_bench.workload.base import SUNK
from sp_bench.workload.prefill_costs import ForwardCosts

PHASE = "forward"
ALONE = "the attention of one layer over all chunks: of the time to a first token it is that share alone"
SUMS = "tensor parallel: each layer's sums of activations over {} consecutive GPUs are hidden by nothing"
SOURCE = "the attention's from its plans, with the cache so far"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a prompt, in seconds and bytes of all layers."""

    attention_s: float
    busy_s: np.ndarray
    """Blocks and folds of each rank: (n,)."""
    idle_s: float
    """How long the first rank to end an attention waits for the last."""
    least_s: float
    """Blocks and folds as `busy_s`, without messages that take time of cores."""
    bounds_s: list[dict[str, float]]
    """Lower bounds on the attentions of each kind of layers, by what sets them."""
    crossed: np.ndarray
    """Bytes on each link: (L,)."""
    dense_s: float = 0.0
    """Matrix products and elementwise operations."""
    summed_s: float = 0.0
    """Sums over tensor-parallel GPUs."""
    summed_bytes: int = 0
    """Sent by each GPU in them."""

    @property
    def whole_s(self) -> float:
        """The whole chunk."""
        return self.attention_s + self.dense_s + self.summed_s


@dataclass(frozen=True)
class _Prompt:
    """A request's prompt on a cluster."""

    request: Request
    cluster: Cluster

    @cached_property
    def workload(self) -> Prefill | Denoise:
        return cast("Prefill | Denoise", self.request.workload)

    @cached_property
    def gpus(self) -> int:
        """The number of GPUs, of all tensor-parallel places."""
        return self.request.problem.n * self.workload.degree

    @cached_property
    def parts(self) -> tuple[Cluster, ...]:
        """The cluster of each tensor-parallel place."""
        return self.cluster.tensor_parts(self.gpus, self.workload.degree)

    def costs(self, problem: Problem) -> ForwardCosts | None:
        """The costs beside the attention of a chunk; None without a model."""
        if not self.workload.model:
            return None
        return self.workload.costs(problem, self.cluster.device, self.cluster.crowding(self.gpus))

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """How many layers have each of a chunk's attentions."""
        return self.workload.layers_by_attention

    def cache_bytes(self, chunk: Sequence[Problem]) -> int:
        """Bytes of keys and values that all layers have of one of a chunk's attentions each; 0 without a model."""
        costs = [self.costs(problem) for problem in chunk]
        return sum(layers * each.cache_bytes for layers, each in zip(self.layers, costs, strict=True) if each)

    def in_chunks(self, choice: Choice) -> list[tuple[Choice, ...]]:
        """The variants of each chunk's attentions, one for each kind of layers."""
        every, kinds = choice.attentions, len(self.layers)
        return [every[first : first + kinds] for first in range(0, len(every), kinds)]

    def chunk(self, choices: Sequence[Choice], *, last: bool) -> Chunk:
        """A chunk by its simulated variants; the last one has the head."""
        problem, layers, degree = choices[-1].problem, sum(self.layers), self.workload.degree
        kinds = [self._kind(count, choice) for count, choice in zip(self.layers, choices, strict=True)]
        costs, dense_s, summed_s, summed_bytes = self.costs(problem), 0.0, 0.0, 0
        if costs:
            dense_s = layers * (costs.before_s() + costs.after_s()) + costs.embedding_s()
            dense_s += costs.head_s() if last else 0.0
            sums = 2 * layers + 1  # after each row-parallel matrix, and of the embedding
            whole = self.cluster.network(self.gpus)
            summed_s = sums * alone_s([whole], degree, costs.tensor_sum_bytes, 2 * (degree - 1))
            summed_bytes = sums * costs.tensor_sum_bytes
        bounds_s = [kind.bounds_s for kind in kinds]
        return Chunk(
            attention_s=sum(kind.attention_s for kind in kinds),
            busy_s=sum((kind.busy_s for kind in kinds), np.zeros(1)),
            idle_s=sum(kind.idle_s for kind in kinds),
            least_s=sum(kind.least_s for kind in kinds),
            dense_s=dense_s,
            summed_s=summed_s,
            summed_bytes=summed_bytes,
            bounds_s=[bounds for kind in bounds_s for bounds in kind],
            crossed=sum((kind.crossed for kind in kinds), np.zeros(1)),
        )

    def _kind(self, layers: int, choice: Choice) -> Chunk:
        """The attentions of so many layers of a chunk, and nothing beside them."""
        attention_s, busy_s, idle_s, least_s = self._attention(choice)
        plan, problem = choice.plans[PHASE], choice.problem
        crossed = sum(
            (link_bytes(part.network(problem.n), account.traffic(plan, problem, part)) for part in self.parts),
            np.zeros(1),
        )
        bounds_s = lower_bounds(plan, problem, self.parts[0], crossed, least_s)
        return Chunk(
            attention_s=layers * attention_s,
            busy_s=layers * busy_s,
            idle_s=layers * idle_s,
            least_s=layers * least_s,
            bounds_s=[{name: layers * seconds for name, seconds in bounds_s.items()}],
            crossed=layers * crossed,
        )

    def _attention(self, choice: Choice) -> tuple[float, np.ndarray, float, float]:
        """One attention in seconds: the whole, each rank's blocks and folds, idle at its end, and the least compute."""
        if len(self.parts) == 1:
            run = choice.runs[PHASE]
            least_s = self.cluster.least_compute_s(run.work_s)
            return run.makespan_s, run.busy_s, float(run.idle_s.max()), least_s
        problem, plan = choice.problem, choice.plans[PHASE]
        graphs = [build_graph(plan, problem, part, use_symmetry=False) for part in self.parts]
        timing = beside(graphs, [part.network(problem.n) for part in self.parts], 0.0, 0, 0.0)
        least_s = max(
            part.least_compute_s(graph.work_s(graph.tasks)) for part, graph in zip(self.parts, graphs, strict=True)
        )
        return timing.attention_s, timing.busy_s, 0.0, least_s

    def bound(self, chunks: Sequence[Chunk]) -> tuple[dict[str, float], float, str]:
        """(bytes across each class of links per GPU, a lower bound in s, what sets most of it).

        Of each chunk: what computes beside the attention, and the bounds of its attentions and sums, one after another.
        """
        network, by_name = self.cluster.network(self.gpus), dict[str, float]()
        crossed = np.zeros(network.link_bytes_per_s.size)
        for chunk in chunks:
            crossed += chunk.crossed
            for bounds_s in chunk.bounds_s:
                name, seconds = max(bounds_s.items(), key=lambda each: each[1])
                by_name[name] = by_name.get(name, 0.0) + seconds
            by_name["compute"] = by_name.get("compute", 0.0) + chunk.dense_s
            if chunk.summed_bytes:
                sums = link_bytes(network, ring_traffic(network, self.workload.degree, chunk.summed_bytes))
                crossed += sums
                busiest = {
                    each: float((sums[links] / network.link_bytes_per_s[links]).max(initial=0.0))
                    for each, links in link_classes(network).items()
                }
                name = max(busiest, key=lambda each: busiest[each])
                by_name[name] = by_name.get(name, 0.0) + busiest[name]
        by_link = {name: size / self.gpus for name, size in by_link_class(network, crossed).items()}
        return by_link, sum(by_name.values()), max(by_name, key=lambda name: by_name[name])


def outcome(request: Request) -> Outcome:
    """The outcome of a simulated prompt (simulate_prefill)."""
    return Outcome(simulate_prefill(request))


def phases_ms(request: Request, cluster: Cluster) -> dict[str, float]:
    """Milliseconds of the forward on a cluster, with the plans that the request's own chooses."""
    chunks = _on(request, _chosen(request), cluster)
    return {PHASE: 1e3 * sum(chunk.whole_s for chunk in chunks)}


def least_compute_s(request: Request) -> float:
    """Seconds that the ranks compute, without transfers. Raises RequestError if it doesn't fit the device."""
    chunks = _chunks(_Prompt(request, request.cluster), _chosen(request))
    return sum(chunk.least_s + chunk.dense_s for chunk in chunks)


def simulate_prefill(request: Request) -> Record:
    """The record of a simulated prompt. Raises DeviceMemoryError if a chunk fits the device by no variant."""
    choice, prompt = _chosen(request), _Prompt(request, request.cluster)
    for each in {each.problem: each for each in choice.attentions}.values():  # chunks that see alike have equal plans
        check_all(each.plans, each.problem)
    chunks = _chunks(prompt, choice)
    step_ms = 1e3 * sum(chunk.whole_s for chunk in chunks)
    busy_s, dense_s = sum((chunk.busy_s for chunk in chunks), np.zeros(1)), sum(chunk.dense_s for chunk in chunks)
    attention_s, computed_ms = sum(chunk.attention_s for chunk in chunks), 1e3 * (float(busy_s.max()) + dense_s)
    by_link, bound_s, bound_by = prompt.bound(chunks)
    on_part = replace(request, cluster=prompt.parts[0])
    plans, validation = counted(on_part, choice), validated(on_part, choice)
    held = _held(prompt, choice)
    costs, degree = prompt.costs(choice.problem), prompt.workload.degree
    step = request.workload.described(request.problem)
    if costs:
        step = replace(
            step,
            attention_ms=1e3 * attention_s,
            attention_exposed_ms=1e3 * (attention_s - float(busy_s.max())),
            dense_ms=1e3 * dense_s,
            tensor_sum_ms=1e3 * sum(chunk.summed_s for chunk in chunks),
        )
    inside = Breakdown(
        bound_ms=1e3 * bound_s,
        bound_by=bound_by,
        compute_ms=computed_ms,
        exposed_comm_ms=step_ms - computed_ms,
        rank_idle_ms_max=1e3 * sum(chunk.idle_s for chunk in chunks) if degree == 1 else None,
        rank_imbalance=None if costs else float(busy_s.max() / busy_s.mean()),
    )
    memory = Memory(
        peak_mem_bytes_max=held.peak_bytes,
        peak_mem_source=costs.sources if costs else SOURCE,
        peak_mem_bytes_expected=held.peak_bytes,
    )
    prompt_parts = request.workload.prompt(request.problem).timed(step_ms, [1e3 * chunk.whole_s for chunk in chunks])
    traffic = plans.traffic if degree == 1 else with_sums(plans.traffic, sum(chunk.summed_bytes for chunk in chunks))
    notes = [costs.note if costs else ALONE] + [SUMS.format(degree)] * (degree > 1)
    return simulated_record(
        request,
        choice,
        plans,
        validation,
        step_ms=step_ms,
        phases_ms={PHASE: step_ms},
        inside=inside,
        traffic=replace(traffic, comm_bytes_by_link=by_link),
        memory=memory,
        others=(prompt_parts, held.described(step)),
        notes=notes + [SUNK] * bool(request.asked().sinks),
    )


def _chunks(prompt: _Prompt, choice: Choice) -> list[Chunk]:
    *earlier, last = prompt.in_chunks(choice)
    return [*(prompt.chunk(each, last=False) for each in earlier), prompt.chunk(last, last=True)]


def _on(request: Request, choice: Choice, cluster: Cluster) -> list[Chunk]:
    """The chunks with the chosen plans on another cluster."""
    prompt = _Prompt(request, cluster)
    simulations = [simulated(each, prompt.parts[0]) for each in choice.attentions]
    return _chunks(prompt, replace(simulations[-1], earlier=tuple(simulations[:-1])))


def _chosen(request: Request) -> Choice:
    """The variant of each chunk with the fastest attention, of those that fit beside what else is held.

    Raises RequestError for what isn't known of a model on this cluster.
    """
    prompt = _Prompt(request, request.cluster)
    if prompt.workload.model:
        refuse_unknown(request)
    attentions, kinds = prompt.workload.attentions(request.problem), len(prompt.layers)
    chunks = [attentions[first : first + kinds] for first in range(0, len(attentions), kinds)]
    asked = [_with_the_rest(prompt, replace(request, problem=each), chunk) for chunk in chunks for each in chunk]
    try:
        return chosen_of(asked)
    except DeviceMemoryError:
        if not prompt.workload.model:
            raise
        raise _too_large(prompt, _held_beside(prompt, chunks[-1][-1], chunks[-1])) from None


def _with_the_rest(prompt: _Prompt, request: Request, chunk: Sequence[Problem]) -> Request:
    """The request of one of a chunk's attentions, on a device with the memory that is left beside what else is held.

    Raises DeviceMemoryError if the chunk doesn't fit, whatever its attention takes.
    """
    cluster, device = prompt.parts[0], request.cluster.device
    costs = prompt.costs(request.problem)
    if not costs or device.memory_bytes is None:
        return replace(request, cluster=cluster)
    kinds = _held_beside(prompt, request.problem, chunk)
    rest = device.memory_bytes - sum(kinds.values())
    fits = costs.parameters_bytes + prompt.cache_bytes(chunk) + costs.activations_bytes
    if rest <= 0 or fits > device.memory_bytes:
        raise _too_large(prompt, kinds)
    return replace(request, cluster=replace(cluster, device=replace(device, memory_bytes=rest)))


def _held_beside(prompt: _Prompt, problem: Problem, chunk: Sequence[Problem]) -> dict[str, int]:
    """Bytes that a GPU holds beside one of a chunk's attentions, by kind."""
    costs = prompt.costs(problem)
    assert costs, "of a model"
    return {
        "parameters": costs.parameters_bytes,
        "cache of other layers": prompt.cache_bytes(chunk) - costs.cache_bytes,
        "residual stream": costs.hidden_bytes,
    }


def _too_large(prompt: _Prompt, kinds: Mapping[str, int]) -> DeviceMemoryError:
    device, costs = prompt.cluster.device, prompt.costs(prompt.request.problem)
    assert costs and device.memory_bytes, "of a model, on a device whose memory is known"
    listed = ", ".join(f"{kind} {size / 1e9:.3g}" for kind, size in kinds.items() if size)
    rule = f"a GPU holds in GB {listed}, and then an attention and a feed-forward: {device.name} has "
    return DeviceMemoryError(
        f"seqlen={prompt.request.problem.seqlen} on gpus={prompt.gpus}",
        f"{rule}{device.memory_bytes / 1e9:.4g}",
        f"{costs.would_fit} would work",
    )


@dataclass(frozen=True)
class _Held:
    """Bytes on a GPU."""

    peak_bytes: int
    attention_bytes: int
    """The most that one attention holds, its layer's cache included."""
    parameters_bytes: int = 0
    activations_bytes: int = 0
    """The most that a feed-forward holds."""

    def described(self, step: TrainingStep) -> TrainingStep:
        """The step with its memory by kind; as it is without a model."""
        kinds = {f"{name}_bytes": getattr(self, f"{name}_bytes") for name in ("parameters", "attention", "activations")}
        return replace(step, **kinds) if step.model else step


def _held(prompt: _Prompt, choice: Choice) -> _Held:
    """The memory of the chunk that takes most."""
    by_chunk = []
    for each, together in ((each, chunk) for chunk in prompt.in_chunks(choice) for each in chunk):
        problem, costs = each.problem, prompt.costs(each.problem)
        attention = account.peak_bytes(each.plans.values(), problem, prompt.parts[0].transport)
        if not costs:
            by_chunk.append(_Held(attention, attention))
            continue
        transient = max(attention - costs.cache_bytes + costs.hidden_bytes, costs.activations_bytes)
        peak = costs.parameters_bytes + prompt.cache_bytes([other.problem for other in together]) + transient
        by_chunk.append(_Held(peak, attention, costs.parameters_bytes, costs.activations_bytes))
    return max(by_chunk, key=lambda held: held.peak_bytes)
