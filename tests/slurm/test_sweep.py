"""Sweeps on a real SLURM: ranks on its nodes, arrays of points, and what is done once and only once."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from sp_bench import records
from sp_bench.resources import ROOT
from sp_bench.slurm import queue
from sp_bench.slurm.folder import Sweep
from sp_bench.slurm.sweep import main
from sp_bench.slurm.watching import watch
from tests.slurm import testcluster
from tests.slurm.testcluster import SlurmBox
from tests.support import processes

POINT = ["cluster=local", "dtype=float32", "heads=4", "head_dim=16", "warmup=1", "logger=none"]
SRUN = ["srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", f"--chdir={ROOT}"]
SRUN += [sys.executable, "-m", "sp_bench", *POINT]
"""The command line on two nodes with two ranks each."""
PATIENCE_S = 300.0
wait_for = partial(processes.wait_for, patience_s=PATIENCE_S, every_s=0.2)


def srun(box: SlurmBox, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The records that came out of it."""
    command, environment = [*SRUN, *arguments], box.environment()
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.long
def test_ranks_of_a_step(box: SlurmBox, tmp_path: Path) -> None:
    """One command line of four speaks, and its record has the ranks of each node."""
    done = srun(box, "method=mesh", "gpus=4", "seqlen=256", "baseline=null", "iters=3", f"results_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Measured on 4 ranks: srun has started them") == 1
    (record,) = records.read_all(tmp_path)
    assert (record.status, record.mode, record.nodes) == ("ok", "measure", 2)
    assert record.provenance
    assert sorted(record.provenance["ranks_by_host"].values()) == [[0, 1], [2, 3]]


