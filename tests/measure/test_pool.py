"""The pool of ranks: what it answers, and that no way of failing leaves it hanging or a process behind."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sp_bench import machine
from sp_bench.errors import RequestError
from sp_bench.machine import oom_kills
from sp_bench.measure import pool as pools
from sp_bench.measure.pool import RankError, RankFailure, RankHang, RankPool
from sp_bench.measure.thread_dump import as_json
from sp_bench.point import measured
from tests.measure import jobs
from tests.support.marks import exhaustive
from tests.support.processes import LONG_S, SHORT_S, is_running, survivors, wait_for

N = 3


@pytest.fixture(scope="module")
def shared() -> Iterator[RankPool]:
    """For tests that leave the pool usable."""
    with RankPool(N) as pool:
        yield pool


NOTICED_S = 30.0
"""By so much the end of a rank is noticed before the pool's patience ends, or a hang after it."""


def failure_of(how: str, others: str, *, timeout_s: float = 60.0, reports: int = 0) -> RankFailure:
    """The error of a new pool when rank BAD goes wrong; its processes must be gone by then."""
    with RankPool(N, timeout_s) as pool:
        pids = pool.pids
        pool.run(jobs.total)
        started = time.monotonic()
        with pytest.raises(RankFailure) as caught:
            pool.run(jobs.go_wrong, how, others, reports)
        assert time.monotonic() - started < min(timeout_s, NOTICED_S) + NOTICED_S
        assert not pool.alive
        assert survivors(pids) == []
    return caught.value


def test_answers_are_in_rank_order(shared: RankPool) -> None:
    assert shared.run(jobs.rank_and_world) == [(0, 3), (1, 3), (2, 3)]
    assert shared.run(jobs.rank_and_world, "a", {"b": 1}) == [(rank, 3, "a", {"b": 1}) for rank in range(3)]
    assert shared.run("tests.measure.jobs:rank_and_world") == [(0, 3), (1, 3), (2, 3)]


def test_ranks_are_processes_in_one_group(shared: RankPool) -> None:
    assert shared.alive
    assert len({os.getpid(), *shared.pids}) == N + 1
    assert all(is_running(pid) for pid in shared.pids)
    assert shared.run(os.getpid) == shared.pids
    assert shared.run(jobs.total) == [3.0] * N


def test_progress_is_that_of_rank_0(shared: RankPool) -> None:
    seen: list[object] = []
    assert shared.run(jobs.report_often, 4, 0.0, progress=seen.append) == [4] * N
    assert seen == [(0, i) for i in range(4)]
    assert shared.run(jobs.report_often, 2, 0.0) == [2] * N, "nobody has to listen"


@pytest.mark.long
def test_ranks_that_report_are_not_hung() -> None:
    """A run may take longer than the pool's patience."""
    with RankPool(2, timeout_s=SHORT_S) as pool:
        assert pool.run(jobs.report_often, 6, SHORT_S / 4) == [6, 6]


