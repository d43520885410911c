"""Points that are simulated at once, in forked processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sp_bench.machine import oom_kills
from sp_bench.plan.problem import Problem
from sp_bench.point import run_points
from sp_bench.point.at_once import ProcessEndedError, Worker, forked, processes_here
from sp_bench.records import Record
from tests.support.points import point
from tests.support.processes import survivors, wait_for

ROOT = Path(__file__).parents[2]
PARENT = """
import os, time
from sp_bench.point.at_once import forked

def say(index):
    print(os.getpid(), flush=True)
    time.sleep(600)

list(forked(say, range(2), 2))
"""


def square_unless_killed(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2


def own_pid(_: int) -> int:
    time.sleep(0.2)
    return os.getpid()


def make(what: str) -> object:
    if what == "memory":
        raise MemoryError
    if what == "exit":
        os._exit(3)
    return (lambda: None) if what == "function" else what


def test_each_item_has_its_result_though_a_process_is_killed() -> None:
    found = dict(forked(square_unless_killed, range(8), 2))
    ended = found.pop(3)
    assert isinstance(ended, ProcessEndedError) and "killed by SIGKILL" in str(ended)
    assert found == {number: number**2 for number in range(8) if number != 3}


def test_what_goes_wrong_is_the_item_s_error() -> None:
    found = dict(forked(make, ["function", "memory", "text", "exit", "more"], 2))
    assert (found["text"], found["more"]) == ("text", "more")
    assert isinstance(found["memory"], MemoryError)
    assert "pickle" in str(found["function"])
    assert "ended with exit code 3" in str(found["exit"]) and "memory" not in str(found["exit"])


@pytest.mark.parametrize("number", [signal.SIGTERM, 40])
def test_a_signal_is_named(number: int) -> None:
    named = {signal.SIGTERM: "SIGTERM", 40: "signal 40"}[number]
    assert str(ProcessEndedError(-number, oom_kills())) == f"the process that simulated the point was killed by {named}"


@pytest.mark.parametrize("at_first", [0, 2])
def test_where_no_process_can_be_forked_all_items_have_results(monkeypatch: pytest.MonkeyPatch, at_first: int) -> None:
    """None can be forked from the beginning, or none in place of two that are killed."""
    left = iter(range(at_first))

    class Rare(Worker):
        def __init__(self, *given: Any) -> None:
            if next(left, None) is None:
                raise BlockingIOError
            super().__init__(*given)

    monkeypatch.setattr("sp_bench.point.at_once.Worker", Rare)
    first = [3] * at_first
    found = list(forked(square_unless_killed, [*first, 4, 5], 2))
    assert [item for item, _ in found] == [*first, 4, 5]
    assert [result for _, result in found[at_first:]] == [16, 25]
    assert all(isinstance(result, ProcessEndedError) for _, result in found[:at_first])


def test_processes_end_with_the_iterator() -> None:
    items = forked(own_pid, range(100), 3)
    pids = {next(items)[1] for _ in range(6)}
    items.close()
    assert 1 < len(pids) < 4 and os.getpid() not in pids
    assert survivors([pid for pid in pids if isinstance(pid, int)], patience_s=0) == []


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    answer = tmp_path / "pids"
    with answer.open("w") as stdout:
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=stdout, cwd=ROOT)
    try:
        wait_for(lambda: len(answer.read_text().split()) >= 2, "both processes to start")
        pids = answer.read_text().split()
        assert len(pids) == 2
    finally:
        parent.kill()
        parent.wait()
    assert survivors([int(pid) for pid in pids]) == []


def test_no_more_processes_than_memory_holds_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_bench.point.at_once.sys.platform", "linux")
    monkeypatch.setattr("sp_bench.point.at_once.cores_here", lambda: 64)
    for free_gib, processes in ((100, 8), (7, 3), (1, 1)):
        monkeypatch.setattr("sp_bench.point.at_once.free_bytes", lambda free=free_gib: free << 30)
        assert processes_here() == processes
    monkeypatch.setattr("sp_bench.point.at_once.sys.platform", "darwin")
    assert processes_here() == 1


def test_records_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a point that fails and one whose process is killed all others have the same files."""
    here = os.getpid()

    def check(plans: object, problem: Problem) -> None:
        if problem.seqlen == 2**17 and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        if problem.n == 16:
            raise RuntimeError("16 GPUs")

    methods = ("ring", "mesh", "usp", "tokenring")
    requests = [point("gpus=8", "seqlen=64k", f"method={name}") for name in methods]
    kept = [outcome.record for outcome in run_points(requests, folder=tmp_path / "one", reuse=False)]
    monkeypatch.setattr("sp_bench.point.simulated.check_all", check)
    others = [point("gpus=16", "seqlen=64k", "method=mesh"), point("gpus=8", "seqlen=128k", "method=ring")]
    finished = list[Record]()
    found = run_points(
        [*others, *requests],
        folder=tmp_path / "two",
        reuse=False,
        at_once=2,
        finished=lambda outcome: finished.append(outcome.record),
    )
    failed, killed, *same = (outcome.record for outcome in found)
    assert (failed.status, failed.error) == ("failed", "RuntimeError: 16 GPUs")
    assert killed.status == "failed" and "killed by SIGKILL" in str(killed.error)
    assert [record.to_dict() for record in same] == [record.to_dict() for record in kept]
    assert {record.run_id for record in finished} == {outcome.record.run_id for outcome in found}
    for one in sorted((tmp_path / "one").iterdir()):
        assert one.read_bytes() == (tmp_path / "two" / one.name).read_bytes(), one.name


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_point_that_is_asked_for_twice_is_simulated_once(tmp_path: Path, at_once: int) -> None:
    ring, mesh = (point("gpus=8", "seqlen=64k", f"method={name}") for name in ("ring", "mesh"))
    finished, steps = list[str](), list[int]()
    found = run_points(
        [ring, mesh, ring],
        folder=tmp_path,
        reuse=True,
        at_once=at_once,
        progress=steps.append,
        finished=lambda outcome: finished.append(outcome.record.method),
    )
    assert [outcome.record.method for outcome in found] == ["ring", "mesh", "ring"]
    assert sorted(finished) == ["mesh", "ring"] and sum(steps) == 3
