"""Problems, methods and costs for the tests of plans, and hypothesis strategies that draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

from hypothesis import assume, reject
from hypothesis import strategies as st

from sp_bench.methods import REGISTRY, build
from sp_bench.methods.mesh import tiles
from sp_bench.methods.mesh_lean import ORDERS
from sp_bench.plan import CostProfile, Method, Op, Plan, Problem, RequestError
from sp_bench.plan.caches import Caches
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.method import PHASES


def mask_of(causal: object) -> Mask:
    """The causal mask, or the full one."""
    return CAUSAL if causal else FULL


def small_problem(n: int, layout: str = "striped", *, causal: bool = True) -> Problem:
    """A problem of two tokens a rank, for plans whose tensors don't matter."""
    return Problem(n=n, seqlen=2 * n, heads=4, kv_heads=2, head_dim=8, mask=mask_of(causal), layout=LAYOUTS[layout])


def cached_problem(n: int, mask: Caches, *, heads: int, head_dim: int) -> Problem:
    """The new tokens of sequences with caches on n ranks."""
    return Problem(
        n=n,
        seqlen=mask.seqlen,
        kv_seqlen=mask.kv_seqlen,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        mask=mask,
        layout=mask.layout("auto"),
    )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def splittable_problem(n: int, layout: str = "striped", *, causal: bool = True) -> Problem:
    """The same with heads that n ranks can split among them."""
    return replace(small_problem(n, layout, causal=causal), heads=2 * n, kv_heads=n)


FEW, MANY = 9, 16
"""Up to so many ranks, methods are tried in slices too, and in all their other variants."""


def all_methods(problem: Problem) -> list[Method]:
    """Every method that can do the problem, in every variant that makes another plan for it."""
    return [*_all_methods(problem)]


@cache
def _all_methods(problem: Problem) -> tuple[Method, ...]:
    """Cached, as hypothesis draws plans of few problems thousands of times."""
    found = list[Method]()
    for name in REGISTRY:
        for options in _options(name, problem):
            try:
                found += build(name, options).candidates(problem)
            except RequestError:
                refuses = ("reference", "ulysses", "upipe") if problem.n > 1 else ()
                assert name in refuses, f"{name} refuses {problem}"
    by_messages = {m.name: m for m in found[::-1] if m.name in ("all_gather", "ulysses", "ulysses_all_gather")}
    if problem.n <= FEW:
        by_messages |= {m.name: m for m in found if m.name == "startrail"}
    return (*found, *(replace(m, collectives="messages") for m in by_messages.values()))  # pyright: ignore


def of_each_name(methods: Iterable[Method], turn: int = 0) -> list[Method]:
    """A variant of each method, another one for another `turn`."""
    by_name: dict[str, list[Method]] = {}
    for method in methods:
        by_name.setdefault(method.name, []).append(method)
    return [own[turn % len(own)] for own in by_name.values()]


def _options(name: str, problem: Problem) -> list[dict[str, object]]:
    """Beside what `auto` stands for. The stride of all_gather only at its ends, since small ones make long plans."""
    match name:
        case "mesh":
            sliced = [{"schedule": "searched", "slices": 2}] if problem.n <= FEW and problem.kv_heads % 2 == 0 else []
            heads = [{"row_sums": True, "ulysses": u} for u in _degrees(problem)[:2]] if problem.n <= FEW else []
            heads += [{"ulysses": u} for u in _degrees(problem)[1:]]
            even = problem.n <= FEW and problem.n % 2 == 0
            lean = [{"schedule": order, "tile": (2, problem.n // 2)} for order in ORDERS] if even else []
            gathers = [{"form": "gather"}, {"form": "gather", "collectives": "messages"}]
            gathers += [{**sliced[0], "schedule": "paper", "form": "gather"}] if sliced else []
            found = [{"placement": "auto"}, {"schedule": "searched"}, *sliced, *heads, *lean, *gathers]
            return found if problem.n <= MANY else [{}]
        case "upipe":
            return [{"stages": "auto"}, {"overlap": False}]
        case "pass_q":
            return [{}, {"row_sums": True}]
        case "tokenring":
            trims = (True, False) if problem.n <= MANY else (True,)
            return [{"nodes": d, "trim": trim} for d in divisors(problem.n) for trim in trims]
        case "all_gather":
            return [{"stride": d} for d in divisors(problem.kv_heads)[-2:]]
    return [{}]


def _degrees(problem: Problem) -> list[int]:
    """How many ranks can split the heads."""
    return [u for u in divisors(problem.n) if problem.heads % u == 0 and problem.kv_heads % u == 0]


class Planned(NamedTuple):
    """A plan and the problem it is for."""

    plan: Plan
    problem: Problem


def cost_profiles() -> st.SearchStrategy[CostProfile]:
    """Machines on which one hop takes from nothing to several blocks, other for each tensor and group."""
    speeds = st.sampled_from([50.0, 100.0, 300.0, 1e9])
    latencies = st.sampled_from([0.0, 0.5, 1.5, 4.0])
    block_s = st.sampled_from([0.3, 1.0, 2.0])
    return st.builds(
        CostProfile,
        forward_block_s=block_s,
        backward_block_s=block_s,
        node_size=st.sampled_from([1, 2, 3, 4, 8]),
        intra_latency_s=latencies,
        intra_bytes_per_s=speeds,
        inter_latency_s=latencies,
        inter_bytes_per_s=speeds,
    )


class Having(NamedTuple):
    """Plans of these methods that have such an operation."""

    op: Callable[[Op], bool]
    methods: tuple[str, ...]


@st.composite
def plans(draw: st.DrawFn, min_n: int = 1, max_n: int = 16, having: Having | None = None) -> Planned:
    """The plan of any method, option, layout, mask, phase and cost profile."""
    n = draw(st.integers(min_n, max_n))
    problem = splittable_problem(n, draw(st.sampled_from(sorted(LAYOUTS))), causal=draw(st.booleans()))
    lanes_each = build("mesh", {"tile": draw(st.sampled_from(tiles(n))), "lanes": "each"})
    costs = draw(st.just(COMPUTE_BOUND) | cost_profiles())
    choices = list(product([*all_methods(problem), lanes_each], PHASES))
    if having:
        choices = [(m, p) for m, p in choices if m.name in having.methods]
    assume(choices)
    first = draw(st.integers(0, len(choices) - 1))
    in_turn = (*choices[first:], *choices[:first])
    planned = (Planned(m.plan(problem, p, costs), m.assigned(problem)) for m, p in in_turn)
    found = next((one for one in planned if not having or any(map(having.op, one.plan.ops))), None)
    return found or reject()
