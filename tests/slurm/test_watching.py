"""The progress of a sweep and its view, with a queue that says what the test says."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sp_bench.errors import RequestError
from sp_bench.slurm import queue, watching
from sp_bench.slurm.folder import Sweep
from sp_bench.slurm.points import Refused
from sp_bench.slurm.progress import progress
from sp_bench.slurm.queue import TaskState
from sp_bench.slurm.stopped import stopped
from sp_bench.slurm.sweep import asked_for, main
from tests.support.made_records import made

POINTS = ["sweep=cpu_methods", "method=ring,mesh", "gpus=2,4,2048", "seqlen=512,1k", "heads=4"]


def no_answer(*command: object) -> str:
    raise queue.SlurmError("sacct", "Slurm accounting storage is disabled", "an accounting would work")


class Queue:
    """The numbers of the tasks that wait and run; None: SLURM does not answer."""

    def __init__(self) -> None:
        self.answers: list[tuple[set[int], set[int]] | dict[int, TaskState] | None] = []

    def __call__(self, *_: object) -> dict[int, TaskState]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise queue.SlurmError("squeue", "no answer", "a controller would work")
        if isinstance(answer, dict):
            return answer
        waiting, running = answer
        return {n: said(n, "PENDING", "Priority") for n in waiting} | {n: said(n, "RUNNING") for n in running}


def said(number: int, state: str, reason: str = "None", **more: Any) -> TaskState:
    return TaskState(job=7, number=number, state=state, reason=reason, **more)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Queue:
    asked = Queue()
    monkeypatch.setattr(queue, "tasks", asked)
    monkeypatch.setattr(queue, "_output", no_answer)
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    return asked


@pytest.fixture(scope="module")
def asked() -> tuple[Sweep, list[Refused]]:
    return asked_for(POINTS)


@pytest.fixture
def sweep(asked: tuple[Sweep, list[Refused]], tmp_path: Path) -> Sweep:
    """Four tasks of two points, and four points that were refused, submitted at second 1000."""
    found, refused = replace(asked[0], folder=tmp_path / "sweep"), asked[1]
    found.write(refused)
    found.add_job(7, found.tasks)
    os.utime(found.folder / "jobs.json", (1000, 1000))
    return found


def finish(sweep: Sweep, number: int, at_s: float, status: str = "ok") -> None:
    """Write the records of a task's points, as if they had been finished then."""
    for k, point in enumerate(sweep.tasks[number].points):
        error = None if status == "ok" else "rank 1: died"
        sweep.refuse(point, made(f"task{number}-{k}", status=status, error=error, gpus=sweep.tasks[number].gpus))
        os.utime(sweep.folder / "points" / f"{point.id}.json", (at_s, at_s))


def drawn(sweep: Sweep, now_s: float) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(watching.view(sweep, progress(sweep, now_s)))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_states_by_gpus(sweep: Sweep, slurm: Queue) -> None:
    slurm.answers = [({3}, {2})]
    finish(sweep, 0, 1100)
    finish(sweep, 1, 1200, "failed")
    found = progress(sweep, 1300)
    assert found.line == "12 points: 2 done, 2 running, 2 pending, 2 failed, 4 unsupported"
    by_gpus = {gpus: dict(counts) for gpus, counts in found.by_gpus.items()}
    assert by_gpus.pop(2048) == {"unsupported": 4}
    assert sum(sum(counts.values()) for counts in by_gpus.values()) == 8
    assert not found.over


def test_the_time_left_is_at_the_rate_since_the_first_of_two_tasks(sweep: Sweep, slurm: Queue) -> None:
    slurm.answers = [({3}, {2})]
    finish(sweep, 0, 1100)
    assert progress(sweep, 1150).left_s is None
    finish(sweep, 1, 1200)
    assert progress(sweep, 1200).left_s == pytest.approx(4 * 100 / 2)
    assert progress(sweep, 1400).left_s == pytest.approx(4 * 300 / 2), "nothing has finished since"
    os.utime(sweep.folder / "jobs.json", (1150, 1150))
    assert progress(sweep, 1400).left_s is None, "tasks of an earlier submission tell nothing"


def test_the_view_says_what_runs_and_what_failed(sweep: Sweep, slurm: Queue) -> None:
    slurm.answers = [({3}, {2})]
    finish(sweep, 0, 1100)
    finish(sweep, 1, 1200, "failed")
    text = drawn(sweep, 1300)
    assert "cpu_methods  6 of 12 points finished, about 7 min left at the present rate" in text
    assert "running: ring, mesh on 4 GPUs, seqlen 512, forward + backward" in text
    assert text.count("rank 1: died") == 2
    slurm.answers = [({2, 3}, set())]
    assert "waiting in the queue" in drawn(sweep, 1300)


