"""The times of a training step, layer by layer: its attention beside the collectives of the parameters of the next one.

A layer begins on all ranks together. While it computes, the parameters of the next one are gathered over the same links
as its attention's transfers, and in the backward the gradients of the last one are reduced; a layer ends when both
have. The first layer's parameters, and those outside the layers, are waited for. On ranks that share cores, what all of
them compute takes as many times longer, and collectives are waited for, as gloo's are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sp_bench.cluster import Cluster
from sp_bench.point.variants import Choice
from sp_bench.simulate.beside import alone_s, beside
from sp_bench.simulate.graph import build_graph
from sp_bench.workload.costs import TrainingCosts


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


def step_times(choice: Choice, costs: TrainingCosts, parts: Sequence[Cluster], whole: Cluster) -> StepTimes:
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
