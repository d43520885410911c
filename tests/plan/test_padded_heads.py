"""Padded heads: the fewest bytes among all ways to pad, in closed forms, plans, bounds and simulated times."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import account
from sp_bench.check import check_all
from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY, build
from sp_bench.plan import Method, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES, SplitsHeads
from sp_bench.plan.padded_heads import padded_heads, splits
from sp_bench.plan.tensors import DKV, KV, OUT, Q

OPTIONS = {"upipe": {"stages": "auto"}, "mesh": {"ulysses": "auto", "schedule": "auto", "form": "auto"}}
SHAPES = ((28, 4), (28, 7), (10, 10), (40, 10), (9, 3), (8, 1))
"""(heads, kv_heads)"""


def asked(n: int, heads: int, kv_heads: int, layout: str = "contiguous") -> Problem:
    return Problem(n=n, seqlen=8 * n, heads=heads, kv_heads=kv_heads, head_dim=16, layout=LAYOUTS[layout])


def padding_methods(problem: Problem) -> list[Method]:
    """Every variant of the methods that split heads under which there are heads of zeros or copies of key heads."""
    names = [name for name, method in REGISTRY.items() if issubclass(method, SplitsHeads)]
    found = []
    for name in names:
        found += build(name, {**OPTIONS.get(name, {}), "pad_heads": True}).candidates(problem)
    return [method for method in found if method.assigned(problem).padded]


def sent(heads: int, kv_heads: int, degree: int, rings: int) -> int:
    """USP sends so much forward and backward, in units of a head of 1 / degree of a chunk."""
    of_keys = max(kv_heads, degree)
    return 4 * (degree - 1) * (heads + of_keys) + 6 * degree * (rings - 1) * of_keys


@given(st.integers(1, 12), st.integers(1, 8), st.integers(2, 16), st.integers(1, 4))
def test_no_other_padding_sends_less(kv_heads: int, group: int, degree: int, rings: int) -> None:
    """Among all numbers of key heads, groups and copies that are enough."""
    heads = kv_heads * group
    found = padded_heads(heads, kv_heads, degree, rings)
    if splits(heads, kv_heads, degree):
        assert found is None
        return
    assert found is not None and splits(found.heads, found.kv_heads, degree)
    assert found.kv_heads >= kv_heads * found.copies and found.group * found.copies >= group
    least = min(
        sent(keys * of_each, keys, degree, rings)
        for copies in range(1, group + 1)
        for keys, of_each in product(
            range(kv_heads * copies, kv_heads * copies + degree + 1), range(-(-group // copies), group + degree + 1)
        )
        if splits(keys * of_each, keys, degree)
    )
    assert sent(found.heads, found.kv_heads, degree, rings) == least


@pytest.mark.parametrize(
    ("shape", "degree", "padded"),
    [
        ((28, 4), 8, (4, 8, 1)),  # groups of 7 become 8, of which each rank has 4
        ((28, 7), 8, (8, 4, 1)),
        ((24, 24), 16, (32, 1, 1)),
        ((24, 8), 16, (8, 4, 1)),
        ((40, 10), 8, (24, 2, 2)),  # 16 key heads with 64 query heads would be 8 heads more
        ((32, 8), 8, None),
        ((28, 4), 1, None),
    ],
)
def test_shapes_that_users_have(shape: tuple[int, int], degree: int, padded: tuple[int, int, int] | None) -> None:
    assert padded_heads(*shape, degree) == padded


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_plans_are_proven_and_send_what_the_closed_form_says(n: int, shape: tuple[int, int]) -> None:
    """The plans' blocks have the padded heads; what no method can go below has the true ones."""
    problem = asked(n, *shape)
    for method in padding_methods(problem):
        assigned, plans = method.assigned(problem), {p: method.plan(problem, p, COMPUTE_BOUND) for p in PHASES}
        check_all(plans, assigned)
        padded = assigned.padded
        assert padded is not None
        as_asked = replace(assigned, heads=padded.heads, kv_heads=padded.kv_heads, padded=None)
        for phase, plan in plans.items():
            volume = account.volume(plan, assigned)
            assert volume.total_bytes == method.bytes_sent(problem, phase), f"{method} {phase}"
            assert volume.by_rank.keys() == account.volume(plan, as_asked).by_rank.keys()
            assert volume.total_bytes == account.volume(plan, as_asked).total_bytes
            assert (account.pairs(plan, assigned) == account.pairs(plan, as_asked)).all()
            assert account.model_flops(assigned, phase) == account.model_flops(problem, phase)
            assert account.least_bytes(assigned, phase) == pytest.approx(account.least_bytes(problem, phase))
            bound = account.lower_bound_bytes(assigned, phase, kept=bool(plan.kept))
            assert bound <= account.lower_bound_bytes(as_asked, phase, kept=bool(plan.kept)) * (1 + 1e-12)
            assert bound <= volume.payload_bytes
        own = account.buffer_bytes(plans.values(), assigned)
        assert own == account.buffer_bytes(plans.values(), as_asked)
        assert account.peak_bytes(plans.values(), assigned) > account.peak_bytes(plans.values(), as_asked)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_volume_formula_is_that_of_padded_heads(shape: tuple[int, int]) -> None:
    problem, n = asked(8, *shape), 8
    for method in padding_methods(problem):
        assigned = method.assigned(problem)
        if method.name == "mesh" or assigned.head_slices > 1:  # a plan of slices is counted in chunks of a slice
            continue
        unit = assigned.chunk_bytes(Q, wire=True)
        names = {"n": n, "h": assigned.padded_heads, "k": assigned.kv_ratio, "max": max, **method.symbols(problem)}
        for phase in PHASES:
            chunks = eval(method.formula[phase], {"__builtins__": {}}, names)
            assert method.bytes_sent(problem, phase) / unit == pytest.approx(chunks), f"{method} {phase}"


