"""Processes killed at random moments. trials=30, parents=4 and seed=0 say how many are killed, and which."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sp_bench import records
from sp_bench.analysis.runs import Runs
from sp_bench.methods import REGISTRY
from sp_bench.resources import ROOT

OPTIONS = {"trials": "30", "parents": "4", "seed": "0"}
MARK = "SP_BENCH_TRIAL"
TIMEOUT_S = 10.0
"""The command's timeout for silent ranks."""
GRACE_S = 30.0
"""The time that a command may need to end beyond TIMEOUT_S."""
GONE_S = 20.0
"""The time in which the last helper processes must be gone after the command's end."""
POINT = "cluster=local dtype=float32 heads=4 head_dim=16 seqlen=1k iters=10 warmup=1 baseline=null logger=none"


class Trial(NamedTuple):
    """The process to kill, and the moment."""

    method: str
    n: int
    victim: int | None
    """The rank to kill; None for the parent of the ranks."""
    moment: float
    """The moment of the kill, as a share of an undisturbed run from the start of its ranks."""


class Ended(NamedTuple):
    """The outcome of a trial."""

    delay_s: float
    """Seconds from the start of the ranks to the kill."""
    met: bool
    """Whether the command was still running."""
    ended_s: float
    """Seconds from the kill to the end of the command."""
    code: int
    said: str
    """The status and error of the record."""
    orphans: int
    again: str
    """The status of the next run."""

    def fault(self, trial: Trial) -> str | None:
        """The fault of the outcome in words; None if there is none."""
        if self.orphans:
            return f"{self.orphans} processes left"
        if self.again != "ok":
            return f"the next run: {self.again}"
        if not self.met or (self.said == "ok" and self.code == 0):
            return None
        if trial.victim is None:
            right = self.code == -signal.SIGKILL and self.said in ("no record", "ok")
        else:
            right = self.code == 1 and self.said == f"failed: rank {trial.victim}: died: killed by SIGKILL"
        return None if right else f"exit code {self.code}, {self.said}"

    @property
    def late(self) -> bool:
        """Whether the kill came after the last work of the point."""
        return not self.met or self.said == "ok"


