"""Values that users write: what is taken, and what is said of a value that breaks a rule."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from sp_bench.errors import RequestError
from sp_bench.reading import Count, Natural, NotNegative, Positive, Section, Tokens, has_key, keys_at, read

Small = Annotated[float, Meta(gt=0, le=1, examples=[0.5])]
Name = Annotated[str, Meta(pattern="^[a-z]+$", description="a lower-case word", examples=["abc"])]


class Cable(Section, frozen=True, kw_only=True, tag_field="kind", tag="cable"):
    rate: Positive
    share: Small = 1.0


class Radio(Section, frozen=True, kw_only=True, tag_field="kind", tag="radio"):
    channels: Count
    used: Count = 1

    def __post_init__(self) -> None:
        if self.used > self.channels:
            raise RequestError(f"used={self.used}", f"there are {self.channels}", f"used={self.channels} would work")


class Box(Section, frozen=True, kw_only=True):
    ports: Count | None
    link: Cable | Radio
    spare: Cable | None = None
    rates: dict[Name, dict[int, Positive]] = msgspec.field(default_factory=dict)
    delay_s: NotNegative = 0.5
    cores: Count | Literal["auto"] = "auto"
    colour: Literal["red", "green"] = "red"
    order: Annotated[Literal["up"] | tuple[Natural, ...], Meta(description="up, or a list", examples=["up"])] = "up"
    ready: bool = False


PLAIN: dict[str, Any] = {"ports": 4, "link": {"rate": 1e9}}


def test_defaults_stand_for_what_is_missing_or_null() -> None:
    nulls = dict.fromkeys(("spare", "rates", "delay_s", "cores", "colour", "order", "ready"))
    assert read(Box, PLAIN | nulls, "box") == read(Box, PLAIN, "box") == Box(ports=4, link=Cable(rate=1e9))
    assert read(Box, PLAIN | {"ports": None}, "box").ports is None
    assert read(Box, {"ports": 4, "link": {"rate": 1, "share": None}}, "box").link == Cable(rate=1.0)


def test_a_section_without_its_kind_is_the_first() -> None:
    assert read(Box, PLAIN | {"link": {"kind": "radio", "channels": 3}}, "box").link == Radio(channels=3)
    assert isinstance(read(Box, PLAIN, "box").link, Cable)


@pytest.mark.parametrize(("text", "number"), [("8", 8), ("8k", 8192), ("256K", 2**18), (" 1M ", 2**20), (3, 3)])
def test_whole_numbers_have_units(text: Any, number: int) -> None:
    assert read(Tokens, text, "seqlen") == number
    assert read(Box, PLAIN | {"ports": text}, "box").ports == number


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ports": 0}, "box.ports=0: must be a whole number of at least 1; box.ports=8 would work"),
        ({"ports": True}, "box.ports=true: must be a whole number of at least 1; box.ports=8 would work"),
        ({"ports": 2.0}, "box.ports=2.0: must be a whole number of at least 1; box.ports=2 would work"),
        ({"ports": "8q"}, "box.ports=8q: must be a whole number of at least 1; box.ports=8 would work"),
        ({"cores": "all"}, "box.cores=all: must be a whole number of at least 1, or auto; box.cores=8 would work"),
        ({"colour": "gren"}, "box.colour=gren: there is no such colour; did you mean green? known: green, red"),
        ({"colour": 3}, "box.colour=3: must be green or red; box.colour=green or box.colour=red would work"),
        ({"ready": 1}, "box.ready=1: must be true or false; box.ready=true would work"),
        ({"order": [1, -1]}, "box.order=[1, -1]: must be up, or a list; box.order=up would work"),
        ({"delay_s": -1}, "box.delay_s=-1: must be a finite number of at least 0; box.delay_s=0.0 would work"),
        ({"prots": 4}, "box.prots: there is no such key; did you mean box.ports? known: box.colour, box.cores, "),
        ({3: 4}, "box.3: there is no such key; did you mean box.link? known: box.colour"),
        ({"link": 3}, "box.link=3: must be a section of keys"),
        ({"link": {}}, "box.link.rate: is missing; all of rate are needed"),
        ({"link": {"rate": None}}, "box.link.rate=null: must be a finite number above 0; box.link.rate=1.0 would work"),
        ({"link": {"rate": math.nan}}, "box.link.rate=nan: must be a finite number above 0"),
        ({"link": {"rate": math.inf}}, "box.link.rate=inf: must be a finite number above 0"),
        ({"link": {"rate": "1"}}, "box.link.rate=1: must be a finite number above 0"),
        (
            {"link": {"rate": 1, "share": 2}},
            "box.link.share=2: must be a finite number above 0 and at most 1; box.link",
        ),
        ({"link": {"kind": "cabel", "rate": 1}}, "box.link.kind=cabel: there is no such kind; did you mean cable?"),
        ({"link": {"kind": 3}}, "box.link.kind=3: there is no such kind; known: cable, radio"),
        (
            {"link": {"kind": "radio", "rate": 1}},
            "box.link.rate: there is no such key; did you mean box.link.used? known: box",
        ),
        ({"link": {"kind": "radio", "channels": 2, "used": 3}}, "box.link.used=3: there are 2; box.link.used=2 would"),
        ({"spare": {"rate": 0}}, "box.spare.rate=0: must be a finite number above 0; box.spare.rate=1.0 would work"),
        ({"rates": {"a": {1: 1.0}, "b": {1: 1, 2: 0, 3: 1}}}, "box.rates.b.2=0: must be a finite number above 0"),
        ({"rates": {"a": {"x": 1.0}}}, "box.rates.a=x: must be a whole number; box.rates.a={8: 1.0} would work"),
        ({"rates": {"a": {}, "B": {}}}, "box.rates=B: must be a lower-case word; box.rates={abc: {8: 1.0}} would work"),
        ({"rates": [1]}, "box.rates=[1]: must be a table; box.rates={abc: {8: 1.0}} would work"),
    ],
)
def test_what_breaks_a_rule_is_named(changes: dict[Any, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(Box, PLAIN | changes, "box")
    assert str(caught.value).startswith(message)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(RequestError, match="box.ports: is missing; all of ports, link are needed"):
        read(Box, {"link": {"rate": 1}}, "box")


def test_single_values() -> None:
    assert read(Positive, 60, "timeout_s") == 60.0
    with pytest.raises(RequestError, match="verify=2: must be true or false; verify=true would work"):
        read(bool, 2, "verify")
    with pytest.raises(RequestError, match="seqlen=x: must be .*; seqlen=8 or seqlen=8k or seqlen=1M would work"):
        read(Tokens, "x", "seqlen")


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("ports", True),
        ("link.rate", True),
        ("link.channels", True),
        ("link.kind", True),
        ("spare.share", True),
        ("rates.any.512", True),
        ("port", False),
        ("link.colour", False),
        ("ports.rate", False),
        ("spare.channels", False),
    ],
)
def test_which_keys_there_may_be(key: str, known: bool) -> None:
    assert has_key(Box, key) is known


def test_the_keys_of_a_section_are_those_of_all_its_kinds() -> None:
    assert keys_at(Box, ["link"]) == {"rate", "share", "channels", "used"}
    assert keys_at(Box, ["rates", "any"]) == keys_at(Box, ["ports"]) == keys_at(Box, ["nothing"]) == set()
