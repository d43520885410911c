"""The variants that a request's method stands for, in the layouts that it may have, and their plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sp_bench import account
from sp_bench.errors import RequestError
from sp_bench.plan.costs import CostProfile
from sp_bench.plan.documents import Packed
from sp_bench.plan.layout import LAYOUTS, Layout
from sp_bench.plan.method import CollectiveMethod, Method
from sp_bench.plan.ops import Fused, Plan
from sp_bench.plan.problem import Problem
from sp_bench.point.lazy_plans import LazyPlans
from sp_bench.point.request import Request
from sp_bench.simulate import Run

FUSED = "fused"
"""The word in a variant's name that says that blocks of its plans are fused."""


@dataclass(frozen=True)
class Choice:
    """A variant of the method, its plans and their simulation."""

    method: Method
    problem: Problem
    """The problem in the variant's layout."""
    plans: Mapping[str, Plan]
    runs: dict[str, Run]
    candidates: list[dict[str, Any]] | None
    """All variants with their simulated times or bounds; None if there is only one."""
    earlier: tuple[Choice, ...] = ()
    """Those of the step's other attentions, of which this one is the last (Workload.attentions)."""

    @property
    def attentions(self) -> tuple[Choice, ...]:
        """The variants of all attentions of a step: usually this one alone."""
        return (*self.earlier, replace(self, earlier=()))

    @property
    def variant(self) -> str:
        """The method's variant in a few words, with its padded heads and whether blocks are fused; empty if there is
        nothing to say.
        """
        fused = self.method.fuse and any(isinstance(op, Fused) for plan in self.plans.values() for op in plan.ops)
        words = (self.method.variant(self.problem.n), self._form, self._padded, FUSED if fused else "")
        return " ".join(filter(None, words))

    @property
    def _padded(self) -> str:
        """The heads that are computed in place of the true ones, such as `padded to 32/8 heads`."""
        padded = self.problem.padded
        return f"padded to {padded.heads}/{padded.kv_heads} heads" if padded else ""

    @property
    def _form(self) -> str:
        """The form of its collectives, where `collectives=auto` stands for two; empty elsewhere."""
        method = self.method
        if not isinstance(method, CollectiveMethod) or method.collectives == "auto":
            return ""
        both = len(replace(method, collectives="auto").carried(self.problem)) > 1
        return method.collectives if both else ""

    @property
    def exact(self) -> bool:
        """Whether the runs are those of all ranks, each with its own blocks (simulate.Run.exact)."""
        return all(run.exact for run in self.runs.values())

    @property
    def total_s(self) -> float:
        """The simulated time of all phases."""
        return sum(run.makespan_s for run in self.runs.values())

    @property
    def nearly_s(self) -> float:
        """That with nearly alike ranks taken for alike, by which variants were ranked."""
        return sum(run.nearly_s for run in self.runs.values())


def variants(request: Request, methods: Sequence[Method], layouts: Sequence[Layout] | None = None) -> Sequence[Choice]:
    """The variants of methods that the request's options stand for, under which every rank has work.

    They are in those of the `layouts`, or in every one that the request's method may have. Plans are LazyPlans.
    """
    return _working(request.ours, [_plan(*each, request) for each in unplanned(request, methods, layouts)])


def unplanned(
    request: Request, methods: Sequence[Method], layouts: Sequence[Layout] | None = None
) -> Iterator[tuple[Method, Problem]]:
    """The variants of methods as `variants` has them, and the problem in the layout of each."""
    layouts = layouts_of(request.ours, [request.problem]) if layouts is None else layouts
    node = request.cluster.neighbours(request.problem.n)
    for problem in (replace(request.problem, layout=layout) for layout in layouts):
        forms = (form for one in methods for form in one.carried(problem))
        for method in dict.fromkeys(each for form in forms for each in form.on_nodes(problem, node)):
            yield method, problem


def layouts_of(method: Method, problems: Sequence[Problem]) -> list[Layout]:
    """Every layout that may be the fastest for these problems of the same tokens, where that is to be chosen.

    `search` is all that the method takes; `auto` is those that give all ranks equal work in one of the problems, or
    what the method has for packs. Of several parts of a sequence they are those of whole sequences.
    """
    last, layouts = problems[-1], list[Layout]()
    same = len({(problem.seqlen, problem.kv_seqlen) for problem in problems}) == 1
    for name in dict.fromkeys(name for problem in problems for name in _names(method, problem)):
        with suppress(RequestError):  # too few tokens for it, or no documents
            layout = [problem.mask.layout(name, problem.n, method.all_layouts()) for problem in problems][-1]
            for problem in problems:
                layout.refuse(last.n, problem.seqlen)
            if same or layout.name in LAYOUTS:
                layouts.append(layout)
    return [layout for layout in layouts if layout.name in method.all_layouts()] or [last.layout]


def _names(method: Method, problem: Problem) -> Sequence[str]:
    """The names of the layouts to choose among; none where the method says which it is."""
    auto, balanced = method.layout == "auto", problem.mask.balanced
    if method.layout == "search":
        return method.all_layouts()
    if auto and not balanced:
        return method.layouts_for_auto()
    return balanced if auto and problem.n > 1 else ()


def _working(method: Method, planned: Sequence[Choice]) -> Sequence[Choice]:
    """The choices under which every rank has work, where `auto` chooses the layout and there are any.

    One that leaves ranks without work sends less, and may be the fastest on few tokens: nobody asks n GPUs for that.
    Under a mask of one whole sequence there is work in every block of the layouts that auto takes.
    """
    if method.layout != "auto" or len(planned) == 1 or not isinstance(planned[0].problem.mask, Packed):
        return planned
    with_tokens = [one for one in planned if one.problem.layout.gives_all_work(one.problem.n, one.problem.seqlen)]
    return [one for one in with_tokens if _all_compute(one)] or with_tokens or planned


def _all_compute(choice: Choice) -> bool:
    """Whether every rank computes some pairs of a query and a key in every phase."""
    return all(account.pairs(plan, choice.problem).all() for plan in choice.plans.values())


def plans_of(request: Request) -> Mapping[str, Plan]:
    """The plans of a request's method as it is asked for; of several variants the first."""
    problem = replace(request.problem, layout=layouts_of(request.ours, [request.problem])[0])
    variants = request.ours.on_nodes(problem, request.cluster.neighbours(problem.n))
    return _plan(next(iter(variants)), problem, request).plans


def _plan(method: Method, problem: Problem, request: Request) -> Choice:
    problem = method.assigned(problem)
    costs = costs_for(request, problem)
    plans = LazyPlans(request.workload.plan_phases, lambda phase: method.plan(problem, phase, costs))
    return Choice(method, problem, plans, {}, None)


def costs_for(request: Request, problem: Problem) -> CostProfile:
    """The machine's costs of blocks with as many heads as the assigned problem leaves a rank, and all slices."""
    layout = replace(request.problem.layout, head_parallel=problem.layout.head_parallel)
    return request.cluster.profile(replace(request.problem, layout=layout, padded=problem.padded))
