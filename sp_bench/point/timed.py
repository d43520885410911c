"""The parts of a record that come from measured samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from sp_bench.measure.result import RankResult
from sp_bench.measure.samples import COMMUNICATION_ONLY, COMPUTE_ONLY, CORE_WINDOW, CORES, START, STEP, Samples
from sp_bench.measure.stats import rank_medians_ms, slowest_ms, summarise
from sp_bench.plan.method import PHASES
from sp_bench.point.counted import by_lane, plain
from sp_bench.point.request import Request
from sp_bench.records.quantities import HOST_BOUND, Breakdown, Memory, Prompt, Timing, Traffic, TrainingStep
from sp_bench.records.timeline import MeasuredTimeline
from sp_bench.workload.prefill_costs import chunk_part


def timing(request: Request, samples: Samples) -> Timing:
    """Statistics over iterations. Each phase takes as long as its slowest rank."""
    by_phase = {phase: slowest_ms(samples, STEP, phase) for phase in request.phases}
    step = summarise(sum(by_phase.values(), np.zeros(request.iters)), request.seed)
    own_ms = rank_medians_ms(samples, STEP)
    return Timing(
        **{f"step_ms_{name}": value for name, value in vars(step).items()},
        **{f"{phase}_ms_median": float(np.median(times_ms)) for phase, times_ms in by_phase.items()},
        rank_step_ms_min=float(own_ms.min()),
        rank_step_ms_max=float(own_ms.max()),
        start_skew_ms_median=start_skew_ms(request.phases, samples),
    )


def start_skew_ms(phases: Sequence[str], samples: Samples) -> float | None:
    """How far apart ranks came to the barriers on their streams before phases; None if there were none.

    The median over iterations, of the phase with most.
    """
    if not samples.by_rank(START).size:
        return None
    waited_s = [samples.by_rank(START, phase) for phase in phases]
    return 1e3 * max(float(np.median(of_phase.max(axis=0) - of_phase.min(axis=0))) for of_phase in waited_s)


def timeline_of(samples: Samples) -> MeasuredTimeline | None:
    """Every rank's mean step; None without times of blocks, as of a peer's code or the replay of a graph."""
    blocks_s, waits_s = samples.by_rank("blocks"), samples.by_rank("waits")
    if not blocks_s.size:
        return None
    return MeasuredTimeline(blocks_s=blocks_s.mean(axis=1).tolist(), waits_s=waits_s.mean(axis=1).tolist())


def timing_alone(samples: Samples) -> Timing:
    """The times of ranks that were executed without their peers. They are no step: nothing was sent."""
    return Timing(alone_ms_median=_slowest_rank_ms(samples, STEP))


def breakdown(request: Request, samples: Samples, ranks: Sequence[RankResult]) -> Breakdown:
    """The times of blocks and transfers of plans, in the step and each alone."""
    inside = _inside(samples, ranks)
    if samples.by_rank("blocks").size:
        blocks_ms = rank_medians_ms(samples, "blocks")
        inside = replace(inside, rank_imbalance=float(blocks_ms.max() / blocks_ms.mean()))
    if not request.parts:
        return inside
    medians_ms = {}
    for part in (COMPUTE_ONLY, COMMUNICATION_ONLY):
        by_phase = {phase: slowest_ms(samples, part, phase) for phase in request.phases}
        medians_ms[f"{part}_ms_median"] = float(np.median(np.sum(list(by_phase.values()), axis=0)))
        medians_ms |= {f"{part}_{phase}_ms_median": float(np.median(times)) for phase, times in by_phase.items()}
    return replace(inside, **medians_ms)


def exposed(found: Breakdown, step_ms: float) -> tuple[Breakdown, list[str]]:
    """`found` with exposed_comm_ms, and a note if the blocks alone took longer than the step, so that it is 0."""
    alone_ms = found.compute_ms if found.compute_only_ms_median is None else found.compute_only_ms_median
    if alone_ms is None:
        return found, []
    over_ms = alone_ms - step_ms
    note = f"exposed_comm_ms is 0: the step took {over_ms:.3g} ms less than its blocks alone, which tells how far to"
    notes = [f"{note} trust their difference"] if over_ms > 0 else []
    return replace(found, exposed_comm_ms=max(-over_ms, 0.0)), notes


def with_host_share(
    found: Breakdown, step_ms: float | None, ranks: Sequence[RankResult]
) -> tuple[Breakdown, list[str]]:
    """`found` with the share of their step, or of their time alone, that ranks on GPUs take to queue it, if they say.

    And a note if it is most of it.
    """
    if not any(rank.memory.device_bytes for rank in ranks) or not step_ms or not found.interpreter_ms:
        return found, []
    found = replace(found, host_share=(share := found.interpreter_ms / step_ms))
    if share <= HOST_BOUND:
        return found, []
    return found, [
        f"host-bound: queueing the step takes {share:.0%} of it, so that it may be the host's time and not the GPU's;"
        " cuda_graph=auto replays an attention step in one launch"
    ]


def breakdown_alone(request: Request, samples: Samples, ranks: Sequence[RankResult]) -> Breakdown:
    """The time breakdown of ranks that were executed without their peers."""
    inside = _inside(samples, ranks)
    return replace(inside, compute_only_ms_median=_slowest_rank_ms(samples, COMPUTE_ONLY)) if request.parts else inside


def cores(found: Breakdown, samples: Samples, machines: Sequence[str]) -> Breakdown:
    """`found` with busy core times. `machines` has the machine of each rank; each machine's first rank sampled them."""
    first = [machines.index(machine) for machine in dict.fromkeys(machines)]
    busy_s = {name: samples.by_rank(name)[first] for name in CORES.values() if samples.by_rank(name).size}
    means = {f"{name}_ms_mean": 1e3 * float(each_s.sum()) / each_s.shape[1] for name, each_s in busy_s.items()}
    if (window_s := samples.by_rank(CORE_WINDOW)).size:
        means["core_window_ms_mean"] = 1e3 * float(window_s[first].mean())
    return replace(found, **means)