@pytest.mark.long
def test_ranks_that_connect_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if one of them says something else meanwhile."""
    with RankPool(2, timeout_s=SHORT_S) as pool:
        assert pool.run(jobs.connect_slowly, 1.5 * SHORT_S) == [0, 1]
    monkeypatch.setattr(pools, "CONNECT_S", 0.0)
    with RankPool(2, timeout_s=SHORT_S) as pool, pytest.raises(RankHang):
        pool.run(jobs.connect_slowly, LONG_S)


@pytest.mark.parametrize("who", [0, 2, None])
def test_a_rank_that_raises(shared: RankPool, who: int | None) -> None:
    """All answer, so the pool can go on, with the same processes."""
    pids = shared.pids
    with pytest.raises(RankError, match="ValueError: seven is not even") as caught:
        shared.run(jobs.fail, "value", who)
    assert caught.value.rank in ((who,) if who is not None else range(N))
    assert str(caught.value).startswith(f"rank {caught.value.rank}: ")
    assert "jobs.py:" in str(caught.value), "where it was raised"
    assert isinstance(caught.value.cause, ValueError) and str(caught.value.cause) == "seven is not even"
    assert shared.run(jobs.total) == [3.0] * N
    assert shared.pids == pids


def test_a_refused_request_is_told_in_full(shared: RankPool) -> None:
    with pytest.raises(RankError, match=r"RequestError: tile=\[2,2\]: a \* b must be gpus=3; tile=\[1,3\] would work"):
        shared.run(jobs.fail, "request", None)
    assert shared.run(jobs.total) == [3.0] * N


def test_a_refused_request_is_the_cause(shared: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        shared.run(jobs.fail, "request", None)
    assert isinstance(caught.value.cause, RequestError)
    assert str(caught.value.cause) == "tile=[2,2]: a * b must be gpus=3; tile=[1,3] would work"


def test_exceptions_that_do_not_pickle_are_told_in_words(shared: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1: Unpicklable: 3 and 5") as caught:
        shared.run(jobs.fail, "unpicklable", 1)
    assert caught.value.cause is None
    assert shared.run(jobs.total) == [3.0] * N


def test_what_can_not_be_sent_is_refused_before_any_rank_starts(shared: RankPool) -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        shared.run(lambda: None)
    assert shared.run(jobs.total) == [3.0] * N


def test_an_answer_that_does_not_pickle_is_named() -> None:
    with RankPool(1) as pool, pytest.raises(RankFailure, match="pickle"):
        pool.run(jobs.answer_with_a_lambda)


@pytest.mark.parametrize("others", ["barrier", "all_reduce", "attention"])
@pytest.mark.parametrize(("how", "why"), [("exit", "exit code 3"), ("kill", "killed by SIGKILL")])
def test_a_rank_that_dies(how: str, why: str, others: str) -> None:
    """The others, which fail or wait because of it, are not blamed."""
    failure = failure_of(how, others)
    assert not isinstance(failure, RankError)
    assert (failure.rank, str(failure)) == (jobs.BAD, f"rank {jobs.BAD}: died: {why}")


def test_kills_for_memory_are_counted_by_the_kernel() -> None:
    (line,) = re.findall(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    assert oom_kills() == int(line)


def test_a_rank_that_the_kernel_kills_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = itertools.count()
    for module in (pools, machine):
        monkeypatch.setattr(module, "oom_kills", lambda: next(kills))
    failure = failure_of("kill", "barrier")
    why = "killed by SIGKILL: out of memory, by the kernel's count of such kills"
    assert (failure.rank, str(failure)) == (jobs.BAD, f"rank {jobs.BAD}: died: {why}")
    assert measured._status(failure) == "oom"


@pytest.mark.parametrize("others", ["barrier", "all_reduce", "attention"])
def test_a_rank_that_raises_while_the_others_wait(others: str) -> None:
    failure = failure_of("raise", others)
    assert not isinstance(failure, RankError)
    assert failure.rank == jobs.BAD
    assert "ValueError: seven is not even" in str(failure)


@pytest.mark.parametrize(
    ("how", "others"),
    [
        exhaustive("stop", "barrier"),
        ("stop", "attention"),
        exhaustive("sleep", "all_gather"),
        exhaustive("spin", "attention"),
        exhaustive("sleep", "all_reduce"),
        exhaustive("sleep", "work"),
    ],
)
def test_a_rank_that_hangs(how: str, others: str) -> None:
    """The one that doesn't wait for anybody is to blame."""
    failure = failure_of(how, others, timeout_s=SHORT_S)
    assert failure.rank == jobs.BAD
    assert "hangs" in str(failure) and f"{SHORT_S:g} s" in str(failure)
    assert how == "stop" or "jobs.py" in str(failure), "where it hangs"
    assert isinstance(failure, RankHang)
    assert how != "spin" or failure.dumps[jobs.BAD].threads[0].core_s > 0
    assert how != "spin" or "so it may be slow and not hung: a shorter seqlen, or timeout_s=" in str(failure)
    assert "it had made no progress before" in str(failure)


