"""Refused options of methods, and how a method's variants are told apart."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY, build
from sp_bench.plan import Method, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from tests.support.problems import small_problem, splittable_problem


def problem(n: int, heads: int = 4, kv_heads: int = 4) -> Problem:
    return replace(small_problem(n), heads=heads, kv_heads=kv_heads)


def refusal(name: str, options: dict[str, object], asked: Problem) -> str:
    """The message with which a method refuses to assign a problem, as early as it can."""
    with pytest.raises(RequestError) as refused:
        build(name, options).candidates(asked)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "options", "asked", "message"),
    [
        (
            "ulysses",
            {},
            problem(3),
            "gpus=3: ulysses .* heads=4 .* kv_heads=4 .*; one of 1, 2, 4, or method.pad_heads=true would work",
        ),
        ("ulysses", {}, problem(8), "gpus=8: ulysses splits heads=4 evenly, .*; one of 1, 2, 4 would work"),
        ("ulysses", {}, problem(4, 12, 6), "gpus=4: .* kv_heads=6 .*; one of 1, 2, 3, 6, 12, or method.pad_heads=true"),
        ("ulysses", {"layout": "striped"}, problem(2), "method.layout=striped: .* not defined .*; one of contiguous"),
        ("upipe", {"stages": 3}, problem(2), "method.stages=3: must divide heads / gpus = 2; one of 1, 2 would work"),
        ("upipe", {"stages": 2}, problem(4), "method.stages=2: must divide heads / gpus = 1; one of 1 would work"),
        (
            "upipe",
            {"stages": "all"},
            problem(2),
            "method.stages=all: must be most, auto or an .*; method.stages=most would",
        ),
        (
            "upipe",
            {"overlap": 1},
            problem(2),
            "method.overlap=1: must be true or false; method.overlap=true would work",
        ),
        ("upipe", {}, problem(8), "gpus=8: upipe splits heads=4 evenly, .*; one of 1, 2, 4 would work"),
        (
            "usp",
            {"ulysses": 3},
            problem(8),
            "method.ulysses=3: must be auto or divide gpus=8 and heads=4, .*kv_heads=4 .*; one of 1, 2, 4 would work",
        ),
        ("usp", {"ulysses": 8}, problem(8), "method.ulysses=8: .* heads=4.*; one of 1, 2, 4 would work"),
        (
            "usp",
            {"ulysses": 4},
            problem(8, 12, 6),
            "method.ulysses=4: .* kv_heads=6 .*; one of 1, 2, or method.pad_heads=true would work",
        ),
        (
            "loongtrain",
            {"ulysses": 2, "inner": 3},
            problem(8),
            "method.inner=3: must be auto or divide gpus / ulysses = 4, where gpus=8; one of 1, 2, 4 would work",
        ),
        ("loongtrain", {"inner": 3}, problem(8), "method.inner=3: .* gpus / ulysses, .*; one of 1, 2, 4, 8 would work"),
        ("tasp", {"inner": 3}, problem(8), "method.inner=3: .* divide gpus=8; one of 1, 2, 4, 8 would work"),
        ("tasp", {"inner": 8, "rings": 3}, problem(8), "method.rings=3: .* kv_heads=4, .*; one of 1, 2, 4 would work"),
        ("tasp", {"inner": 4, "rings": 4}, problem(8), "method.rings=4: .* kv_heads=4, .*; one of 1, 2 would work"),
        ("startrail", {"team": 3}, problem(8), "method.team=3: .* square that divides gpus=8; one of 1, 2 would work"),
        ("startrail", {"team": 4}, problem(8), "method.team=4: .* square that divides gpus=8; one of 1, 2 would work"),
        ("all_gather", {"stride": 3}, problem(8), "method.stride=3: .* divide kv_heads=4; one of 1, 2, 4 would work"),
        ("all_gather", {"stride": 4}, problem(8, 4, 2), "method.stride=4: .* kv_heads=2; one of 1, 2 would work"),
        ("tokenring", {"trim": "x"}, problem(8), "method.trim=x: must be true or false; method.trim=true would work"),
        ("tokenring", {"trim": 1}, problem(8), "method.trim=1: must be true or false; method.trim=true would work"),
        (
            "tokenring",
            {"nodes": 0},
            problem(8),
            "method.nodes=0: must be an integer of at least 1; method.nodes=1 would",
        ),
        ("tokenring", {"nodes": 3}, problem(8), "method.nodes=3: must divide gpus=8; one of 1, 2, 4, 8 would work"),
    ],
)
def test_a_refusal_names_the_value_the_rule_and_what_would_work(
    name: str, options: dict[str, object], asked: Problem, message: str
) -> None:
    said = refusal(name, options, asked)
    assert re.match(message, said), said
    assert said.endswith("would work")


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "two", None, [2]])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("usp", "ulysses"),
        ("startrail", "team"),
        ("all_gather", "stride"),
        ("double_ring", "inner"),
        ("burst_attention", "inner"),
        ("tasp", "inner"),
        ("tasp", "rings"),
        ("loongtrain", "ulysses"),
        ("loongtrain", "inner"),
        ("ulysses_all_gather", "ulysses"),
    ],
)
def test_sizes_are_whole_numbers_of_at_least_one(name: str, option: str, value: object) -> None:
    said = refusal(name, {option: value}, problem(4))
    assert said.startswith(f"method.{option}={value}: must ")
    assert re.search(r"; one of 1, 2.* would work$", said), said


def test_what_is_said_to_work_works() -> None:
    """Every number that a refusal offers, and no other up to 13."""
    for name, option in (("usp", "ulysses"), ("startrail", "team"), ("all_gather", "stride"), ("tokenring", "nodes")):
        for asked in (problem(12, 12, 6), problem(9), problem(8, 8, 1), problem(7, 6, 6)):
            said = refusal(name, {option: 13}, asked)
            offered = [int(number) for number in re.findall(r"\d+", said.rpartition(";")[2])]
            for size in range(1, 14):
                if size in offered:
                    (method,) = build(name, {option: size}).candidates(asked)
                    for phase in PHASES:
                        assert method.plan(asked, phase, COMPUTE_BOUND).n == asked.n
                else:
                    assert refusal(name, {option: size}, asked).startswith(f"method.{option}={size}: ")


def test_a_layout_is_not_assigned_out_before_its_sharing_is_chosen() -> None:
    asked = problem(8)
    method = build("usp", {})
    for early in (method.assigned, lambda p: method.plan(p, "forward", COMPUTE_BOUND), lambda p: method.variant(p.n)):
        with pytest.raises(
            RequestError, match=r"^method.ulysses=auto: decides which tokens a rank owns, .* would work$"
        ):
            early(asked)
    assert [chosen.head_parallel(8) for chosen in method.candidates(asked)] == [1, 2, 4]


@pytest.mark.parametrize("ulysses", [3, 16])
def test_a_layout_is_not_shared_by_groups_that_do_not_tile_the_ranks(ulysses: int) -> None:
    """Else tokens are assigned wrongly, or with a division by zero, before a problem is asked about."""
    with pytest.raises(RequestError):
        build("usp", {"ulysses": ulysses}).layout_for(LAYOUTS["striped"], 8)


def variants(name: str, asked: Problem) -> tuple[Method, ...]:
    """All that `auto` stands for."""
    options: dict[str, object] = {"placement": "auto"} if name == "mesh" else {}
    return build(name, options).candidates(asked)


@pytest.mark.parametrize("name", [name for name in REGISTRY if name != "reference"])
def test_variants_are_told_apart(name: str) -> None:
    """In the list of candidates, and where a record says which of them ran."""
    found = variants(name, splittable_problem(16))
    assert len({method.variant(16) for method in found}) == len(found)


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - {"reference"}))
def test_candidates_are_settled(name: str) -> None:
    """Each is its own only candidate, and has the numbers of its formula."""
    asked = splittable_problem(16)
    for method in variants(name, asked):
        assert method.candidates(asked) == (method,)
        assert method.assigned(method.assigned(asked)) == method.assigned(asked)
        assert all(isinstance(value, int | float) for value in method.symbols(asked).values())
