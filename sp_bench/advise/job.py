"""A whole training job: which context, data and tensor parallelism, with which attention, trains most tokens a second?

Every split of the GPUs is simulated with USP and a ring; the other methods where these are nearly as fast as the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sp_bench.advise.candidates import composed
from sp_bench.advise.progress import Done, Show, unseen
from sp_bench.advise.workers import Map
from sp_bench.cli.compose import Composer
from sp_bench.collection import uncollected
from sp_bench.errors import RequestError
from sp_bench.plan.method import Method
from sp_bench.plan.patterns import divisors
from sp_bench.point import resolve
from sp_bench.point.backing import TELLING
from sp_bench.point.training import simulate_chosen
from sp_bench.reading import Count, Tokens, read
from sp_bench.records import Record
from sp_bench.records.interval import interval
from sp_bench.workload.model import NONE

FIRST, OTHERS = ("usp", "ring"), ("all_gather", "ulysses", "mesh")
"""The methods that every split is simulated with, and those of the fastest splits."""
NEAR, MOST = 0.1, 8
"""The other methods are simulated at the splits within NEAR of the best one's throughput, at most MOST of them."""
TENSOR_MOST = 8
"""A tensor-parallel group has at most so many GPUs where nodes have more: nothing hides its sums."""
WAYS = ("attention", "attention+", "full", "full+")
"""Values of train.recompute, the fastest first; +: with train.offload."""


class Split(NamedTuple):
    """How the GPUs of a job are divided."""

    context: int
    data: int
    tensor: int

    def __str__(self) -> str:
        return f"CP {self.context} x DP {self.data} x TP {self.tensor}"

    @property
    def overrides(self) -> list[str]:
        """As arguments of `python -m sp_bench`."""
        return [f"train.data_parallel={self.data}", f"train.tensor_parallel={self.tensor}"]


class Case(NamedTuple):
    """A split with a method and one of WAYS."""

    split: Split
    method: str
    way: str
    """One of WAYS."""


@dataclass(frozen=True)
class Job:
    """A case that fits, and its simulated step."""

    split: Split
    method: Method
    """With the options that are the fastest."""
    record: Record

    @property
    def name(self) -> str:
        """The split, and the method with its variant; only the split where no tokens are shared."""
        return str(self.split) if self.split.context == 1 else f"{self.split}, {self.attention}"

    @property
    def attention(self) -> str:
        """The method and its variant; - where no tokens are shared."""
        shown = f"{self.method.name} {self.record.variant or ''}".strip()
        return "-" if self.split.context == 1 else shown

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all GPUs a second."""
        return self.record.tokens_per_s or 0.0

    def ties(self, other: Job) -> bool:
        """Whether the two can't be told apart: by their intervals, or without them by what repetitions differ by."""
        one, two = interval(self.record), interval(other.record)
        if one.backed and two.backed:
            return one.overlaps(two)
        return abs(self.tokens_per_s / other.tokens_per_s - 1) < TELLING


@dataclass
class Answer:
    """The jobs that fit, those of most tokens a second first, and why other splits can't be."""

    overrides: Sequence[str]
    """The job, as arguments of `python -m sp_bench`."""
    jobs: list[Job] = field(default_factory=list)
    refused: dict[Split, str] = field(default_factory=dict)

    @property
    def fitting(self) -> set[Split]:
        """The splits of the jobs."""
        return {job.split for job in self.jobs}

    @property
    def tied(self) -> list[Job]:
        """The fastest, and those that can't be told from it."""
        return [job for job in self.jobs if job is self.jobs[0] or job.ties(self.jobs[0])]

    @property
    def tied_splits(self) -> list[Job]:
        """The fastest of each split that ties."""
        by_split: dict[Split, Job] = {}
        for job in self.tied:
            by_split.setdefault(job.split, job)
        return list(by_split.values())


def answer(overrides: Sequence[str], *, mapped: Map = map, done: Show = unseen) -> Answer:
    """Simulate the splits of a job, and all methods at the best of them.

    `overrides` have the model, gpus, seqlen and train.batch_tokens. Where they don't say what is computed again or kept
    on the host, a split takes the first of WAYS that fits.
    Raises RequestError for unknown keys, no model, or a job that fits nowhere.
    """
    with Composer() as composer:
        whole = _config(composer, overrides, Case(Split(1, 1, 1), FIRST[0], WAYS[0]))
        if whole["model"]["name"] == NONE:
            rule = "is of a training job, which needs a model"
            raise RequestError("batch_tokens", rule, "model=llama3_8b would work")
        advised, left = Answer(overrides), splits(whole)
        for way in _ways(overrides, whole):
            cases = [Case(split, name, way) for split in left for name in FIRST[split.context == 1 :]]
            _try(advised, composer, overrides, cases, mapped, done)
            left = [split for split in left if split not in advised.fitting]
        if not advised.jobs:
            first = next(iter(advised.refused.values()))
            raise RequestError(" ".join(overrides), "fits in no split of the GPUs", f"one says: {first}")
        cases = [
            Case(job.split, name, f"{job.record.recompute}{'+' * bool(job.record.offload)}")
            for job in _near(advised)
            for name in OTHERS
        ]
        _try(advised, composer, overrides, cases, mapped, done)
    advised.jobs.sort(key=lambda job: -job.tokens_per_s)
    advised.refused = {split: why for split, why in advised.refused.items() if split not in advised.fitting}
    return advised