def memory(planned: Memory, ranks: Sequence[RankResult]) -> Memory:
    """The measured memory of the ranks, beside the peak that the plans allow."""
    given = [rank.memory.device_bytes for rank in ranks]
    if any(given):
        source = "torch's allocator on the GPU, from before the inputs to its peak in the first step"
        active, reserved = zip(*((rank.memory.active_bytes, rank.memory.reserved_bytes) for rank in ranks), strict=True)
        return replace(
            planned,
            peak_mem_source=source,
            peak_mem_bytes_max=max(given),
            peak_mem_bytes_min=min(given),
            peak_active_bytes_max=max(active),
            peak_reserved_bytes_max=max(reserved),
        )
    kinds = ranks[0].memory.kinds
    live, grown = [rank.memory.live_bytes for rank in ranks], [rank.memory.grown_bytes for rank in ranks]
    measured = replace(planned, peak_rss_growth_bytes_max=max(grown), peak_rss_growth_bytes_min=min(grown))
    if not any(live):  # a peer's tensors can't be seen
        return measured
    trained = "gradients, optimizer, " if "gradients" in kinds else ""
    source = f"parameters, {trained}activations and " * bool(kinds) + "the executor's live tensors"
    return replace(measured, peak_mem_source=source, peak_mem_bytes_max=max(live), peak_mem_bytes_min=min(live))


