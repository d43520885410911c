"""Every method on the cluster asked for, simulated at its best degrees, and why others can't run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from sp_bench.advise.progress import Done, Show, unseen
from sp_bench.advise.workers import Map
from sp_bench.cli.compose import Composer
from sp_bench.collection import uncollected
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY
from sp_bench.plan.method import Method
from sp_bench.point import Request, resolve
from sp_bench.point.choose import TooSlowError
from sp_bench.point.given import Given
from sp_bench.point.simulated import simulate_point
from sp_bench.point.variant_bounds import least_computed_s
from sp_bench.records import Record
from sp_bench.records.interval import Interval, interval
from sp_bench.workload import Decode
from sp_bench.workload.model import NONE

LEFT_OUT = ("reference", "dcp", "helix", "tree")
"""Methods for one GPU, and for decode steps: elsewhere these are one tile of Mesh-Attention by gathers."""
DECODE = Decode.name
"""The one workload that a question may name: all others are about an attention of theirs."""
ALL_SIMULATED = 64
"""GPUs up to which all methods are simulated: it takes seconds."""
HOPELESS = 1.5
"""How many times as long as a step another may take, at least, so that it isn't simulated."""
AT_FIRST = 3
"""Methods that are simulated whatever their bounds, those with the lowest ones: their steps rule others out. Methods
whose blocks no bound is known of are not waited for: it takes longest to simulate them."""
PAD_HEADS = "method.pad_heads"
"""The one option of methods that a question may set: for all that have it."""


@dataclass(frozen=True)
class Feasible:
    """A method at the degrees that are the fastest."""

    method: Method
    record: Record

    @property
    def name(self) -> str:
        """The method and its degrees."""
        return " ".join(filter(None, [self.method.name, self.record.variant]))

    @property
    def time(self) -> Interval:
        """The step, with the interval that its record has."""
        return interval(self.record)


@dataclass
class Answer:
    """The methods that can run, the fastest first, and those that can't."""

    config: Mapping[str, Any]
    feasible: list[Feasible] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """The reason, by method."""
    hopeless: dict[str, float] = field(default_factory=dict)
    """Methods that are not simulated, as they can't be fast: the least milliseconds of a step by method, of a bound
    or of an estimate by few ranks (simulate.least_s)."""

    @property
    def tied(self) -> list[Feasible]:
        """The fastest, and all that may be as fast by the intervals of both."""
        return _tied(self.feasible)

    @property
    def tied_validated(self) -> list[Feasible]:
        """The same of the methods that have an interval; empty if none has."""
        return _tied([each for each in self.feasible if each.time.backed])

    @property
    def unvalidated(self) -> list[Feasible]:
        """Those without an interval: of which nothing measured says how far off their times may be."""
        return [each for each in self.feasible if not each.time.backed]


def _tied(feasible: Sequence[Feasible]) -> list[Feasible]:
    first = feasible[0] if feasible else None
    return [each for each in feasible if first and (each is first or each.time.overlaps(first.time))]


class Question(NamedTuple):
    """Overrides of a point, and the methods to try for it."""

    overrides: Sequence[str]
    methods: Sequence[str] = tuple(REGISTRY)


def for_method(overrides: Sequence[str], name: str) -> list[str]:
    """A question's overrides for one method, without an option that it doesn't have."""
    without = PAD_HEADS.partition(".")[2] not in REGISTRY[name].options()
    kept = [each for each in overrides if not (without and each.partition("=")[0] == PAD_HEADS)]
    return [*kept, f"method={name}"]


def answer(
    question: Question,
    *,
    every: bool = False,
    memory_bytes: float | None = None,
    mapped: Map = map,
    done: Show = unseen,
) -> Answer:
    """Simulate the methods for a question. Methods whose attention needs more than `memory_bytes` a GPU are refused.

    On more than ALL_SIMULATED GPUs, those that take at least HOPELESS times as long as the fastest, and as the fastest
    of those with an interval if there are any, are not simulated, unless `every` method is wanted.
    `mapped` is map, or that of `workers`, which simulates several methods at a time.
    Raises RequestError for a question that no method can serve, and for unknown keys.
    """
    of = partial(answers, memory_bytes=memory_bytes, mapped=mapped, done=done)
    answered = _worth_simulating(question, every, of, done)
    if not answered.feasible:
        reasons = list(answered.refused.values())
        raise RequestError(" ".join(question.overrides), "no method can serve it", f"the first says: {reasons[0]}")
    return answered


def _worth_simulating(question: Question, every: bool, answered: Callable[..., list[Answer]], done: Show) -> Answer:
    """The answer of the methods that are worth simulating."""

    def of(names: Sequence[str], limit_ms: float = math.inf) -> Answer:
        (answer,) = answered([question._replace(methods=names)], limit_ms=limit_ms)
        return answer

    least_ms = {} if every else _least_of_each(question, done)
    if not least_ms:
        # Methods without a bound by blocks have the most variants to simulate: no process waits for the last of them.
        return of(sorted(question.methods, key=lambda name: REGISTRY[name].by_blocks))
    names = sorted(question.methods, key=lambda name: least_ms.get(name, math.inf))
    at_first = [name for name in names if least_ms.get(name)][:AT_FIRST] or names[:AT_FIRST]
    advised, others = of(at_first), [name for name in names if name not in at_first]
    firsts = [some[0].time for some in (advised.tied, advised.tied_validated) if some]
    limit_ms = HOPELESS * max((time.high_ms or time.step_ms for time in firsts), default=math.inf)
    advised.hopeless = {name: least_ms[name] for name in others if least_ms.get(name, 0.0) > limit_ms}
    others = _longest_first(others, least_ms)
    if hopeful := [name for name in others if name not in advised.hopeless]:
        rest = of(hopeful, limit_ms)
        advised.refused |= rest.refused
        advised.hopeless |= rest.hopeless
        advised.feasible = sorted([*advised.feasible, *rest.feasible], key=_step_ms)
    return advised


