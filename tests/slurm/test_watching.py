"""The progress of a sweep and its view, with a queue that says what the test says."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from sp_bench.errors import RequestError
from sp_bench.slurm import queue, watching
from sp_bench.slurm.folder import Sweep
from sp_bench.slurm.progress import progress
from sp_bench.slurm.sweep import asked_for, main
from tests.support.made_records import made

POINTS = ["sweep=cpu_methods", "method=ring,mesh", "gpus=2,4,2048", "seqlen=512,1k", "heads=4"]


class Queue:
    """The numbers of the tasks that wait and run; None: SLURM does not answer."""

    def __init__(self) -> None:
        self.answers: list[tuple[set[int], set[int]] | None] = []

    def __call__(self, *_: object) -> tuple[set[int], set[int]]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise queue.SlurmError("squeue", "no answer", "a controller would work")
        return answer


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Queue:
    asked = Queue()
    monkeypatch.setattr(queue, "waiting_and_running", asked)
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    return asked


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Four tasks of two points, and four points that were refused, submitted at second 1000."""
    found, refused = asked_for([*POINTS, f"folder={tmp_path}/sweep"])
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


@pytest.mark.parametrize(
    ("seconds", "words"), [(40, "40 s"), (720, "12 min"), (12000, "3 h 20 min"), (187200, "2 d 4 h")]
)
def test_durations(seconds: float, words: str) -> None:
    assert watching.duration(seconds) == words