def training_step(request: Request, samples: Samples, ranks: Sequence[RankResult]) -> TrainingStep:
    """The parts of a step of a model; nothing for workload=attention."""
    described = request.workload.described(request.problem)
    if not samples.by_rank("attention").size:
        return described
    parts = {field.name: field.name.removesuffix("_ms") for field in fields(TrainingStep) if field.name.endswith("_ms")}
    timed = {name: part for name, part in parts.items() if samples.by_rank(part).size}
    times_ms = {name: float(rank_medians_ms(samples, part).max()) for name, part in timed.items()}
    phases = [phase for phase in PHASES if phase in request.phases]
    whole_s = sum(samples.by_rank(STEP, phase) for phase in phases)
    inside = [samples.by_rank(part, phase) for part in ("attention", "loss", "gradient_sync") for phase in phases]
    dense_s = whole_s - sum(seconds for seconds in inside if seconds.size)
    kinds = {f"{kind}_bytes": max(rank.memory.kinds[kind] for rank in ranks) for kind in ranks[0].memory.kinds}
    return replace(
        described,
        **times_ms,
        **kinds,
        attention_exposed_ms=float(rank_medians_ms(samples, "waits").max()),
        dense_ms=1e3 * float(np.median(dense_s, axis=1).max()),
        losses=list(ranks[0].losses) or None,
    )


def prompt(request: Request, samples: Samples, step_ms: float) -> Prompt:
    """How a prompt was computed; nothing for other workloads."""
    described = request.workload.prompt(request.problem)
    chunks = range(described.chunks or 0)
    return described.timed(step_ms, [float(rank_medians_ms(samples, chunk_part(index)).max()) for index in chunks])


def sent_per_gpu(ranks: Sequence[RankResult]) -> float:
    """Bytes of the tensors sent in one step, the mean over the ranks."""
    return plain(sum(sum(counts.values()) for rank in ranks for counts in rank.sent_bytes.values()) / len(ranks))


def traffic_of_peer(ranks: Sequence[RankResult]) -> Traffic:
    """The volume of the operations of torch.distributed; not known if some can't be counted."""
    if not sent_per_gpu(ranks) and len(ranks) > 1:
        return Traffic()
    sent = [by_lane(rank.sent_bytes) for rank in ranks]
    names = dict.fromkeys(name for by_operation in sent for name in by_operation)
    return Traffic(
        comm_bytes_per_gpu=sent_per_gpu(ranks),
        comm_bytes_busiest_gpu=int(max(sum(by_operation.values()) for by_operation in sent)),
        comm_bytes_by_lane={name: plain(sum(x.get(name, 0) for x in sent) / len(ranks)) for name in names},
    )


def interface_bytes(ranks: Sequence[RankResult], hosts: Mapping[str, Sequence[int]]) -> float | None:
    """Bytes per GPU sent in a step, by the link counters of emulated hosts; None if there are none."""
    first = [ranks[on_host[0]].link_sent_bytes for on_host in hosts.values()]
    return float(np.median(np.sum(first, axis=0)) / len(ranks)) if all(first) else None


def _inside(samples: Samples, ranks: Sequence[RankResult]) -> Breakdown:
    """Blocks, kernels, folds and interpreter, each of the rank with most of it.

    The replay of a graph has no times inside, and a step on GPUs without parts only the caller's.
    """
    if not samples.by_rank("caller").size:
        return Breakdown()
    caller_ms, on_gpus = rank_medians_ms(samples, "caller"), any(rank.memory.device_bytes for rank in ranks)
    if not samples.by_rank("blocks").size:
        return Breakdown(interpreter_ms=float(caller_ms.max()))
    blocks_ms, kernels_ms, folds_ms = (rank_medians_ms(samples, part) for part in ("blocks", "kernels", "folds"))
    return Breakdown(
        compute_ms=float(blocks_ms.max()),
        kernels_ms=float(kernels_ms.max()),
        folds_ms=float(folds_ms.max()),
        interpreter_ms=float((caller_ms if on_gpus else blocks_ms - kernels_ms - folds_ms).max()),
    )


def _slowest_rank_ms(samples: Samples, part: str) -> float:
    """The median over iterations of the slowest rank's time of all phases together."""
    return 1e3 * float(np.median(samples.by_rank(part).max(axis=0)))
