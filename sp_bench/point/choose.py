"""Choose among a method's variants, such as tile shapes, by simulated time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sp_bench import account
from sp_bench.cluster import Cluster
from sp_bench.collection import uncollected
from sp_bench.errors import RequestError
from sp_bench.plan.layout import Layout
from sp_bench.plan.problem import Problem
from sp_bench.point.lazy_plans import LazyPlans
from sp_bench.point.request import Request
from sp_bench.point.variant_bounds import by_bound
from sp_bench.point.variants import Choice, layouts_of, variants
from sp_bench.simulate import LongerError, Run, exactly, simulate

ROUNDING = 1e-9
"""A step is longer than another by more than this part of it."""
LARGE = 1024
"""From so many ranks on, no other plans than the fastest variant's are held while one is simulated."""


class TooSlowError(Exception):
    """A variant takes longer than a limit, or every one, or the one that would be chosen: at least `least_s`."""

    def __init__(self, least_s: float) -> None:
        super().__init__(f"it takes at least {least_s * 1e3:.4g} ms")
        self.least_s = least_s


@uncollected()
def choose(request: Request, most_s: float = math.inf) -> Choice:
    """The variant with the shortest simulated time over the request's phases.

    Variants are simulated in order of a lower bound on their time (simulate.bounds). Those whose bound is above the
    best time so far, or that don't fit in memory, are not simulated, and of one whose first phase shows that it is
    slower, the second is not. Meanwhile cores and links are shared evenly, there is no noise, so that no variant is
    chosen by its random draw, and ranks that are nearly alike are taken for alike (simulate.simulate). Of variants that
    take as long it is the one that the method names first, the simpler one. The one chosen is simulated again without
    all that. With `every_variant`, bounds rule out none.

    Raises DeviceMemoryError if no variant fits, RequestError if those that fit are too large to simulate, TooSlowError
    if the bounds of all are above `most_s`, or the one chosen takes longer.
    """
    return _fastest(request, variants(request, [request.ours]), most_s).choice


@dataclass(frozen=True)
class _Fastest:
    """The fastest of some variants."""

    choice: Choice
    most_bytes: int
    """The most memory of a variant that was looked at."""
    all_fit: bool
    """Whether the device's memory ruled out none."""

    def fits(self, memory: float | None) -> bool:
        """Whether it is the fastest with that memory, too."""
        return self.all_fit and (memory is None or self.most_bytes <= memory)


def _fastest(request: Request, planned: Sequence[Choice], most_s: float = math.inf) -> _Fastest:
    """The one of these variants that `choose` chooses. Raises as it does."""
    # A single variant needn't be chosen.
    asked = request if len(planned) == 1 else replace(request, cluster=request.cluster.even)
    best: Choice | None = None
    timed: list[tuple[float, int]] = []
    rows: dict[int, dict[str, Any]] = {}
    looked_at = set[tuple[float, int]]()
    refused: RequestError | None = None
    bounded = [(one.method, one.problem, one.plans) for one in planned]
    for bounds_s, i in by_bound(asked.cluster, bounded, timed, estimates=not request.every_variant, most_s=most_s):
        bound_s = sum(bounds_s.values())
        if bound_s > most_s and not rows:
            raise TooSlowError(bound_s)
        if bound_s > most_s and best and min(timed)[0] > most_s and min(timed) not in looked_at:
            looked_at.add(min(timed))
            _refuse_slow(best, request.cluster, bound_s, most_s)
        choice, row = planned[i], _row(planned[i], bound_s)
        rows[i] = row
        best_s, first = min(timed, default=(math.inf, i))
        ruled_out = (bound_s, i) > (best_s, first) and not request.every_variant
        if not ruled_out and choice.problem.n >= LARGE:
            _forget_others(planned, choice, best)
        try:
            tried = None if ruled_out else _tried(choice, row, asked, bounds_s, best_s, nearly_alike=len(planned) > 1)
        except RequestError as error:
            refused, tried, row["refused"] = error, None, str(error)
        if tried is None:
            _forget(choice)
            continue
        row["step_ms"] = tried.total_s * 1e3
        timed.append((tried.total_s, i))
        beaten = tried
        if min(timed) == (tried.total_s, i):
            beaten, best = best, tried
        _forget(beaten)
    if best is None:
        raise refused or _too_large(request, min(row["peak_mem_bytes"] for row in rows.values()))
    if len(planned) > 1:
        is_even = request.cluster.is_even(best.problem.n)
        if not best.exact or not is_even:
            first, *others = [planned[i] for _, i in sorted(timed)]
            best = _first_simulated([best if is_even else first, *others], request.cluster, most_s)
        if is_even:
            best = _as_they_are(best, planned, rows, request)
        best = replace(best, candidates=[rows[i] for i in sorted(rows)])
    peaks = [row["peak_mem_bytes"] for row in rows.values() if row["peak_mem_bytes"]]
    return _Fastest(best, max(peaks), not any(row.get("refused") for row in rows.values()))


