"""Options of methods have types, and one rule checks them all."""

from __future__ import annotations

from typing import Literal, get_type_hints

import pytest

from sp_bench.errors import RequestError
from sp_bench.methods import REGISTRY, build
from sp_bench.plan.options import checked

BY_THEIR_METHODS = {"layout", "ulysses", "inner", "rings", "stride", "team"}
"""Options whose values depend on the problem: their methods check them when they know it."""


class Owner:
    """Has an option of each kind."""

    switch: bool
    choice: Literal["one", "each"]
    count: Literal["most", "auto"] | int
    sides: Literal["auto"] | tuple[int, int]
    word: str | int


@pytest.mark.parametrize(
    ("name", "value"),
    [("switch", False), ("choice", "each"), ("count", "most"), ("count", 3), ("sides", "auto"), ("sides", (2, 3))],
)
def test_values_of_the_type_are_taken_as_they_are(name: str, value: object) -> None:
    assert checked(Owner, name, value) == value


def test_a_list_of_two_counts_becomes_a_tuple() -> None:
    assert checked(Owner, "sides", [2, 3]) == (2, 3)


def test_what_has_no_known_type_is_left_to_the_method() -> None:
    assert checked(Owner, "word", -1) == -1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("switch", 1, "method.switch=1: must be true or false; method.switch=true would work"),
        ("switch", "yes", "method.switch=yes: must be true or false"),
        ("choice", "two", "method.choice=two: must be one or each; method.choice=one would work"),
        ("choice", 1, "method.choice=1: must be one or each"),
        ("count", 0, "method.count=0: must be most, auto or an integer of at least 1; method.count=most would work"),
        ("count", True, "method.count=True: must be most, auto or an integer"),
        ("count", 2.0, "method.count=2.0: must be most, auto or an integer"),
        (
            "sides",
            (0, 4),
            r"method.sides=\(0,4\): must be auto or two integers \[a,b\] of at least 1; .*=auto would",
        ),
        ("sides", [4], r"method.sides=\[4\]: must be auto or two integers"),
        ("sides", {"a": 1}, "method.sides={'a': 1}: must be auto or two integers"),
    ],
)
def test_others_are_refused_with_one_that_works(name: str, value: object, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        checked(Owner, name, value)


@pytest.mark.parametrize("method", REGISTRY)
def test_no_option_takes_nonsense(method: str) -> None:
    """Every option has a type that is checked, or one that its method checks for each problem."""
    kind = REGISTRY[method]
    for name in kind.options():
        if get_type_hints(kind)[name] in (str, str | int):
            assert name in BY_THEIR_METHODS
        else:
            with pytest.raises(RequestError, match=f"^method.{name}=nonsense: must be .* would work$"):
                build(method, {name: "nonsense"})
