"""What is asked of SLURM: sbatch, squeue and scancel."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sp_bench.errors import RequestError
from sp_bench.slurm.settings import Settings

QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
"""States of squeue in which a task waits to run; in all others that squeue shows it runs."""


class SlurmError(RequestError):
    """SLURM can't be asked, or refuses."""


def refuse_without_slurm(settings: Settings) -> None:
    """Raise SlurmError where no controller answers."""
    _asked(settings, "sinfo", "--noheader")


def submit(settings: Settings, script: Path, array: str) -> int:
    """The id of a new job that runs a script as an array. Raises SlurmError."""
    return int(_asked(settings, "sbatch", "--parsable", f"--array={array}", str(script)).split(";")[0])


def waiting_and_running(settings: Settings, jobs: Sequence[int]) -> tuple[set[int], set[int]]:
    """The array tasks of some jobs that wait, and those that run. Raises SlurmError."""
    waiting: set[int] = set()
    running: set[int] = set()
    if not jobs:
        return waiting, running
    # Asked for by their ids, jobs that have ended are an error.
    lines = _asked(settings, "squeue", "--noheader", "--array", "--user", str(os.getuid()), "--format=%F %K %T")
    for job, task, state in (line.split() for line in lines.splitlines()):
        if int(job) in jobs and task.isdigit():
            (waiting if state in QUEUED else running).add(int(task))
    return waiting, running


def cancel(settings: Settings, jobs: Sequence[int]) -> None:
    """End all of some jobs that have not ended. Raises SlurmError."""
    if jobs:
        _asked(settings, "scancel", "--quiet", *map(str, jobs))


def _asked(settings: Settings, *command: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
    conf = settings.variables.get("SLURM_CONF") or os.environ.get("SLURM_CONF")
    environment |= {"SLURM_CONF": conf} if conf else {}
    if conf and not Path(conf).exists():
        would_work = "slurm=NAME for another cluster, or slurm/testcluster up, would work"
        raise SlurmError(f"SLURM_CONF={conf}", "there is no such file", would_work)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(command[0], f"can't be run ({error})", "a machine from which SLURM takes jobs would") from None
    if done.returncode:
        told = done.stderr.strip().replace("\n", "; ")
        raise SlurmError(" ".join(command), told, "see conf/slurm/ for what is asked of SLURM")
    return done.stdout
