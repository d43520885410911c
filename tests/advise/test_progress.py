"""The bar and the rows that a terminal has while advice is worked out."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sp_bench.advise.candidates import Question, answer
from sp_bench.advise.progress import Done, unseen, watching


def terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=80, height=20), file


@pytest.mark.parametrize("rows", [True, False])
def test_times_appear_as_they_are_known_the_shortest_first(rows: bool) -> None:
    console, file = terminal()
    with watching("about it: ", rows=rows, console=console) as show:
        show(Done("ring", 1, 3, 20.0))
        show(Done("ulysses", 2, 3))
        show(Done("usp", 3, 3, 7.5))
    last = file.getvalue()
    assert "about it: usp" in last
    assert "3/3" in last
    assert ("7.5 ms" in last) == rows
    if rows:
        assert last.rindex("7.5 ms") < last.rindex("20 ms")
    assert "ulysses" not in last.replace("about it: ulysses", "")


def test_what_is_not_simulated_yet_has_its_bound_below_those_that_are() -> None:
    console, file = terminal()
    with watching(console=console) as show:
        for number, name in enumerate(("ring", "usp", "mesh"), start=1):
            show(Done(name, number, 3, least_ms=5.0 * number))
        show(Done("mesh", 1, 3, 20.0))
        show(Done("usp", 2, 3))
    last = file.getvalue()
    assert last.rindex("20 ms") < last.rindex("at least 5 ms")
    assert "at least 15 ms" not in last[last.rindex("20 ms") :]


def test_a_pipe_gets_nothing() -> None:
    file = io.StringIO()
    with watching(console=Console(file=file)) as show:
        show(Done("ring", 1, 1, 20.0))
    assert show is unseen
    assert not file.getvalue()


def test_every_method_is_counted() -> None:
    seen: list[Done] = []
    found = answer(Question(["gpus=8", "seqlen=64k", "heads=6"], ["ring", "ulysses", "mesh"]), done=seen.append)
    assert [(done.what, done.number, done.of) for done in seen] == [("ring", 1, 3), ("ulysses", 2, 3), ("mesh", 3, 3)]
    times = {each.method.name: each.time.step_ms for each in found.feasible}
    assert {done.what: done.step_ms for done in seen} == {"ring": None, "ulysses": None, "mesh": None} | times