class Command:
    """`python -m sp_bench`, running one point in a session of its own."""

    def __init__(self, method: str, n: int, folder: Path) -> None:
        self.n, self.mark = n, uuid.uuid4().hex
        keys = [*POINT.split(), f"method={method}", f"gpus={n}", f"timeout_s={TIMEOUT_S}", f"results_dir={folder}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sp_bench", *keys],
            cwd=ROOT,
            env=os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ranks(self) -> list[int]:
        """The process ids of its ranks in order, once all have started; empty if the command ends before."""
        while self.process.poll() is None:
            servers = _servers(self.process.pid)
            pids = [pid for pid, parent in _forked() if parent in servers] if servers else []
            if len(pids) == self.n:
                return sorted(pids)
            time.sleep(0.005)
        return []

    def left(self) -> list[int]:
        """Its processes that are left GONE_S after its end."""
        deadline = time.monotonic() + GONE_S
        while (pids := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return pids


def _forked() -> Iterator[tuple[int, int]]:
    """The ids of all running processes and of their parents."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                yield int(path.parent.name), int(parent)


def _having(file: str, part: str) -> Iterator[tuple[int, int]]:
    """The ids of running processes that have this part in their file of /proc, and of their parents."""
    for pid, parent in _forked():
        with suppress(OSError):
            if part.encode() in Path(f"/proc/{pid}/{file}").read_bytes():
                yield pid, parent


def _servers(pid: int) -> list[int]:
    """The fork servers of a process."""
    return [child for child, parent in _having("cmdline", "multiprocessing.forkserver") if parent == pid]


def marked(mark: str) -> list[int]:
    """The ids of all processes with this mark in their environment."""
    return [pid for pid, _ in _having("environ", f"{MARK}={mark}")]


@contextmanager
def running(method: str, n: int, folder: Path) -> Iterator[Command]:
    """A running command, whose processes are killed on leaving."""
    command = Command(method, n, folder)
    try:
        yield command
    finally:
        with suppress(ProcessLookupError):
            os.killpg(command.process.pid, signal.SIGKILL)
        command.process.wait()


def undisturbed_s(method: str, n: int) -> float:
    """Seconds from the start of the ranks to the end of an undisturbed command. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder, running(method, n, Path(folder)) as command:
        command.ranks()
        started = time.monotonic()
        if command.process.wait() or _said(Path(folder)) != "ok":
            raise RuntimeError(f"{method}: {_said(Path(folder))}")
        return time.monotonic() - started


def run(trial: Trial, lasts_s: float) -> Ended:
    """Run a trial; `lasts_s` is the length of an undisturbed run of its method."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(trial.method, trial.n, folder) as command:
            ranks = command.ranks()
            if not ranks:
                raise RuntimeError(f"{trial.method}: the command has ended before its ranks were there")
            delay_s = trial.moment * lasts_s
            time.sleep(delay_s)
            met = command.process.poll() is None
            with suppress(ProcessLookupError):
                os.kill(command.process.pid if trial.victim is None else ranks[trial.victim], signal.SIGKILL)
            killed = time.monotonic()
            try:
                code = command.process.wait(TIMEOUT_S + GRACE_S)
            except subprocess.TimeoutExpired:
                code = 124
            ended_s = time.monotonic() - killed
            said, orphans = _said(folder), len(command.left())
        with running(trial.method, trial.n, folder) as command:
            again = _said(folder) if command.process.wait() == 0 else "failed"
    return Ended(delay_s=delay_s, met=met, ended_s=ended_s, code=code, said=said, orphans=orphans, again=again)


def _said(folder: Path) -> str:
    """The status and error of the record in a folder."""
    in_folder = records.read_all(folder)
    if not in_folder:
        return "no record"
    return "; ".join(f"{record.status}: {record.error}" if record.error else record.status for record in in_folder)


def trials(seed: int, parent: bool = False) -> Iterator[Trial]:
    """Endless trials, over all methods in turn."""
    draw = random.Random(f"{seed} {parent}")
    while True:
        for method in draw.sample(sorted(REGISTRY), len(REGISTRY)):
            n = 1 if method == "reference" else 4
            victim = None if parent else draw.randrange(n)
            yield Trial(method=method, n=n, victim=victim, moment=draw.random())


def row(trial: Trial, ended: Ended, lasts_s: float) -> dict[str, object]:
    """The row of a trial."""
    return {
        "method": trial.method,
        "killed": "the parent" if trial.victim is None else f"rank {trial.victim} of {trial.n}",
        "after": f"{ended.delay_s:.2f} s of {lasts_s:.2f}",
        "the record says": ended.said,
        "exit code": ended.code,
        "ended after": f"{ended.ended_s:.2f} s",
        "processes left": ended.orphans,
        "next run": ended.again,
    }


COMMAND = f"python -m sp_bench method=... gpus=4 timeout_s={TIMEOUT_S:g} {POINT}"
Made = list[tuple[Trial, Ended, float]]
"""Trials, their outcomes, and the seconds of an undisturbed run."""


@cache
def found(runs: Runs) -> Made:
    """All trials; their faults are added to what has failed."""
    ranks, parents, seed = (int(runs.options[key]) for key in OPTIONS)
    made = [*drawn(seed, ranks), *drawn(seed, parents, parent=True)]
    runs.failed += [f"{trial}: {fault}" for trial, ended, _ in made if (fault := ended.fault(trial))]
    return made


def drawn(seed: int, wanted: int, *, parent: bool = False) -> Made:
    """Trials until `wanted` of them have killed in time or gone wrong."""
    made: Made = []
    lasts_s: dict[str, float] = {}
    for trial in trials(seed, parent):
        if sum(not ended.late or bool(ended.fault(trial)) for trial, ended, _ in made) >= wanted:
            break
        if trial.method not in lasts_s:
            lasts_s[trial.method] = undisturbed_s(trial.method, trial.n)
        made.append((trial, run(trial, lasts_s[trial.method]), lasts_s[trial.method]))
        print(*row(*made[-1]).values(), sep="  ", flush=True)
    return made


def summary(runs: Runs) -> str:
    """The number of kills, how many went wrong, and how long commands took to end."""
    made = found(runs)
    kills = [one for one in made if not one[1].late]
    ended_s = [ended.ended_s for trial, ended, _ in kills if trial.victim is not None]
    return (
        f"{len(ended_s)} kills of ranks and {len(kills) - len(ended_s)} of parents, drawn from seed "
        f"{runs.options['seed']}; {len(made) - len(kills)} more came after the last work. {len(runs.failed) or 'None'} "
        f"went wrong. After the kill of a rank the command ended in {min(ended_s):.2f} to {max(ended_s):.2f} s. "
        f"{os.cpu_count()} cores, shared with other work."
    )


def rows(runs: Runs) -> list[dict[str, object]]:
    """A row for each kill in time."""
    return [row(*one) for one in found(runs) if not one[1].late]
