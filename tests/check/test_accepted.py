"""The proof accepts every plan of every method."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from sp_bench import account
from sp_bench.check import check, check_all
from sp_bench.methods import REGISTRY
from sp_bench.methods.tasp import TASP
from sp_bench.plan import Plan, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from tests.support.marks import exhaustive, long
from tests.support.problems import Planned, all_methods, plans, splittable_problem


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, *map(exhaustive, (5, *range(7, 17)))])
def test_every_method_and_tile_is_accepted(n: int, layout: str, causal: bool) -> None:
    problem = splittable_problem(n, layout, causal=causal)
    for method in all_methods(problem):
        check_all({phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}, method.assigned(problem))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, long(6), *map(exhaustive, (5, 8, 9))])
def test_every_method_with_other_keys_is_accepted(n: int, layout: str) -> None:
    """A history of one key, of one on most ranks, and of many; another sequence that is longer, shorter, and uneven."""
    of_keys = [(True, 2 * n + more) for more in (1, n + n // 2, 3 * n, 5 * n + 2)]
    of_keys += [(False, keys) for keys in (2 * n + 1, 5 * n + 2, 8 * n)]
    for causal, kv_seqlen in of_keys:
        problem = replace(splittable_problem(n, layout, causal=causal), kv_seqlen=kv_seqlen)
        methods, pairs = all_methods(problem), round(problem.pairs + (problem.seqlen / 2 if causal else 0))
        assert {*REGISTRY} - {m.name for m in methods} <= {"reference", "tasp"}
        for method in methods:
            made = {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
            assigned = method.assigned(problem)
            check_all(made, assigned)
            assert {int(account.pairs(plan, assigned).sum()) for plan in made.values()} == {pairs * problem.heads}


@given(plans(max_n=24))
def test_schedules_for_any_costs_are_accepted(planned: Planned) -> None:
    assert_accepted(*planned)


def assert_accepted(plan: Plan, problem: Problem) -> None:
    """The proof raises nothing."""
    check(plan, problem)


@pytest.mark.parametrize(("n", "tiles"), [exhaustive(64, 7), exhaustive(256, 9)])
def test_many_ranks(n: int, tiles: int) -> None:
    """All tiles of mesh, and all others, but TASP's rings of rings on 256: they have thousands of operations."""
    started, problem, proven = time.perf_counter(), splittable_problem(n), Counter()
    for method in all_methods(problem):
        if n == 256 and isinstance(method, TASP) and method.inner not in (1, n):
            continue
        check_all({phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}, method.assigned(problem))
        proven[method.name] += 1
    assert set(proven) == set(REGISTRY) - {"reference"}
    assert proven["mesh"] == tiles and proven["ring"] == 1
    print(f"{2 * proven.total()} plans of {n} ranks: {time.perf_counter() - started:.2f} s")
