"""Why tasks of a sweep don't run, by SLURM's own words, and the command that goes on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sp_bench.slurm import queue
from sp_bench.slurm.folder import Sweep
from sp_bench.slurm.points import Task
from sp_bench.slurm.queue import TaskState
from sp_bench.slurm.scripts import TERM_S, in_short

STARTS_BY_ITSELF = {"None", "Priority", "Resources", "JobArrayTaskLimit", "BeginTime", "Dependency"}
"""Reasons for which a task waits until SLURM starts it."""
NODES_ARE_OUT = re.compile("ReqNodeNotAvail|NodeDown|Partition(Down|Inactive)|.*DOWN|.*DRAINED")
OUT_OF_MEMORY = re.compile("exceeded (job |step )?memory limit|oom[-_]kill|out-of-memory handler", re.IGNORECASE)
"""The line in the log of a task that SLURM has killed for its memory."""
FORGOTTEN = "unknown to SLURM by now"
END_OF_LOG = 4096
TELLING = (re.compile("DUE TO "), OUT_OF_MEMORY, re.compile("Error: |ended by SIG"))
"""Words of a log's telling line, the best first. srun writes several lines after it."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Tasks with points to run that don't run, for one reason."""

    why: str
    """SLURM's state and reason, and the exit code."""
    tasks: Sequence[Task]
    ids: Sequence[str]
    """Their names in SLURM, such as 12_[0-3,7]; one for each job."""
    points: int
    log: tuple[Path, str] | None
    """The log of the first task, and the line that tells most."""
    next: str
    """The command that goes on."""
    waits: bool
    stuck: bool
    """Whether they wait and don't start by themselves."""

    @property
    def lines(self) -> list[str]:
        """The text: why, which tasks, the log and the next command."""
        text = [f"{self.why}: {_count(len(self.tasks), 'task')}, {_count(self.points, 'point')}"]
        more = f" and {_count(len(self.tasks) - 1, 'other')}" if len(self.tasks) > 1 else ""
        text += [f"  {' '.join(self.ids)}: {described(self.tasks[0])}{more}"] if self.ids else []
        if self.log:
            path, last = self.log
            text += [f"  log:  {_short(path)}", *([f"        {last}"] if last else [])]
        return [*text, f"  next: {self.next}"]


def described(task: Task) -> str:
    """A task in words: its methods, GPUs, tokens and phase."""
    config = task.points[0].config
    methods = ", ".join(dict.fromkeys(point.config["method"]["name"] for point in task.points))
    return f"{methods} on {task.gpus} GPUs, seqlen {config['seqlen']}, {str(config['phase']).replace('_', ' + ')}"


def stopped(sweep: Sweep, in_slurm: Mapping[int, TaskState]) -> list[Stopped]:
    """The tasks with points to run that don't run, by reason. `in_slurm` is what squeue says of tasks, by number."""
    running = {number for number, said in in_slurm.items() if said.runs}
    todo = [task for task in sweep.tasks if task.number not in running and sweep.missing(task)]
    return _by_reason(sweep, _states(sweep, in_slurm, todo), todo)


def stuck(sweep: Sweep, in_slurm: Mapping[int, TaskState]) -> list[Stopped]:
    """Those of `stopped` that wait and don't start by themselves. Accounting isn't asked, and no log is read."""
    waiting = {number: said for number, said in in_slurm.items() if said.waits}
    todo = [task for task in sweep.tasks if task.number in waiting and sweep.missing(task)]
    return [stop for stop in _by_reason(sweep, waiting, todo) if stop.stuck]


def _by_reason(sweep: Sweep, states: Mapping[int, TaskState], todo: Sequence[Task]) -> list[Stopped]:
    groups: dict[tuple[str, str], list[Task]] = {}
    for task in todo:
        said = states.get(task.number)
        log = _text(sweep, said)
        groups.setdefault((_why(said, log), _next(sweep, said, log)), []).append(task)
    return [_stopped(sweep, states, why, then, tasks) for (why, then), tasks in groups.items()]


def _states(sweep: Sweep, in_slurm: Mapping[int, TaskState], todo: Sequence[Task]) -> dict[int, TaskState]:
    """The tasks' states; accounting is asked for those that squeue has forgotten."""
    newest = {number: job for job, numbers in sorted(sweep.jobs.items()) for number in numbers}
    states = {number: said for number, said in in_slurm.items() if newest.get(number) == said.job}
    forgotten = {newest[task.number] for task in todo if task.number in newest and task.number not in states}
    of_jobs = queue.accounted(sweep.settings, sorted(forgotten)) if forgotten else ()
    states |= {said.number: said for said in of_jobs if newest.get(said.number) == said.job}
    for task in todo:
        if (job := newest.get(task.number)) is not None and task.number not in states:
            states[task.number] = TaskState(job=job, number=task.number, state=FORGOTTEN, reason="None")
    return states


