"""A sweep of five methods on 2, 4 and 8 CPU ranks as SLURM job arrays, disturbed, resumed and complete.

    python -m benchmarks.slurm_sweep [FOLDER]

Starts a SLURM in a box (slurm/testcluster.py) whose four nodes take 2 ranks each, submits conf/sweep/cpu_methods.yaml,
cancels an array task, takes a node down, restarts the controller, resumes, and checks that each of the 30 points is
there once. Then a second sweep has a time limit of two minutes, which one of its two points can't keep. Needs root and
the Debian packages slurm-wlm and munge; takes minutes on two cores.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sp_bench import records
from sp_bench.slurm.folder import Sweep
from sp_bench.slurm.sweep import main as sweep_main
from sp_bench.slurm.testcluster import SlurmBox


def disturb(box: SlurmBox) -> None:
    """Cancel one of the running tasks, take down the node of another, and restart the controller."""
    _wait_for(lambda: len(_tasks(box, "RUNNING")) >= 2)
    (cancelled, _, _), *_, (_, _, node) = _tasks(box, "RUNNING")
    box.run("scancel", cancelled)
    box.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    box.restart_controller()
    print(f"cancelled task {cancelled}, took down node {node}, restarted the controller")
    _wait_for(lambda: box.nodes()[node] in ("idle", "mixed", "allocated"))
    for _, job, _ in _tasks(box, "PENDING"):
        with contextlib.suppress(subprocess.CalledProcessError):  # it may have started meanwhile
            # SLURM would wait two minutes before it reruns the tasks of the node.
            box.run("scontrol", "update", f"jobid={job}", "starttime=now")


def run_into_the_limit(box: SlurmBox, folder: Path, settings: list[str]) -> bool:
    """Whether a task ends in order at SLURM's time limit, the other's point is kept, and resume submits the first."""
    keys = ["sweep=cpu_methods", "method=ring", "gpus=2", "seqlen=512,16k", "iters=100", "slurm.time=00:02:00"]
    sweep_main([*keys, f"folder={folder}", *settings])
    sweep_main(["status", str(folder), "--wait"])
    sweep = Sweep.read(folder)
    told = [log.name for log in sweep.folder.glob("logs/*") if "ended by SIGTERM; finished" in log.read_text()]
    kept = [record.seqlen for record in records.read_all(sweep.records)]
    sweep_main(["resume", str(folder)])
    again = list(sweep.jobs.values())[1:]
    sweep_main(["cancel", str(folder), "--wait"])
    print(f"time limit: {len(told)} task told to end, kept seqlen {kept}, submitted again tasks {again}")
    return len(told) == 1 and kept == [512] and again == [[1]]


def _tasks(box: SlurmBox, state: str) -> list[tuple[str, ...]]:
    """The array tasks in a state: JOB_TASK, SLURM's own id, and the first node of each."""
    lines = box.run("squeue", "--noheader", "--array", f"--states={state}", "--format=%F_%K %A %B").splitlines()
    return sorted(tuple(line.split()) for line in lines)


def _wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.2)


def main() -> int:
    """Run both sweeps; returns 0 if each point of the first has one ok record, and the second ends as it must."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="sp_bench-sweep-"))
    box = SlurmBox(folder / "box", gpus_per_node=2)
    box.up()
    try:
        started = time.monotonic()
        settings = [f"slurm.variables.SLURM_CONF={box.conf}", f"slurm.python={sys.executable}"]
        sweep_main(["sweep=cpu_methods", f"folder={folder}/sweep", "slurm.gpus_per_node=2", *settings])
        disturb(box)
        sweep_main(["status", f"{folder}/sweep", "--wait"])
        sweep_main(["resume", f"{folder}/sweep", "--wait"])
        print(f"{time.monotonic() - started:.0f} s in all")
        limited = run_into_the_limit(box, folder / "limited", settings)
    finally:
        box.down()
    sweep = Sweep.read(folder / "sweep")
    frame = records.load(sweep.records)
    print(frame.pivot_table(index=["gpus", "nodes", "seqlen"], columns="method", values="step_ms_median").round(1))
    whole = len(frame) == len(sweep.points) and not frame.duplicated(["method", "gpus", "seqlen"]).any()
    print(f"{len(frame)} records of {len(sweep.points)} points, {(frame.status == 'ok').sum()} ok")
    return 0 if whole and limited and (frame.status == "ok").all() else 1


if __name__ == "__main__":
    sys.exit(main())