@pytest.mark.long
def test_what_hung_ranks_were_at() -> None:
    """All that were silent, with the lanes and gloo's threads of those that wait."""
    failure = failure_of("sleep", "attention", timeout_s=SHORT_S)
    assert isinstance(failure, RankHang)
    assert set(failure.dumps) == set(range(N))
    for rank, dump in failure.dumps.items():
        assert dump.waits_for_others is (rank != jobs.BAD), rank
        assert all(frame.strip() in "\n".join(dump.stacks) for frame in dump.stack), "the main thread is one of all"
        assert {thread.policy for thread in dump.threads} == {"other"}, "there are no hosts"
        assert ("in _lane" in "\n".join(dump.stacks)) is (rank != jobs.BAD), rank
    assert json.loads(json.dumps(as_json(failure.dumps)))[str(jobs.BAD)]["threads"][0]["state"] == "S"


@pytest.mark.long
def test_a_stopped_rank_is_nowhere() -> None:
    failure = failure_of("stop", "barrier", timeout_s=SHORT_S)
    assert isinstance(failure, RankHang)
    stopped = failure.dumps[jobs.BAD]
    assert (stopped.stack, stopped.stacks) == ([], [])
    assert {thread.state for thread in stopped.threads} == {"T"}


@pytest.mark.long
def test_a_rank_that_hangs_after_it_reported() -> None:
    failure = failure_of("sleep", "barrier", timeout_s=SHORT_S, reports=3)
    assert (failure.rank, "hangs" in str(failure)) == (jobs.BAD, True)
    assert f"no rank has answered for {SHORT_S:g} s; the last progress was step 3, begun after" in str(failure)
    assert "may be slow" not in str(failure), "it sleeps"


def test_an_interrupt_ends_the_ranks() -> None:
    """As Ctrl-C does, which reaches the caller only."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with RankPool(2) as pool:
        pids = pool.pids
        pool.run(jobs.total)
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        assert pool.run(jobs.total) == [1.0, 1.0]
        with pytest.raises(KeyboardInterrupt):
            pool.run(jobs.report_often, 10_000, 0.1, progress=interrupt)
        assert survivors(pids) == []


def test_close_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = RankPool(2)
    pids = pool.pids
    assert pool.run(jobs.total) == [1.0, 1.0]
    assert list(tmp_path.iterdir())
    pool.close()
    assert not pool.alive and pool.pids == []
    assert survivors(pids) == []
    assert not list(tmp_path.iterdir())
    pool.close()


def test_a_closed_pool_says_so() -> None:
    pool = RankPool(1)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(jobs.total)


PARENT = """
import sys
from sp_bench.measure.pool import RankPool
from sp_bench.measure.thread_dump import as_json
from tests.measure import jobs

pool = RankPool(3)
pool.run(jobs.total)
print(*pool.pids, flush=True)
if sys.argv[1] == "busy":
    pool.run(jobs.go_wrong, "spin", "barrier")
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
@pytest.mark.parametrize(
    "state",
    ["idle", exhaustive("busy")],
)
def test_a_killed_parent_leaves_no_orphan(state: str, tmp_path: Path) -> None:
    root, answer = str(Path(__file__).parents[2]), tmp_path / "pids"
    with answer.open("w") as stdout:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, state],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            cwd=root,
            env=os.environ | {"PYTHONPATH": root, "TMPDIR": str(tmp_path)},
        )
    pids: list[int] = []
    try:
        wait_for(lambda: answer.read_text().endswith("\n"), "the pids of the ranks")
        pids = [int(pid) for pid in answer.read_text().split()]
        assert len(pids) == N and all(is_running(pid) for pid in pids)
        time.sleep(0.5)
        parent.kill()
        parent.wait()
        assert survivors(pids) == []
    finally:
        parent.kill()
        for pid in survivors(pids, patience_s=0):
            os.kill(pid, signal.SIGKILL)


def test_a_failure_carries_what_the_failing_rank_reported_last(shared: RankPool) -> None:
    """Not what rank 0 did, which may be ahead of it."""
    with pytest.raises(RankError) as caught:
        shared.run(jobs.report_then_fail, 1)
    assert (caught.value.rank, caught.value.progress) == (1, "before the fall of 1")