def _as_they_are(
    best: Choice, planned: Sequence[Choice], rows: Mapping[int, dict[str, Any]], request: Request
) -> Choice:
    """The fastest variant where the first one takes longer than it was ranked by, as ranks that are nearly alike may
    fall out of step (simulate.exactly): others that may be faster are simulated with every rank's own blocks, too.
    """
    if best.total_s <= best.nearly_s * (1 + ROUNDING):
        return best
    first = next(i for i, one in enumerate(planned) if (one.method, one.problem) == (best.method, best.problem))
    rows[first]["step_ms"] = best.total_s * 1e3
    for i, row in sorted(rows.items(), key=lambda each: each[1]["step_ms"] or each[1]["bound_ms"]):
        if i == first or "refused" in row or (row["step_ms"] or row["bound_ms"]) >= best.total_s * 1e3:
            continue
        with suppress(RequestError):
            other = _tried(planned[i], row, request, {}, best.total_s, nearly_alike=False)
            row["step_ms"] = other.total_s * 1e3 if other else None
            beaten, best = (best, other) if other and other.total_s < best.total_s else (planned[i], best)
            _forget(beaten)
    return best


def _row(choice: Choice, bound_s: float) -> dict[str, Any]:
    """A variant as records list it, before it is looked at."""
    a, b = choice.method.tile_shape(choice.problem.n) or (None, None)
    row = {"variant": choice.variant, "tile_a": a, "tile_b": b, "layout": choice.problem.layout.name}
    return row | {"bound_ms": bound_s * 1e3, "step_ms": None, "peak_mem_bytes": None}


def _tried(
    choice: Choice,
    row: dict[str, Any],
    request: Request,
    bounds_s: Mapping[str, float],
    best_s: float,
    *,
    nearly_alike: bool,
) -> Choice | None:
    """The simulated variant; None of one that doesn't fit in the device's memory or shows that it takes longer than the
    best one, of which its row then has what is known. Raises RequestError if it is too large to simulate.
    """
    peak = row["peak_mem_bytes"] = account.peak_bytes(choice.plans.values(), choice.problem, request.cluster.transport)
    memory = request.cluster.device.memory_bytes
    if memory and peak > memory:
        row["refused"] = "more than the device's memory"
        return None
    most_s = math.inf if request.every_variant else best_s
    try:
        return simulated(choice, request.cluster, bounds_s, most_s, nearly_alike=nearly_alike)
    except TooSlowError as error:
        row["bound_ms"] = error.least_s * 1e3
        return None


def _forget(beaten: Choice | None) -> None:
    """Let go of the plans of a variant that is not the fastest: those on thousands of ranks take much memory."""
    if beaten and isinstance(beaten.plans, LazyPlans):
        beaten.plans.forget()


def _forget_others(planned: Sequence[Choice], choice: Choice, best: Choice | None) -> None:
    """Let go of the plans of all variants but the one to be simulated and the fastest so far."""
    for other in planned:
        if other.plans is not choice.plans and (best is None or other.plans is not best.plans):
            _forget(other)


def _refuse_slow(best: Choice, cluster: Cluster, others_s: float, most_s: float) -> None:
    """Raise TooSlowError if the fastest variant so far takes longer than `most_s` with every rank's own blocks, where
    all others take at least `others_s`, which is above it, too.
    """
    if cluster.is_even(best.problem.n):
        with suppress(RequestError):
            total_s = _exact(best, cluster, most_s).total_s
            if total_s > most_s:
                raise TooSlowError(min(total_s, others_s))


@uncollected()
def choose_attentions(request: Request, most_s: float = math.inf) -> Choice:
    """`choose` of each attention of the request's step, of what fits the device beside what is held for others. The
    last one's choice has the others. Raises as choose does.

    Attentions of the same tokens (Workload.in_one_layout) have the layout in which all that a step executes of them
    takes least; each has its own variant there.
    """
    asked = [_beside_others(request, each) for each in request.workload.attentions(request.problem)]
    return choose(asked[0], most_s) if most_s < math.inf and len(asked) == 1 else chosen_of(asked)


def _beside_others(request: Request, attention: Problem) -> Request:
    """The request for one of a step's attentions, on a device with the memory that others leave it."""
    asked, device = replace(request, problem=attention), request.cluster.device
    beside = request.workload.beside_bytes(request.problem, attention)
    if not beside or device.memory_bytes is None:
        return asked
    rest = device.memory_bytes - beside
    if rest <= 0:
        rule = f"other layers' caches have {beside / 1e9:.4g} GB on a GPU, and {device.name} has "
        raise DeviceMemoryError(
            f"{attention.keys.seqlen} keys in a layer's caches on gpus={attention.n}",
            f"{rule}{device.memory_bytes / 1e9:.4g}",
            "more GPUs, fewer sequences or shorter caches would work",
        )
    return replace(asked, cluster=replace(request.cluster, device=replace(device, memory_bytes=rest)))