@pytest.mark.long
def test_a_step_of_other_ranks_is_refused(box: SlurmBox, tmp_path: Path) -> None:
    done = srun(box, "gpus=8", "seqlen=256", f"results_dir={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.count("sp_bench: gpus=8: srun has started 4 ranks; gpus=4, or mode=simulate, would work") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_rank_of_a_step_that_dies(box: SlurmBox, tmp_path: Path) -> None:
    """Its point says which rank and why, and the other point is measured with new ranks."""
    command = [*SRUN, "iters=150", "method=mesh", "gpus=4", "seqlen=512", "timeout_s=30", f"results_dir={tmp_path}"]
    with subprocess.Popen(
        command, env=box.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as step:
        wait_for(lambda: len(ranks_of(box)) == 4, "four ranks to start")
        time.sleep(1)  # let them begin
        os.kill(ranks_of(box)[2], signal.SIGKILL)
        out, _ = step.communicate(timeout=PATIENCE_S)
    assert step.returncode == 1, out
    by_status = {record.status: record for record in records.read_all(tmp_path)}
    assert set(by_status) == {"failed", "ok"}
    assert re.match(r"rank \d: died: killed by SIGKILL", by_status["failed"].error or ""), by_status["failed"].error


def ranks_of(box: SlurmBox) -> list[int]:
    """The processes of ranks: what fork servers have forked."""
    below = testcluster._descendants(box._pids("slurmstepd"))
    return testcluster._descendants(
        pid for pid in below if b"multiprocessing.forkserver" in testcluster._arguments_and_environment(pid)
    )


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("/proc/sweep", "folder=/proc/sweep: can't be made"),
        ("{tmp_path}", "folder={tmp_path}: has a sweep already; python -m slurm.sweep resume {tmp_path}"),
    ],
)
def test_folders_that_are_refused(
    box: SlurmBox, folder: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is submitted."""
    (tmp_path / "sweep.json").touch()
    asked = ["sweep=cpu_methods", "method=ring", "gpus=2", f"slurm.variables.SLURM_CONF={box.conf}"]
    assert main([*asked, f"folder={folder.format(tmp_path=tmp_path)}"]) == 2
    assert message.format(tmp_path=tmp_path) in capsys.readouterr().err
    assert "cpu_methods" not in box.run("squeue", "--noheader", "--format=%j")


class Run:
    """A sweep of ring and mesh on 2 and 4 ranks at two lengths, and on more ranks than there are tokens."""

    def __init__(self, box: SlurmBox, folder: Path, *changes: str, gpus: str = "2,4,2048") -> None:
        self.box, self.folder = box, folder
        keys = {"method": "ring,mesh", "gpus": gpus, "seqlen": "512,1k", "heads": "4", "iters": "10"}
        keys |= {"folder": str(folder), "slurm.variables.SLURM_CONF": str(box.conf), "slurm.python": sys.executable}
        keys |= {"slurm.most_at_once": "1"} | dict(change.split("=", 1) for change in changes)
        assert main(["sweep=cpu_methods", *(f"{key}={value}" for key, value in keys.items())]) == 0
        self.sweep = Sweep.read(folder)

    def running(self) -> dict[str, int]:
        """SLURM's own id of each array task that runs, by job and task."""
        return self._in("RUNNING")

    def waiting(self) -> dict[str, int]:
        """The same for those that wait."""
        return self._in("PENDING")

    def ended(self) -> bool:
        """Whether no task is left."""
        return not self.waiting() and not self.running()

    def logs(self) -> list[Path]:
        """The output of tasks."""
        return list((self.folder / "logs").iterdir())

    def _in(self, state: str) -> dict[str, int]:
        lines = self.box.run("squeue", "--noheader", "--array", f"--states={state}", "--format=%F_%K %A").splitlines()
        return {task: int(own) for task, own in map(str.split, lines)}

    def done(self) -> dict[str, float]:
        """When each finished point's record was written, by run_id."""
        paths = {r.run_id: self.sweep.records / f"{r.run_id}.json" for r in records.read_all(self.sweep.records)}
        return {run_id: path.stat().st_mtime for run_id, path in paths.items()}


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_sweep_that_is_disturbed(box: SlurmBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A task is cancelled, a node fails, the controller restarts: what was not done is done, and nothing twice."""
    run = Run(box, tmp_path / "sweep")
    found = re.search(r"0 done, (\d+) running, (\d+) pending, 0 failed, 4 unsupported", capsys.readouterr().out)
    assert found, "points of 2048 ranks have been refused already"
    assert int(found[1]) + int(found[2]) == 8
    wait_for(lambda: len(run.running()) == 2, "one task of each array to run")
    cancelled, failed = sorted(run.running())
    box.run("scancel", cancelled)
    (node,) = box.run("squeue", "--noheader", f"--jobs={failed}", "--format=%N").split()
    box.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    box.restart_controller()
    wait_for(lambda: box.nodes()[node] in ("idle", "mixed"), "the node to come back")
    assert failed in run.waiting(), "SLURM runs a task again whose node has failed"
    box.start_soon(failed)
    assert main(["status", str(run.folder)]) == 0
    assert "12 points" in capsys.readouterr().out
    assert main(["resume", str(run.folder)]) == 0
    assert [int(cancelled.partition("_")[2])] in list(run.sweep.jobs.values())[2:]
    assert len(run.sweep.jobs) == 3, "what is queued is not submitted again"
    before = run.done()
    # A step that is asked for as the controller goes away has been seen to wait for two and a half minutes.
    wait_for(run.ended, "all tasks to end", patience_s=3 * PATIENCE_S)
    assert main(["status", str(run.folder), "--wait"]) == 0
    assert "12 points: 8 done, 0 running, 0 pending, 0 failed, 4 unsupported" in capsys.readouterr().out

    frame = records.load(run.sweep.records)
    assert len(frame) == 12
    assert not frame.duplicated(["method", "gpus", "seqlen"]).any()
    assert frame.status.value_counts().to_dict() == {"ok": 8, "unsupported": 4}
    assert {run_id: run.done()[run_id] for run_id in before} == before, "nothing was run twice"
    assert main(["resume", str(run.folder)]) == 0
    assert len(run.sweep.jobs) == 3, "nothing is left to submit"


@pytest.mark.long
def test_a_sweep_that_is_cancelled(box: SlurmBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its processes end, too, and leave nothing behind."""
    run = Run(box, tmp_path / "sweep")
    wait_for(lambda: len(processes_of(run.folder)) >= 6, "two tasks to run")
    assert main(["cancel", str(run.folder), "--wait"]) == 1
    assert "12 points: 0 done, 0 running, 0 pending, 8 failed, 4 unsupported" in capsys.readouterr().out
    assert {said.state for said in queue.tasks(run.sweep.settings, list(run.sweep.jobs)).values()} == {"CANCELLED"}
    wait_for(lambda: not processes_of(run.folder), "its processes to end")
    assert not [path for path in (run.folder / "logs").iterdir() if "Traceback" in path.read_text()]


@pytest.mark.long
def test_a_sweep_that_is_watched(box: SlurmBox, tmp_path: Path) -> None:
    """In a terminal the view goes from what waits to what is done; the time left is there once two tasks are."""
    run = Run(box, tmp_path / "sweep", gpus="2,4")
    out = io.StringIO()
    assert watch(run.sweep, Console(file=out, force_terminal=True, width=120)) == 0
    seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "running: ring, mesh on" in seen
    assert re.search(r"[24] of 8 points finished", seen)
    assert "left at the present rate" in seen
    assert "8 of 8 points finished, no job is left" in seen
    assert len(run.done()) == 8


@pytest.mark.long
def test_a_task_that_is_told_to_end(box: SlurmBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By SIGTERM, as before its time limit: it leaves in order, and a resume runs what it has left."""
    run = Run(box, tmp_path / "sweep", gpus="2")
    wait_for(lambda: run.running() and run.logs(), "a task to have a log")
    wait_for(lambda: len(ranks_of(box)) >= 2, "its ranks to start")
    told = min(run.running())
    box.run("scancel", "--signal=TERM", told)
    wait_for(lambda: told not in run.running(), "it to end")
    wait_for(run.ended, "the other tasks to end")
    assert [log for log in run.logs() if "sp_bench: ended by SIGTERM; finished points are kept" in log.read_text()]
    assert not [log for log in run.logs() if "Traceback" in log.read_text()]
    wait_for(lambda: not processes_of(run.folder), "its processes to end")
    before = run.done()
    assert len(before) == 2, "of the other task"
    capsys.readouterr()
    assert main(["resume", str(run.folder), "--wait"]) == 0
    assert "4 points: 4 done, 0 running, 0 pending, 0 failed, 0 unsupported" in capsys.readouterr().out
    assert {run_id: run.done()[run_id] for run_id in before} == before


@pytest.mark.long
def test_an_array_by_hand(box: SlurmBox, tmp_path: Path) -> None:
    """slurm/array.sbatch does the same, with keys of one's own behind it."""
    (tmp_path / "results").mkdir()
    options = ["--parsable", "--array=0-1", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--cpus-per-task=1"]
    options.append(f"--chdir={tmp_path}")
    command = ["sbatch", *options, str(ROOT / "slurm" / "array.sbatch"), *POINT, "iters=3"]
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "SEQLENS": "128 256", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=box.environment() | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not box.run("squeue", "--noheader", "--format=%A"), "the array to end")
    found = [(r.method, r.gpus, r.seqlen, r.status, r.nodes) for r in records.read_all(tmp_path / "results")]
    said = "".join(path.read_text() for path in (tmp_path / "results").glob("*.txt"))
    assert sorted(found) == [(m, 2, s, "ok", 2) for m in ("mesh", "ring") for s in (128, 256)], said


@pytest.mark.timeout(600)
@pytest.mark.long
def test_tasks_that_do_not_run(box: SlurmBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held, preempted and cancelled or requeued, of a drained node: each says so, and goes on as it says."""
    run = Run(
        box, tmp_path / "sweep", "seqlen=256,512,1k,2k", "slurm.most_at_once=null", "slurm.sbatch=[--hold]", gpus="2"
    )
    (job,) = run.sweep.jobs
    box.run("scontrol", "update", "nodename=n3", "state=drain", "reason=a fan")
    try:
        for number, (partition, node) in enumerate((("cancelled", "n1"), ("requeued", "n2"), ("box", "n3"))):
            box.run("scontrol", "update", f"jobid={job}_{number}", f"partition={partition}", f"reqnodelist={node}")
            box.run("scontrol", "release", f"{job}_{number}")
        wait_for(lambda: len(run.running()) == 2, "two to run")
        for node in ("n1", "n2"):
            urgent = ["--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null", "--wrap=true"]
            box.run("sbatch", *urgent)
        wait_for(lambda: not run.running(), "them to be preempted")
        said = ""

        def is_settled() -> bool:
            """Whether accounting knows of the preempted task, and the scheduler has looked at the drained node's."""
            nonlocal said
            capsys.readouterr()
            assert main(["status", str(run.folder)]) == 0
            said = capsys.readouterr().out
            return "0 running" in said and "2 failed" in said and "UnavailableNodes:n3" in said

        wait_for(is_settled, "status to say so")
    finally:
        box.run("scontrol", "update", "nodename=n3", "state=resume")
    print(said)
    assert said.startswith("8 points: 0 done, 0 running, 6 pending, 2 failed, 0 unsupported\n")
    resume = f"python -m slurm.sweep resume {run.folder}"
    for name, why, then in (
        (f"{job}_0", "PREEMPTED", resume),
        (f"{job}_1", "PENDING (BeginTime), requeued 1x", "nothing, SLURM starts it"),
        (f"{job}_2", "PENDING (ReqNodeNotAvail, UnavailableNodes:n3)", "sinfo --list-reasons"),
        (f"{job}_3", "PENDING (JobHeldUser)", f"scontrol release {job}_3"),
    ):
        assert re.search(
            rf"^{re.escape(why)}.*: 1 task, 2 points\n  {name}: .*\n(  log: .*\n.*\n)?  next: {re.escape(then)}",
            said,
            re.M,
        ), why
    assert re.search(rf"log:  {run.folder}/logs/{job}_0.txt\n +.*DUE TO PREEMPTION", said)
    box.start_soon(f"{job}_1")
    box.run("scancel", f"{job}_2", f"{job}_3")
    wait_for(lambda: not run.sweep.missing(run.sweep.tasks[1]), "the requeued task to be done, with no resume")
    assert main(["resume", str(run.folder), "slurm.sbatch=[]"]) == 0
    assert [*run.sweep.jobs.values()][1:] == [[0, 2, 3]]
    assert main(["cancel", str(run.folder), "--wait"]) == 1


@pytest.mark.long
def test_a_task_at_its_time_limit(box: SlurmBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["method=ring", "seqlen=16k", "iters=1000", "slurm.time=00:01:00"]
    run = Run(box, tmp_path / "sweep", *keys, gpus="2")
    assert main(["status", str(run.folder), "--wait"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"TIMEOUT|FAILED .*, within 90 s of its time limit", said)
    assert f"next: python -m slurm.sweep resume {run.folder} slurm.time=00:02:00" in said


@pytest.mark.long
def test_a_task_that_is_killed_for_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By SLURM's own watch; cgroups, where its state would be OUT_OF_MEMORY, can't be written in a container."""
    watched = (
        "JobAcctGatherType=jobacct_gather/linux\nJobAcctGatherFrequency=task=1\nJobAcctGatherParams=OverMemoryKill\n"
    )
    template = tmp_path / "slurm.conf"
    template.write_text(testcluster.SLURM_CONF.read_text().replace("CR_Core\n", f"CR_Core_Memory\n{watched}"))
    monkeypatch.setattr(testcluster, "SLURM_CONF", template)
    own = SlurmBox(tmp_path / "own", hosts=[testcluster.Host(name="m1")])
    own.up()
    try:
        run = Run(own, tmp_path / "sweep", "method=ring", "seqlen=512", "slurm.mem=60", gpus="2")
        assert main(["status", str(run.folder), "--wait"]) == 1
        said = capsys.readouterr().out
        assert re.search(r"FAILED .*, killed for its memory: 1 task, 1 point", said), said
        assert f"next: python -m slurm.sweep resume {run.folder} slurm.mem=0" in said
        assert main(["resume", str(run.folder), "slurm.mem=0"]) == 0
        assert "MinMemoryNode=0" in own.run("scontrol", "show", "job", str(max(run.sweep.jobs)))
    finally:
        own.down()
    assert str(Sweep.read(run.folder).settings.mem) == "0"


def processes_of(folder: Path) -> list[str]:
    """The command lines of processes that were told a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"slurm.task {folder}" in line and path.parent.name != str(os.getpid()):
            found.append(line)
    return found