def test_watching_ends_with_the_last_job(sweep: Sweep, slurm: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    """A controller that is silent for a while ends nothing."""
    slurm.answers = [({2, 3}, {0, 1}), None, ({3}, {2}), (set(), set())]
    out = io.StringIO()
    for number in range(4):
        finish(sweep, number, 1100 + number)
    assert watching.watch(sweep, Console(file=out, force_terminal=True, width=110)) == 0
    assert "12 of 12 points finished, no job is left" in out.getvalue()
    assert f"records: {sweep.records}" in capsys.readouterr().out


def test_without_a_terminal_it_prints_lines(sweep: Sweep, slurm: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.answers = [({0, 1, 2}, {3}), ({0, 1, 2}, {3}), (set(), set())]
    assert main(["status", str(sweep.folder), "--watch"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "12 points: 0 done, 2 running, 6 pending, 0 failed, 4 unsupported",
        "12 points: 0 done, 0 running, 0 pending, 8 failed, 4 unsupported",
    ]


def test_a_controller_that_stays_silent(sweep: Sweep, slurm: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PATIENCE_S", 0.05)
    slurm.answers = [None]
    with pytest.raises(RequestError, match="no answer"):
        watching.follow(sweep)


ENDS = {
    "TIMEOUT (TimeLimit), signal 15": (said(0, "TIMEOUT", "TimeLimit", exit_code=-15), "", "resume {f} slurm.time="),
    "FAILED (NonZeroExitCode), exit code 143, within 90 s of its time limit": (
        said(0, "FAILED", "NonZeroExitCode", exit_code=143, left_s=40.0), "", "resume {f} slurm.time=00:20:00",
    ),
    "FAILED (NonZeroExitCode), exit code 137, within 90 s of its time limit": (
        said(0, "FAILED", "NonZeroExitCode", exit_code=137, left_s=40.0),
        "sp_bench: ended by SIGTERM; finished points are kept",
        "resume {f} slurm.time=00:20:00",
    ),
    "OUT_OF_MEMORY (OutOfMemory), signal 9, killed for its memory": (
        said(0, "OUT_OF_MEMORY", "OutOfMemory", exit_code=-9), "", "resume {f} slurm.mem=0",
    ),
    "FAILED (NonZeroExitCode), exit code 137, killed for its memory": (
        said(0, "FAILED", "NonZeroExitCode", exit_code=137, left_s=900.0),
        "error: Detected 1 oom_kill event in StepId=7.0", "resume {f} slurm.mem=0",
    ),
    "FAILED (NonZeroExitCode), exit code 1": (
        said(0, "FAILED", "NonZeroExitCode", exit_code=1, left_s=900.0), "No module named torch", "resume {f}",
    ),
    "PENDING (JobHeldUser)": (said(0, "PENDING", "JobHeldUser"), "", "scontrol release 7_0"),
    "REQUEUE_HOLD (launch_failed_requeued_held), requeued 2x": (
        said(0, "REQUEUE_HOLD", "launch_failed_requeued_held", restarts=2), "", "scontrol release 7_0",
    ),
    "PENDING (AssocGrpGRES)": (said(0, "PENDING", "AssocGrpGRES"), "", "scontrol show job 7_0"),
    "PENDING (Priority)": (said(0, "PENDING", "Priority"), "", "nothing, SLURM starts it"),
}  # fmt: skip


@pytest.mark.parametrize("why", ENDS)
def test_a_task_that_does_not_run_says_why_and_what_to_do(why: str, sweep: Sweep) -> None:
    state, log, then = ENDS[why]
    (sweep.folder / "logs" / "7_0.txt").write_text(f"begins\n{log}\n\n")
    (stop,) = stopped(sweep, {0: state} | {n: said(n, "RUNNING") for n in (1, 2, 3)})
    assert stop.why == why
    assert (stop.points, stop.ids) == (2, ["7_0"])
    assert then.format(f=sweep.folder) in stop.next
    assert stop.stuck == (state.waits and state.reason != "Priority")
    if log:
        assert stop.log == (sweep.folder / "logs" / "7_0.txt", log)


def test_tasks_with_one_reason_are_one_paragraph(sweep: Sweep) -> None:
    held = {n: said(n, "PENDING", "JobHeldUser") for n in (0, 1, 3)}
    (stop,) = stopped(sweep, held | {2: said(2, "RUNNING")})
    assert stop.lines == [
        "PENDING (JobHeldUser): 3 tasks, 6 points",
        "  7_[0-1,3]: ring, mesh on 2 GPUs, seqlen 512, forward + backward and 2 others",
        "  next: scontrol release '7_[0-1,3]'",
    ]


@pytest.mark.parametrize("accounting", [True, False])
def test_tasks_that_squeue_has_forgotten(accounting: bool, sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accounting knows them; without one the log is left."""
    lines = "7_0|CANCELLED by 1000|0:15|12|60|None\n7_1|NODE_FAIL|1:0|9|UNLIMITED|None\n7_[2-3]|PENDING|0:0|0|60|None\n"
    monkeypatch.setattr(queue, "_output", (lambda *_: lines) if accounting else no_answer)
    (sweep.folder / "logs" / "7_0.txt").write_text("CANCELLED AT noon DUE TO PREEMPTION\n")
    found = stopped(sweep, {n: said(n, "RUNNING") for n in (2, 3)})
    known = ["CANCELLED, signal 15", "NODE_FAIL, exit code 1"]
    assert [stop.why for stop in found] == (known if accounting else ["unknown to SLURM by now"])
    assert found[0].log == (sweep.folder / "logs" / "7_0.txt", "CANCELLED AT noon DUE TO PREEMPTION")


def test_a_held_task_is_told_while_one_waits(sweep: Sweep, slurm: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing would ever happen, and a follower would never know."""
    slurm.answers = [{n: said(n, "PENDING", "JobHeldUser") for n in range(4)}, {}]
    assert watching.follow(sweep) == 1
    out = capsys.readouterr().out
    assert out.index("next: scontrol release '7_[0-3]'") < out.index("8 failed")


@pytest.mark.parametrize(
    ("left", "seconds"), [("0:50", 50), ("9:59", 599), ("1-02:03:04", 93784), ("INVALID", 0), ("UNLIMITED", None)]
)
def test_time_left(left: str, seconds: float | None) -> None:
    assert queue.seconds(left) == seconds


@pytest.mark.parametrize(
    ("seconds", "words"), [(40, "40 s"), (720, "12 min"), (12000, "3 h 20 min"), (187200, "2 d 4 h")]
)
def test_durations(seconds: float, words: str) -> None:
    assert watching.duration(seconds) == words
