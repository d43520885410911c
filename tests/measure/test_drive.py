"""How a command line ends that is told to."""

from __future__ import annotations

import os
import signal

import pytest

from sp_bench.measure.leaving import leave_if_told
from sp_bench.measure.ranks import drive


def test_told_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    """What it was about to do is left, its finally clauses are not, and the process's own handler is there again."""
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


class Told:
    """Told to end where nothing that is raised gets out."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_told_to_end_where_exceptions_are_lost() -> None:
    def answer() -> int:
        told = Told()
        del told
        leave_if_told()
        return 0

    assert drive(answer) == 128 + signal.SIGTERM