def chosen_of(asked: Sequence[Request]) -> Choice:
    """The choice of the last one of a step's attentions, with those of the others."""
    *earlier, last = _in_one_layout(asked) if asked[0].workload.in_one_layout else map(choose, asked)
    return replace(last, earlier=tuple(earlier))


def _in_one_layout(asked: Sequence[Request]) -> list[Choice]:
    """The choice for each of the attentions, which are of the same tokens."""
    first = asked[0]
    layouts = layouts_of(first.ours, [request.problem for request in asked])
    alike = {request.problem: request for request in asked}
    of_each = {problem: variants(request, [first.ours], layouts) for problem, request in alike.items()}
    planned = [of_each[request.problem] for request in asked]
    known: dict[tuple[Problem, Layout], _Fastest] = {}

    def fastest(request: Request, some: Sequence[Choice]) -> Choice:
        """One of these variants of a layout, found once for attentions that are alike but for their memory."""
        memory, key = request.cluster.device.memory_bytes, (request.problem, some[0].problem.layout)
        if key not in known or not known[key].fits(memory):
            known[key] = _fastest(request, some)
        return known[key].choice

    by_layout: list[tuple[float, list[Choice]]] = []
    refused: RequestError | None = None
    for layout in dict.fromkeys(choice.problem.layout for choice in planned[0]):
        in_layout = [[choice for choice in each if choice.problem.layout == layout] for each in planned]
        if not all(in_layout):
            continue
        try:
            choices = list(map(fastest, asked, in_layout))
        except RequestError as error:
            refused = error
            continue
        by_layout.append((sum(_step_s(first, choice, i) for i, choice in enumerate(choices)), choices))
    if not by_layout:
        rule = "has no layout in which every rank has work of both kinds of layers"
        raise refused or RequestError(f"method={first.ours.name}", rule, "method=ring would work")
    return min(by_layout, key=lambda each: each[0])[1]


def _step_s(request: Request, choice: Choice, attention: int) -> float:
    """Seconds of all that a step executes of one of its attentions."""
    times = request.workload.executions(attention)
    return sum(times[phase] * run.makespan_s for phase, run in choice.runs.items())


def _first_simulated(choices: Sequence[Choice], cluster: Cluster, most_s: float) -> Choice:
    """The first one that isn't too large to simulate, with every rank's own blocks; the last one's RequestError if all
    are. Runs that one has already are of that cluster. Raises TooSlowError if events show that it is above `most_s`.
    """
    *others, last = choices
    for choice in others:
        with suppress(RequestError):
            return _exact(choice, cluster, most_s)
    return _exact(last, cluster, most_s)


def _exact(choice: Choice, cluster: Cluster, most_s: float) -> Choice:
    if not choice.runs:
        return simulated(choice, cluster)
    runs = dict[str, Run]()
    for phase, run in choice.runs.items():
        left_s = most_s * (1 + ROUNDING) - sum(run.makespan_s for run in runs.values())
        try:
            runs[phase] = exactly(run, choice.problem, cluster, left_s)
        except LongerError:
            raise TooSlowError(most_s) from None
    return replace(choice, runs=runs)


def simulated(
    choice: Choice,
    cluster: Cluster,
    bounds_s: Mapping[str, float] = MappingProxyType({}),
    most_s: float = math.inf,
    *,
    nearly_alike: bool = False,
) -> Choice:
    """The choice with the simulation of its plans on a cluster, nearly alike ranks taken for alike if wanted.

    Raises RequestError if it is too large to simulate, TooSlowError as soon as the phases that are simulated, with the
    lower bounds of the others, take longer than `most_s`. Nearly alike ranks may be slower than they are, and show
    nothing.
    """
    runs, least_s = dict[str, Run](), dict(bounds_s)
    for phase, plan in choice.plans.items():
        runs[phase] = simulate(plan, choice.problem, cluster, nearly_alike=nearly_alike)
        least_s[phase] = runs[phase].makespan_s
        known = len(runs) < len(choice.plans) and all(run.exact for run in runs.values())
        if known and (total_s := sum(least_s.values())) > most_s:
            raise TooSlowError(total_s)
    return replace(choice, runs=runs)


class DeviceMemoryError(RequestError):
    """No variant of the method fits in the device's memory."""


def _too_large(request: Request, least: int) -> DeviceMemoryError:
    device = request.cluster.device
    return DeviceMemoryError(
        f"seqlen={request.problem.seqlen} on gpus={request.problem.n}",
        f"{request.method.name} holds at least {least / 1e9:.4g} GB on a rank, {device.name} {device.memory_bytes:.3g}",
        "more GPUs or a shorter seqlen would work",
    )
