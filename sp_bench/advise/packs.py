"""Advice for a data set: many packs drawn from it, and every method simulated on each.

A trainer fixes a method, its layout and its degrees, and then meets pack after pack. So a method's are those that are
the fastest on the pack of middle work, or on that of most work: those of both with the lower median over all packs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

from sp_bench import account
from sp_bench.advise.candidates import Answer, Feasible, Question, answers, decodes
from sp_bench.advise.progress import Done, Show, unseen
from sp_bench.advise.workers import Map
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.measure.stats import summarise
from sp_bench.packing import Drawn, data_of
from sp_bench.plan.assignments import AssignedLayout
from sp_bench.plan.documents import Documents
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from sp_bench.point import resolve
from sp_bench.point.backing import TELLING
from sp_bench.point.choose import choose
from sp_bench.point.given import Given
from sp_bench.reading import Count, read

PACKS = 16
"""So many packs are drawn by default. The median of all packs is then between the 4th and the 13th in 98 of 100
cases."""
SLOWER = 2.0
"""Methods that take this many times as long as the fastest on the middle pack are simulated on no other, but SPANS."""
SPANS = ("hybrid_cp", "group_cast")
"""The methods whose assignment says how many ranks a document asks for."""


class Packs(NamedTuple):
    """Packs of one data set, by the seeds that draw them."""

    seeds: tuple[int, ...]
    middle: int
    """The seed of the pack of middle work."""
    heaviest: int
    """The seed of the pack of most work."""


class OnAPack(NamedTuple):
    """One method on one pack."""

    step_ms: float
    balance: float
    """The rank that computes longest over the mean of all."""
    peak_bytes: int
    spans: Spans
    """The ranks of documents, of methods in SPANS; empty otherwise."""


Spans = Mapping[tuple[int, int], tuple[int, int]]
"""(documents, tokens) by (the class's longest document, ranks that have tokens of the document)."""


@dataclass(frozen=True)
class OnPacks:
    """One method on all packs."""

    feasible: Feasible
    """On the pack that its degrees and layout were chosen on."""
    each: Sequence[OnAPack]

    @property
    def name(self) -> str:
        """The method and its degrees."""
        return self.feasible.name

    @property
    def steps_ms(self) -> np.ndarray:
        """The step of each pack: (packs,)."""
        return np.array([one.step_ms for one in self.each])

    @property
    def balance(self) -> np.ndarray:
        """The rank that computes longest over the mean of all, of each pack: (packs,)."""
        return np.array([one.balance for one in self.each])

    @property
    def peak_bytes(self) -> int:
        """The most memory that a rank needs on any pack."""
        return max(one.peak_bytes for one in self.each)

    @property
    def median_ms(self) -> float:
        """The median step."""
        return float(np.median(self.steps_ms))

    @property
    def spans(self) -> Spans:
        """Documents and tokens of all packs by class and ranks; empty where the method isn't one of SPANS."""
        documents_of: Counter[tuple[int, int]] = Counter()
        tokens: Counter[tuple[int, int]] = Counter()
        for one in self.each:
            for key, (documents, of_tokens) in one.spans.items():
                documents_of[key] += documents
                tokens[key] += of_tokens
        return {key: (documents_of[key], tokens[key]) for key in documents_of}

    def ties_with(self, fastest: OnPacks) -> bool:
        """Whether packs don't tell it from the fastest: by the 95% interval of the median of their ratios, pack by
        pack, it may be within TELLING of it.
        """
        return self is fastest or summarise(self.steps_ms / fastest.steps_ms).ci95_low <= 1 + TELLING


@dataclass
class PacksAnswer:
    """The methods on all packs, that with the least median step first."""

    packs: Packs
    config: Mapping[str, Any]
    methods: list[OnPacks] = field(default_factory=list)
    slower: list[Feasible] = field(default_factory=list)
    """Those that were too slow on the middle pack to be simulated on others."""
    refused: dict[str, str] = field(default_factory=dict)
    """The reason, by method."""

    @property
    def tied(self) -> list[OnPacks]:
        """The fastest, and all that packs don't tell from it."""
        return [each for each in self.methods if each.ties_with(self.methods[0])]

    def wins(self, one: OnPacks) -> int:
        """On how many packs a method is the fastest."""
        steps = np.array([each.steps_ms for each in self.methods])
        return int((one.steps_ms <= steps.min(axis=0)).sum())


def packs_of(overrides: Sequence[str], count: str | None) -> Packs | None:
    """The packs that a question is about; None where it is about one.

    Raises RequestError for a number of packs of what is no data set.
    """
    with Composer() as composer:
        point = composer.point([*overrides, f"method={SPANS[1]}"])
        config = composer.compose(point)
    if decodes(config):
        if read(Count, count or 1, "packs") > 1:
            rule = "are of documents that are trained or read together: in a decode step they are its sequences"
            raise RequestError(f"packs={count}", rule, "packs=1 would work")
        return None
    drawn = config["mask"] == Documents.name and isinstance(data_of(config["data"]), Drawn)
    wanted = read(Count, count, "packs") if count is not None else PACKS if drawn else 1
    if wanted > 1 and not drawn:
        asked = f"data={config['data']['kind']}" if config["mask"] == Documents.name else f"mask={config['mask']}"
        rule = f"are drawn from a data set, and {asked} is the same each time"
        raise RequestError(f"packs={count}", rule, "mask=document data=magi_attention, or data=sample, would work")
    return drawn_packs(config, wanted) if wanted > 1 else None


def drawn_packs(config: Mapping[str, Any], count: int) -> Packs:
    """So many packs, drawn by the config's seed and those that follow."""
    first = Given.of(config).values.seed
    seeds = tuple(range(first, first + count))
    masks = (cast(Documents, Given.of({**config, "seed": seed}).mask) for seed in seeds)
    order = np.argsort([mask.work_of_documents.sum() for mask in masks], kind="stable")
    return Packs(seeds, seeds[order[count // 2]], seeds[order[-1]])


def answer_for_packs(
    question: Question, packs: Packs, *, memory_bytes: float | None = None, mapped: Map = map, done: Show = unseen
) -> PacksAnswer:
    """Every method on every pack. A method that needs more than `memory_bytes` on any of them is refused.

    Raises RequestError for a question that no method can serve, and for unknown keys.
    """
    asked = [override for override in question.overrides if override.partition("=")[0] != "seed"]

    def on(seed: int, names: Sequence[str]) -> Answer:
        (one_answer,) = answers([Question([*asked, f"seed={seed}"], names)], mapped=mapped, done=done)
        return one_answer

    on_middle = on(packs.middle, question.methods)
    advised = PacksAnswer(packs, on_middle.config, refused=dict(on_middle.refused))
    limit_ms = SLOWER * min((each.time.step_ms for each in on_middle.feasible), default=0.0)
    fast = [each for each in on_middle.feasible if each.time.step_ms <= limit_ms or each.method.name in SPANS]
    advised.slower = [each for each in on_middle.feasible if each not in fast]
    if fast:
        on_heaviest = on(packs.heaviest, [each.method.name for each in fast])
        advised.refused |= {name: _on_pack(packs.heaviest, why) for name, why in on_heaviest.refused.items()}
        chosen = {(each.method, each.record.layout): each for each in [*on_heaviest.feasible, *fast]}
        of_all = _on_all(list(chosen.values()), advised, mapped, done)
        advised.methods = [each for each in of_all if not _too_large(each, memory_bytes, advised.refused)]
    if not advised.methods:
        why = next(iter(advised.refused.values()))
        raise RequestError(" ".join(question.overrides), "no method can serve all packs", f"the first says: {why}")
    advised.methods.sort(key=lambda each: each.median_ms)
    return advised


def _on_all(chosen: Sequence[Feasible], found: PacksAnswer, mapped: Map, done: Show) -> Iterable[OnPacks]:
    """Each method that can run on all packs, with those of its chosen degrees that have the lower median."""
    tasks = [(each, seed) for seed in found.packs.seeds for each in chosen]  # by pack: a process keeps what it knows
    each_found: list[list[OnAPack]] = [[] for _ in chosen]
    for number, ((each, seed), on_pack) in enumerate(zip(tasks, mapped(_on_a_pack, tasks), strict=True)):
        if isinstance(on_pack, RequestError):
            found.refused.setdefault(each.method.name, _on_pack(seed, on_pack))
        else:
            each_found[number % len(chosen)].append(on_pack)
        step_ms = None if isinstance(on_pack, RequestError) else on_pack.step_ms
        done(Done(f"{each.method.name}, seed {seed}", number + 1, len(tasks), step_ms))
    best: dict[str, OnPacks] = {}
    for one in (OnPacks(each, on_packs) for each, on_packs in zip(chosen, each_found, strict=True)):
        name = one.feasible.method.name
        if name not in found.refused and (name not in best or one.median_ms < best[name].median_ms):
            best[name] = one
    return best.values()


def _on_pack(seed: int, why: RequestError | str) -> str:
    return f"on the pack of seed {seed}: {why}"


def _too_large(one: OnPacks, memory_bytes: float | None, refused: dict[str, str]) -> bool:
    if memory_bytes is None or one.peak_bytes <= memory_bytes:
        return False
    need = f"{one.peak_bytes / 1e9:.1f} GB a GPU, of {memory_bytes / 1e9:g} GB"
    refused[one.feasible.method.name] = f"on its largest pack its attention needs {need}"
    return True


def _on_a_pack(task: tuple[Feasible, int]) -> OnAPack | RequestError:
    """A method, as it was chosen on one pack, simulated on another; or why it can't run there."""
    feasible, seed = task
    record = feasible.record
    config = dict(record.config or {})
    if "layout" in config["method"]:
        config["method"] = {**config["method"], "layout": record.layout}
    asked = {"seed": seed, "mode": "simulate", "workload": "attention", "trace": 0}
    try:
        request = resolve({**config, **asked})
        method = replace(feasible.method, layout=request.ours.layout)
        choice = choose(replace(request, method=method))
    except RequestError as error:
        return error
    busy_s = np.sum([run.busy_s for run in choice.runs.values()], axis=0)
    peak_bytes = account.peak_bytes(choice.plans.values(), choice.problem, request.cluster.transport)
    spans = spans_of(choice.problem) if method.name in SPANS else {}
    return OnAPack(1e3 * choice.total_s, float(busy_s.max() / busy_s.mean()), peak_bytes, spans)


def spans_of(problem: Problem) -> Spans:
    """How many ranks have tokens of the documents of a pack, by classes of documents (class_of)."""
    blocks = problem.blocks
    assert isinstance(blocks, PackBlocks) and isinstance(problem.layout, AssignedLayout), "documents are assigned"
    lengths = np.array(blocks.mask.queries)
    ranks = (blocks.tokens_of_documents > 0).sum(axis=1) * problem.layout.head_parallel
    by_class: dict[tuple[int, int], tuple[int, int]] = {}
    for length, longest, count in zip(lengths, class_of(lengths, problem.seqlen // problem.n), ranks, strict=True):
        documents, tokens = by_class.get((int(longest), int(count)), (0, 0))
        by_class[int(longest), int(count)] = documents + 1, tokens + int(length)
    return by_class


def class_of(lengths: np.ndarray, rank_tokens: int) -> np.ndarray:
    """The longest document of the class of each: the next power of two, and at least that of half a rank's tokens."""
    least = max((rank_tokens - 1).bit_length() - 1, 0)
    return 1 << np.maximum(np.ceil(np.log2(lengths)).astype(int), least)
