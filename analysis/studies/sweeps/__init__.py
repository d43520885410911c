"""The cost of a long sweep: one command that simulates 500 points, polled while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sp_bench.analysis.runs import Runs
from sp_bench.resources import ROOT

AXES = {
    "heads": "32,64",
    "causal": "true,false",
    "seqlen": "64k,128k,256k,512k,1M",
    "gpus": "8,16,32,64,128",
    "method": "ring,striped,mesh,tokenring,startrail",
}
"""The axes of the sweep, from the slowest to the fastest varying."""
MARKS = (1, 100, 200, 300, 400, 500)
POLL_S = 0.1


class Seen(NamedTuple):
    """The state of the command at one moment."""

    seconds: float
    """Seconds since the start of the command."""
    points: int
    cpu_s: float
    """CPU seconds of its process."""
    rss_mb: float


def command(folder: Path) -> list[str]:
    """The command line of the sweep, with its records in `folder`."""
    axes = [f"{key}={values}" for key, values in AXES.items()]
    return [sys.executable, "-m", "sp_bench", "-m", "mode=simulate", *axes, "logger=none", f"results_dir={folder}"]


def watch(folder: Path) -> list[Seen]:
    """Run the sweep and poll its state until it ends. Raises RuntimeError if it fails."""
    started, seen = time.monotonic(), []
    with subprocess.Popen(command(folder), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            if rss_mb := _rss_mb(process.pid):
                seen.append(Seen(time.monotonic() - started, _records(folder), _cpu_s(process.pid), rss_mb))
    if process.returncode:
        raise RuntimeError(f"the sweep ended with {process.returncode}")
    return seen


def _rss_mb(pid: int) -> float:
    """Resident memory in MB; 0 once the process has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def _cpu_s(pid: int) -> float:
    """CPU seconds of all threads, in user and system mode."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _records(folder: Path) -> int:
    return sum(1 for name in os.listdir(folder) if name.endswith(".json") and name.count(".") == 1)


COMMAND = f"python -m sp_bench -m mode=simulate {' '.join(f'{key}={values}' for key, values in AXES.items())}"


@cache
def seen(_: Runs) -> list[Seen]:
    """The states of the command, from its start to its end."""
    with tempfile.TemporaryDirectory() as folder:
        return watch(Path(folder))


def _at(runs: Runs) -> dict[int, Seen]:
    return {mark: next(one for one in seen(runs) if one.points >= mark) for mark in MARKS}


def summary(runs: Runs) -> str:
    """The cost of a point in words."""
    at = _at(runs)
    first, last = at[MARKS[0]], at[MARKS[-1]]
    points = last.points - first.points
    each_s, each_cpu_s = (last.seconds - first.seconds) / points, (last.cpu_s - first.cpu_s) / points
    return (
        f"{last.points} points in {seen(runs)[-1].seconds:.0f} s. After start-up ({first.seconds:.1f} s, of CPU "
        f"{first.cpu_s:.1f} s) a point took {each_s:.3f} s, of CPU {each_cpu_s:.3f} s. From point 100 to the last the "
        f"memory changed by {last.rss_mb - at[100].rss_mb:+.1f} MB.\n\n{os.cpu_count()} cores, with a load of "
        f"{os.getloadavg()[1]:.1f} over the last five minutes: the seconds include the effect of other work on these "
        "cores, the CPU seconds don't."
    )


def rows(runs: Runs) -> list[dict[str, object]]:
    """The state at each of MARKS."""
    return [
        {
            "points": one.points,
            "s since the start": f"{one.seconds:.1f}",
            "CPU s": f"{one.cpu_s:.1f}",
            "resident memory": f"{one.rss_mb:.0f} MB",
        }
        for one in _at(runs).values()
    ]