def test_the_share_of_true_heads() -> None:
    assigned = build("ulysses", {"pad_heads": True}).assigned(asked(8, 28, 4))
    assert assigned.true_share(Q) == assigned.true_share(OUT.by_heads) == Fraction(7, 8)
    assert assigned.true_share(KV) == assigned.true_share(DKV.by_heads) == 1
    copied = build("ulysses", {"pad_heads": True}).assigned(asked(8, 40, 10))
    assert (copied.true_share(KV), copied.true_share(KV.by_heads)) == (Fraction(10, 24), Fraction(10, 24))


def test_heads_that_ranks_split_evenly_are_not_padded() -> None:
    problem = asked(4, 8, 4)
    assert build("ulysses", {"pad_heads": True}).assigned(problem) == build("ulysses", {}).assigned(problem)
    assert padding_methods(problem) == []


def test_degrees_are_tried_with_padding_where_that_is_asked_for_alone() -> None:
    problem = asked(8, 28, 7)
    for name, most in (("usp", 1), ("mesh", 1), ("group_cast", 1), ("loongtrain", 1), ("ulysses_all_gather", 1)):
        options = {"ulysses": "auto"}
        assert {m.head_parallel(8) for m in build(name, options).candidates(problem)} == {most}
        padded = build(name, {**options, "pad_heads": True}).candidates(problem)
        assert {m.head_parallel(8) for m in padded} == {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("method", "options", "n", "message"),
    [
        ("ulysses", {}, 8, "gpus=8: ulysses .* heads=28 .*; one of 1, 2, 4, 28, or method.pad_heads=true would work"),
        ("upipe", {}, 8, "gpus=8: upipe splits heads=28 .*; one of 1, 2, 4, 28, or method.pad_heads=true would work"),
        ("ulysses", {"pad_heads": True}, 32, "gpus=32: ulysses splits heads=28, .*; 28 or fewer would work"),
        ("ulysses", {}, 32, "gpus=32: .*; one of 1, 2, 4, 28 would work"),
        ("usp", {"ulysses": 8}, 8, "method.ulysses=8: .*; one of 1, 2, 4, or method.pad_heads=true would work"),
        ("usp", {"ulysses": 3}, 8, "method.ulysses=3: .*; one of 1, 2, 4 would work"),
        ("usp", {"ulysses": 3, "pad_heads": True}, 8, "method.ulysses=3: .*heads=28; one of 1, 2, 4, 8 would work"),
        ("mesh", {"ulysses": 8}, 8, "method.ulysses=8: .*; one of 1, 2, 4, or method.pad_heads=true would work"),
        ("mesh", {"ulysses": 32, "pad_heads": True}, 32, "method.ulysses=32: .*heads=28; one of 1, 2, 4, 8, 16 would"),
        ("upipe", {"stages": 3, "pad_heads": True}, 8, "method.stages=3: must divide heads / gpus = 4; one of 1, 2, 4"),
        ("ulysses", {"pad_heads": 8}, 8, "method.pad_heads=8: must be true or false; method.pad_heads=true would work"),
        ("ring", {"pad_heads": True}, 8, "method.pad_heads"),
    ],
)  # fmt: skip
def test_what_is_refused(method: str, options: dict[str, object], n: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(method, options).candidates(asked(n, 28, 4))
