"""How a command line ends that is told to."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest

from sp_bench.cli.drive import drive
from sp_bench.termination import raise_if_terminated


def test_told_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The work that it was about to do is left, its finally clauses are not, and the process's own handler is back."""
    before, done = signal.getsignal(signal.SIGTERM), []

    def answer() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("went on")
        finally:
            done.append("left in order")
        return 0

    assert drive(answer) == 128 + signal.SIGTERM
    assert done == ["left in order"]
    assert capsys.readouterr().err == "sp_bench: ended by SIGTERM; finished points are kept\n"
    assert signal.getsignal(signal.SIGTERM) is before
    assert drive(lambda: 7) == 7


class Lost:
    """Does something where nothing that is raised gets out."""

    def __init__(self, does: Callable[[], object]) -> None:
        self.does = does

    def __del__(self) -> None:
        self.does()


def test_told_to_end_where_exceptions_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of it then and there, but of what else is lost."""
    said: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", hook := lambda lost: said.append(lost.exc_type))

    def answer() -> int:
        Lost(lambda: 1 / 0)
        Lost(lambda: os.kill(os.getpid(), signal.SIGTERM))
        raise_if_terminated()
        return 0

    assert drive(answer) == 128 + signal.SIGTERM
    assert said == [ZeroDivisionError]
    assert sys.unraisablehook is hook