def _config(composer: Composer, overrides: Sequence[str], case: Case) -> dict[str, Any]:
    """The config of a case."""
    keys = {override.partition("=")[0] for override in overrides}
    way = {"train.recompute": case.way.removesuffix("+"), "train.offload": str(case.way.endswith("+")).lower()}
    more = [f"{key}={value}" for key, value in way.items() if key not in keys]
    return composed(composer, [*overrides, *case.split.overrides, *more], case.method)


def _ways(overrides: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """The ways to try: those of WAYS that differ in what isn't given, and that the device can."""
    keys = {override.partition("=")[0] for override in overrides}
    ways = [WAYS[0]] if "train.recompute" in keys else [way for way in WAYS if not way.endswith("+")]
    if "train.offload" in keys or config["cluster"]["device"].get("host_bytes_per_s") is None:
        return ways
    return [way for plain in ways for way in (plain, f"{plain}+")]


def _near(found: Answer) -> list[Job]:
    """The fastest job so far of each split whose throughput is near the best."""
    best: dict[Split, Job] = {}
    for job in sorted(found.jobs, key=lambda job: -job.tokens_per_s):
        best.setdefault(job.split, job)
    most = max(job.tokens_per_s for job in best.values())
    near = [job for job in best.values() if job.tokens_per_s > (1 - NEAR) * most]
    return [job for job in near[:MOST] if job.split.context > 1]


def splits(config: Mapping[str, Any]) -> list[Split]:
    """The divisions of a config's GPUs, those that share a sequence most first.

    Tensor-parallel groups stay inside a node and divide heads, key heads and matrices. A turn of all groups divides the
    tokens of a step. All groups are alike.
    """
    gpus, seqlen, batch = (
        read(kind, config[key], key) for kind, key in ((Count, "gpus"), (Tokens, "seqlen"), (Count, "batch"))
    )
    heads, model = read(Count, config["heads"], "heads"), config["model"]
    kv_heads = read(Count, config["kv_heads"] or heads, "kv_heads")
    sizes = (heads, kv_heads, model["ffn"], model.get("vocab") or 1)
    asked = config["train"]["batch_tokens"]
    batch_tokens = gpus * batch * seqlen if asked is None else read(Tokens, asked, "train.batch_tokens")
    node = config["cluster"].get("gpus_per_node") or gpus
    divisions = []
    for tensor in divisors(gpus):
        if tensor > min(node, TENSOR_MOST) or any(size % tensor for size in sizes):
            continue
        for data in divisors(gpus // tensor):
            size = gpus // data
            alike = data == 1 or size % node == 0 or node % size == 0
            if alike and batch_tokens % (data * batch * seqlen) == 0:
                divisions.append(Split(gpus // tensor // data, data, tensor))
    if not divisions:
        rule = f"is no multiple of the {seqlen} tokens of a sequence"
        raise RequestError(f"batch_tokens={batch_tokens}", rule, f"batch_tokens={batch * seqlen} would work")
    return sorted(divisions, key=lambda split: (split.tensor, -split.context))


def _try(
    found: Answer, composer: Composer, overrides: Sequence[str], cases: Sequence[Case], mapped: Map, done: Show
) -> None:
    """Simulate cases; keep those that fit, and of the others why they can't be."""
    configs = (_config(composer, overrides, case) for case in cases)
    for number, (case, tried) in enumerate(zip(cases, mapped(_tried, configs), strict=True), start=1):
        if isinstance(tried, RequestError):
            found.refused[case.split] = str(tried)
        else:
            found.jobs.append(Job(case.split, *tried))
        step_ms = None if isinstance(tried, RequestError) else tried[1].step_ms_median
        done(Done(f"{case.split} {case.method}", number, len(cases), step_ms))


@uncollected()
def _tried(config: Mapping[str, Any]) -> tuple[Method, Record] | RequestError:
    """The method with the options of its fastest variant, and the simulated step; or why it can't be."""
    try:
        record, choice = simulate_chosen(resolve({**config, "mode": "simulate", "trace": 0}))
    except RequestError as error:
        return error
    return choice.method, record
