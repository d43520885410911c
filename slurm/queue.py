"""SLURM's queue: sbatch, squeue and scancel."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sp_bench.errors import RequestError
from sp_bench.slurm.settings import Settings

QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
"""States of squeue in which a task waits. In all other states that squeue shows, it runs."""


class SlurmError(RequestError):
    """SLURM does not answer, or refuses a command."""


def refuse_without_slurm(settings: Settings) -> None:
    """Raise SlurmError if no controller answers."""
    _output(settings, "sinfo", "--noheader")


def submit(settings: Settings, script: Path, array: str) -> int:
    """Submit a script as a job array; return the job's id. Raises SlurmError."""
    return int(_output(settings, "sbatch", "--parsable", f"--array={array}", str(script)).split(";")[0])


def waiting_and_running(settings: Settings, jobs: Sequence[int]) -> tuple[set[int], set[int]]:
    """The numbers of the jobs' array tasks that wait, and of those that run. Raises SlurmError."""
    waiting: set[int] = set()
    running: set[int] = set()
    if not jobs:
        return waiting, running
    # squeue --jobs fails for jobs that have ended.
    lines = _output(settings, "squeue", "--noheader", "--array", "--user", str(os.getuid()), "--format=%F %K %T")
    for job, task, state in (line.split() for line in lines.splitlines()):
        if int(job) in jobs and task.isdigit():
            (waiting if state in QUEUED else running).add(int(task))
    return waiting, running


def cancel(settings: Settings, jobs: Sequence[int]) -> None:
    """Cancel jobs. Raises SlurmError."""
    if jobs:
        _output(settings, "scancel", "--quiet", *map(str, jobs))


def _output(settings: Settings, *command: str) -> str:
    """The output of one of SLURM's commands. Raises SlurmError if it fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
    conf = str(settings.variables.get("SLURM_CONF") or os.environ.get("SLURM_CONF") or "")
    environment |= {"SLURM_CONF": conf} if conf else {}
    if conf and not Path(conf).exists():
        would_work = "slurm=NAME for another cluster, or slurm/testcluster up, would work"
        raise SlurmError(f"SLURM_CONF={conf}", "there is no such file", would_work)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(
            command[0], f"can't be run ({error})", "a machine from which SLURM takes jobs would work"
        ) from None
    if done.returncode:
        why = done.stderr.strip().replace("\n", "; ")
        raise SlurmError(" ".join(command), why, "conf/slurm/ has the options of the jobs")
    return done.stdout
