"""SLURM's queue: sbatch, squeue, sacct and scancel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sp_bench.errors import RequestError
from sp_bench.slurm.settings import Settings

QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
"""States in which a task waits."""
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
ENDED |= {"REVOKED", "TIMEOUT"}
"""States in which it is over. In all others it runs."""
SQUEUE = ("ArrayJobID", "ArrayTaskID", "State", "exit_code", "restartcnt", "TimeLeft")
SACCT = ("JobID", "State", "ExitCode", "ElapsedRaw", "TimelimitRaw", "Reason")


@dataclass(frozen=True, kw_only=True)
class TaskState:
    """The state of an array task, as SLURM reports it."""

    job: int
    number: int
    """The task's number in its array and in the sweep."""
    state: str
    """SLURM's own word, such as PENDING."""
    reason: str
    """SLURM's own word; None where it gives none."""
    exit_code: int = 0
    """The exit code of the script; -15 if signal 15 ended it."""
    restarts: int = 0
    left_s: float | None = None
    """Seconds of the time limit that are left; None if it has none."""

    @property
    def waits(self) -> bool:
        """Whether it waits in the queue."""
        return self.state in QUEUED

    @property
    def runs(self) -> bool:
        """Whether it runs, or is being cleaned up."""
        return not self.waits and self.state not in ENDED


class SlurmError(RequestError):
    """SLURM does not answer, or refuses a command."""


def refuse_without_slurm(settings: Settings) -> None:
    """Raise SlurmError if no controller answers."""
    _output(settings, "sinfo", "--noheader")


def submit(settings: Settings, script: Path, array: str) -> int:
    """Submit a script as a job array; return the job's id. Raises SlurmError."""
    return int(_output(settings, "sbatch", "--parsable", f"--array={array}", str(script)).split(";")[0])


def tasks(settings: Settings, jobs: Sequence[int]) -> dict[int, TaskState]:
    """The state of the jobs' array tasks by number, in the newest job of each: those that wait, run, or ended lately.

    Raises SlurmError.
    """
    if not jobs:
        return {}
    # squeue --jobs fails for jobs that it has forgotten.
    fields = ",".join(f"{field}:24" for field in SQUEUE) + ",Reason:256"
    command = ("squeue", "--noheader", "--array", "--states=all", "--user", str(os.getuid()), f"--Format={fields}")
    states: dict[int, TaskState] = {}
    for line in _output(settings, *command).splitlines():
        job, number, state, status, restarts, left, reason = line.split(maxsplit=len(SQUEUE))
        if int(job) not in jobs or not number.isdigit():
            continue
        if (before := states.get(int(number))) is None or before.job < int(job):
            states[int(number)] = TaskState(
                job=int(job),
                number=int(number),
                state=state,
                reason=reason.strip(),
                exit_code=os.waitstatus_to_exitcode(int(status)),
                restarts=int(restarts),
                left_s=seconds(left),
            )
    return states


def accounted(settings: Settings, jobs: Sequence[int]) -> Iterator[TaskState]:
    """The jobs' array tasks that have ended, by the cluster's accounting; none where it keeps none."""
    command = ("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(map(str, jobs))}")
    try:
        lines = _output(settings, *command, f"--format={','.join(SACCT)}").splitlines()
    except SlurmError:
        return
    for line in lines:
        name, state, code, elapsed_s, limit_min, reason = line.split("|")
        job, _, number = name.partition("_")
        if number.isdigit():
            status, _, signal = code.partition(":")
            yield TaskState(
                job=int(job),
                number=int(number),
                state=state.split()[0],  # CANCELLED by 1000
                reason=reason,
                exit_code=-int(signal) if int(signal) else int(status),
                left_s=60.0 * int(limit_min) - int(elapsed_s) if limit_min.isdigit() else None,
            )


def seconds(text: str) -> int | None:
    """The seconds of SLURM's days-hours:minutes:seconds; None for UNLIMITED. INVALID is beyond the limit."""
    if text == "INVALID":
        return 0
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not match:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return 86400 * days + 3600 * hours + 60 * minutes + rest


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
        would_work = "slurm=NAME for another cluster, or python -m tests.slurm.testcluster up, would work"
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