def _stopped(sweep: Sweep, states: Mapping[int, TaskState], why: str, then: str, tasks: Sequence[Task]) -> Stopped:
    known = [states[task.number] for task in tasks if task.number in states]
    logs = [path for said in known if (path := _log(sweep, said)).exists()]
    waits = bool(known) and known[0].waits
    ids = _ids(known)
    return Stopped(
        why=why,
        tasks=tasks,
        ids=ids,
        points=sum(len(sweep.missing(task)) for task in tasks),
        log=(logs[0], _telling_line(_end_of(logs[0]))) if logs and not waits else None,
        next=then.format(ids=" ".join(map(shlex.quote, ids))),
        waits=waits,
        stuck=waits and known[0].reason not in STARTS_BY_ITSELF,
    )


def _why(said: TaskState | None, log: str) -> str:
    if said is None:
        return "never submitted"
    reason = f" ({said.reason})" if said.reason not in ("None", "") else ""
    code = said.exit_code
    ended = "" if not code else f", exit code {code}" if code > 0 else f", signal {-code}"
    again = f", requeued {said.restarts}x" if said.restarts else ""
    memory = ", killed for its memory" if _memory(said, log) else ""
    limit = (
        f", within {TERM_S + 60} s of its time limit" if _at_its_limit(said, log) and said.state != "TIMEOUT" else ""
    )
    return f"{said.state}{reason}{ended}{again}{memory}{limit}"


def _next(sweep: Sweep, said: TaskState | None, log: str) -> str:
    """The command that goes on; {ids} stands for the tasks."""
    resume = f"python -m slurm.sweep resume {shlex.quote(_short(sweep.folder))}"
    if said is None:
        return resume
    if said.waits:
        return _next_of_waiting(said)
    if _at_its_limit(said, log):
        return f"{resume} slurm.time={_twice(sweep.settings.time)}"
    if _memory(said, log):
        whole = str(sweep.settings.mem) == "0"
        return "a shorter seqlen=; these tasks have all of a node's memory" if whole else f"{resume} slurm.mem=0"
    return resume


def _next_of_waiting(said: TaskState) -> str:
    if said.state != "PENDING" or said.reason in ("JobHeldUser", "launch_failed_requeued_held"):
        return "scontrol release {ids}"
    if said.reason == "JobHeldAdmin":
        return "ask an administrator for scontrol release {ids}"
    if NODES_ARE_OUT.match(said.reason):
        return "sinfo --list-reasons (starts when the nodes are back)"
    if said.reason in STARTS_BY_ITSELF:
        return "nothing, SLURM starts it; squeue --start tells when"
    return f"scontrol show job {said.job}_{said.number}"


def _at_its_limit(said: TaskState, log: str) -> bool:
    """Whether SLURM ended it for its time, or sent the SIGTERM that comes up to 60 s earlier than TERM_S before."""
    told = said.state == "FAILED" and (said.exit_code in (143, -15) or "ended by SIGTERM" in log)
    return said.state == "TIMEOUT" or (told and said.left_s is not None and said.left_s <= TERM_S + 60)


def _memory(said: TaskState, log: str) -> bool:
    return not said.waits and (said.state == "OUT_OF_MEMORY" or bool(OUT_OF_MEMORY.search(log)))


def _log(sweep: Sweep, said: TaskState) -> Path:
    return sweep.folder / "logs" / f"{said.job}_{said.number}.txt"


def _text(sweep: Sweep, said: TaskState | None) -> str:
    return "" if said is None or said.waits else _end_of(_log(sweep, said))


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - END_OF_LOG))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _telling_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = (line for pattern in TELLING for line in reversed(lines) if pattern.search(line))
    return next(telling, lines[-1] if lines else "")


def _ids(states: Sequence[TaskState]) -> list[str]:
    jobs: dict[int, list[int]] = {}
    for said in states:
        jobs.setdefault(said.job, []).append(said.number)
    return [f"{job}_{of[0]}" if len(of) == 1 else f"{job}_[{in_short(of)}]" for job, of in jobs.items()]


def _twice(limit: str) -> str:
    """Twice a time limit of the form hours:minutes:seconds; of another form a word to replace."""
    total = 2 * (queue.seconds(limit) or 0)
    return f"{total // 3600:02d}:{total // 60 % 60:02d}:{total % 60:02d}" if total else "LONGER"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _short(path: Path) -> str:
    """The path, from the working directory if it is below."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