def _longest_first(names: Sequence[str], least_ms: Mapping[str, float]) -> list[str]:
    """Methods, those with the lowest bounds first, in the order in which no process waits long for the last of them:
    the one that a limit is least likely to end, those without a bound, which have most variants, then the others.
    """
    unbounded = [name for name in names if least_ms.get(name) == 0.0]
    bounded = [name for name in names if name not in unbounded]
    return [*bounded[:1], *unbounded, *bounded[1:]]


def _least_of_each(question: Question, done: Show) -> dict[str, float]:
    """The least milliseconds that the blocks of each method take that can serve it, 0.0 where that isn't known before
    it is planned; empty where it isn't worth its time.
    """
    with Composer() as composer:
        names = [name for name in of_workload(composer, question.overrides) if name in question.methods]
        first = composed(composer, question.overrides, names[0]) if names else None
        if first is None or decodes(first) or Given.of(first).values.gpus <= ALL_SIMULATED:
            return {}
        configs = (first, *(composed(composer, question.overrides, name) for name in names[1:]))
    least_ms = dict[str, float]()
    for number, (name, config) in enumerate(zip(names, configs, strict=True), start=1):
        try:
            least_ms[name] = 1e3 * least_computed_s(_request(config))
        except RequestError:
            continue
        done(Done(name, number, len(names), least_ms=least_ms[name] or None))
    return least_ms


def answers(
    questions: Sequence[Question],
    *,
    memory_bytes: float | None = None,
    mapped: Map = map,
    done: Show = unseen,
    limit_ms: float | Sequence[float] = math.inf,
) -> list[Answer]:
    """The answer to each question, as of `answer`, but that nothing may be feasible. Methods that take longer than
    `limit_ms`, one for all questions or one for each, by a lower bound are `hopeless`, and not simulated to the end.

    Configs are composed while methods are simulated. Raises RequestError for unknown keys.
    """
    configs: list[dict[str, Any]] = []
    with Composer() as composer:
        # All questions are about one workload.
        candidates = of_workload(composer, questions[0].overrides)
        asked = [(i, name) for i, one in enumerate(questions) for name in one.methods if name in candidates]

        def each_composed() -> Iterator[dict[str, Any]]:
            for i, name in asked:
                configs.append(composed(composer, questions[i].overrides, name))
                yield configs[-1]

        by_question: dict[int, Answer] = {}
        limits = limit_ms if isinstance(limit_ms, Sequence) else [limit_ms] * len(questions)
        each_tried = mapped(_tried, each_composed(), [limits[i] for i, _ in asked])
        for number, (tried, (i, name)) in enumerate(zip(each_tried, asked, strict=True)):
            answer = by_question.setdefault(i, Answer(configs[number]))
            if isinstance(tried, RequestError):
                answer.refused[name] = str(tried)
            elif isinstance(tried, float):
                answer.hopeless[name] = tried
            else:
                answer.feasible.append(tried)
                answer.refused |= _too_large(tried, memory_bytes)
            step_ms = tried.time.step_ms if isinstance(tried, Feasible) and name not in answer.refused else None
            done(Done(name, number + 1, len(asked), step_ms, tried if isinstance(tried, float) else None))
    for answer in by_question.values():
        answer.feasible = [each for each in answer.feasible if each.method.name not in answer.refused]
        answer.feasible.sort(key=_step_ms)
    return [by_question.get(i, Answer({})) for i in range(len(questions))]  # of one whose methods are of no such step


def composed(composer: Composer, overrides: Sequence[str], name: str) -> dict[str, Any]:
    """The config of a question's overrides with one method."""
    point = composer.point(for_method(overrides, name))
    return composer.compose(point)


def _step_ms(each: Feasible) -> float:
    return each.time.step_ms


def of_workload(composer: Composer, overrides: Sequence[str]) -> list[str]:
    """The methods to try for a question: in a decode step those that leave caches where they are, else all others."""
    if decodes(composed(composer, overrides, "ring")):
        return [name for name, method in REGISTRY.items() if method.takes_caches]
    return [name for name in REGISTRY if name not in LEFT_OUT]


def decodes(config: Mapping[str, Any]) -> bool:
    """Whether a composed config is of a decode step, as of a model that is there for its own."""
    return config["workload"] == DECODE


def _request(config: Mapping[str, Any]) -> Request:
    decoding = {"workload": DECODE, "model": {**config["model"], "name": NONE}}  # the attention of one layer
    asked = decoding if decodes(config) else {"workload": "attention"}
    return resolve({**config, "mode": "simulate", **asked, "trace": 0})


@uncollected()
def _tried(config: Mapping[str, Any], limit_ms: float = math.inf) -> Feasible | RequestError | float:
    """A method's attention of one layer simulated at its fastest degrees, or why it can't run; the least milliseconds
    that it takes, if they are above a limit.
    """
    try:
        record, choice = simulate_point(_request(config), limit_ms / 1e3)
    except TooSlowError as error:
        return 1e3 * error.least_s
    except RequestError as error:
        return error
    return Feasible(choice.method, record)


def _too_large(candidate: Feasible, memory_bytes: float | None) -> dict[str, str]:
    needed = candidate.record.peak_mem_bytes_max
    if memory_bytes is None or needed is None or needed <= memory_bytes:
        return {}
    why = f"its attention needs {needed / 1e9:.1f} GB a GPU, of {memory_bytes / 1e9:g} GB"
    return {candidate.method.name: why}
