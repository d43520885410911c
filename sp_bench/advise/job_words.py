"""The printed advice on a training job: the answer, the ranking, and the settings of frameworks."""

from __future__ import annotations

from dataclasses import replace

from sp_bench.advise.candidates import for_method
from sp_bench.advise.code import Wanted
from sp_bench.advise.flags import FRAMEWORKS, settings
from sp_bench.advise.job import Answer, Job
from sp_bench.cli.words import tokens
from sp_bench.point.backing import TELLING

OFFLOADED = "activations are kept in the host's memory, which has no flag here"
ROWS = 12
"""Rows of the ranking, unless all are asked for."""


def heading(found: Answer) -> list[str]:
    """The job, the answer with what ties, and how sure it is."""
    first, record = found.jobs[0], found.jobs[0].record
    whole = step_tokens(first)
    lines = [
        f"Training {record.model} on {record.gpus} GPUs of {record.cluster}: sequences of {tokens(record.seqlen)} "
        f"tokens, {tokens(whole)} a step, {record.mask}, {record.dtype}. All times are simulated.",
        "",
        f"{first.name} trains most: {first.tokens_per_s:,.0f} tokens/s, in {peak(first)} a GPU.",
    ]
    others = [job for job in found.tied_splits if job.split != first.split]
    if others:
        each = ", ".join(f"{job.name} ({job.tokens_per_s:,.0f})" for job in others)
        lines.append(f"Too close to call: {each}.")
        lines.append(f"Least memory among these: {by_memory(found).name}, {peak(by_memory(found))}.")
    if not record.validation_error:
        lines.append(
            f"No published step is like it: steps within {TELLING:.0%} are called a tie, as repetitions differ by that."
        )
    return [*lines, *(f"note: {note}" for note in record.notes or ())]


def step_tokens(job: Job) -> int:
    """Tokens of a whole step."""
    record = job.record
    return record.batch * record.seqlen * job.split.data * (record.turns or 1)


def by_memory(found: Answer) -> Job:
    """The job that needs the least memory, of the splits that tie."""
    return min(found.tied_splits, key=lambda job: job.record.peak_mem_bytes_max or 0)


def peak(job: Job) -> str:
    """Its peak memory."""
    return f"{(job.record.peak_mem_bytes_max or 0) / 1e9:,.1f} GB"


def ranking(found: Answer, *, every: bool) -> dict[str, list[str]]:
    """The columns of the ranking. Unless `every`, the best of each split and the best few of all."""
    shown = shown_jobs(found, every=every)
    records = [(job, job.record) for job in shown]
    return {
        "CP x DP x TP": [f"{s.context} x {s.data} x {s.tensor}" for s in (job.split for job in shown)],
        "attention": [job.attention for job in shown],
        "tokens/s": [f"{job.tokens_per_s:,.0f}" for job in shown],
        "step, s": [f"{(r.step_ms_median or 0) / 1e3:,.1f}" for _, r in records],
        "peak mem": [peak(job) for job in shown],
        "recompute": [f"{r.recompute}{', offload' * bool(r.offload)}" for _, r in records],
        "MFU": [f"{r.mfu:.1%}" if r.mfu is not None else "-" for _, r in records],
        "not hidden": [f"{(r.exposed_comm_ms or 0) / (r.step_ms_median or 1):.0%}" for _, r in records],
        "turns": [str(r.turns or 1) for _, r in records],
    }


def shown_jobs(found: Answer, *, every: bool) -> list[Job]:
    """The jobs of the ranking's rows."""
    if every:
        return found.jobs
    best: dict[object, Job] = {}
    for job in found.jobs:
        best.setdefault(job.split, job)
    several = [*best.values()][:ROWS]
    more = [job for job in found.jobs if job not in several][: ROWS - len(several)]
    return sorted([*several, *more], key=lambda job: -job.tokens_per_s)


def refused(found: Answer) -> list[str]:
    """Why other splits can't be, a line each."""
    lines = [f"  {split}: {why.partition(': ')[2] or why}" for split, why in found.refused.items()]
    return ["", "Splits that don't fit or can't be:", *lines] if lines else []


def how_to(found: Answer) -> list[str]:
    """The command of the first job, and for each framework what it calls the settings of the fastest that it has."""
    first = found.jobs[0]
    lines = ["", "How to run it:", f"  {first.name}:", f"    {command(found, first)}"]
    for name, names in (("torchtitan", torchtitan), ("Megatron-LM", megatron)):
        for job in found.jobs:
            of_attention = attention_settings(job).get(name)
            if of_attention or job.split.context == 1:
                lines.append(f"  {name} ({FRAMEWORKS[name].checked}), {job.name}, {job.tokens_per_s:,.0f} tokens/s:")
                lines += [f"    {line}" for line in [*names(job), *(of_attention or "").splitlines()]]
                break
        else:
            lines.append(f"  {name}: it has none of these attentions")
    return lines


def attention_settings(job: Job) -> dict[str, str]:
    """Frameworks' settings of a job's attention, as it is on the ranks of one group and one tensor-parallel place."""
    record, tensor = job.record, job.split.tensor
    part = replace(
        record, gpus=job.split.context, heads=record.heads // tensor, kv_heads=(record.kv_heads or 0) // tensor
    )
    return settings(Wanted.of(job.method, part))


def command(found: Answer, job: Job) -> str:
    """The simulated point as a command."""
    own = [*job.split.overrides, f"train.recompute={job.record.recompute}"]
    own += ["train.offload=true"] * bool(job.record.offload)
    keys = {override.partition("=")[0] for override in own}
    given = [override for override in found.overrides if override.partition("=")[0] not in keys]
    return f"python -m sp_bench {' '.join([*for_method(given, job.method.name), *own])}"


def torchtitan(job: Job) -> list[str]:
    """torchtitan's names (config/configs.py). Its FSDP shards over data-parallel and context-parallel ranks."""
    split, record = job.split, job.record
    sizes = {
        "parallelism.data_parallel_shard_degree": split.data,
        "parallelism.tensor_parallel_degree": split.tensor,
        "training.num_tokens_per_microbatch_per_dp_rank": record.batch * record.seqlen,
        "training.num_tokens_per_train_step": step_tokens(job),
        "training.max_context_length": record.seqlen,
    }
    policy = {"full": "FullAC", "attention": "SelectiveAC, which saves the attention", "none": "none"}[
        record.recompute or "none"
    ]
    # Its setting of the attention has the degree of context parallelism.
    lines = [" ".join(f"--{key} {value}" for key, value in sizes.items())]
    return [*lines, f"activation checkpointing policy: {policy}", *[OFFLOADED] * bool(record.offload)]


def megatron(job: Job) -> list[str]:
    """Megatron-LM's names. Its data-parallel size is what is left of the GPUs; its FSDP shards over CP ranks too."""
    split, record = job.split, job.record
    sequences = record.batch * split.data * (record.turns or 1)
    flags = [
        f"--tensor-model-parallel-size {split.tensor}",
        f"--micro-batch-size {record.batch} --global-batch-size {sequences} --seq-length {record.seqlen}",
    ]
    flags[0] += f" (data-parallel size {split.data}: the rest of the GPUs)"
    if record.sharded:
        flags.append("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params")
    if record.recompute == "full":
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if record.recompute == "attention":
        flags.append("no flag recomputes all of a layer but its attention")
    return flags + [OFFLOADED] * bool(record.offload)
