"""The cost of a long sweep: `python -m benchmarks.sweep_scale` writes docs/results/sweeps.md.

One command, `python -m sp_bench -m mode=simulate ...`, simulates 500 points in a process of its own. Its memory and the
records in its folder are polled every tenth of a second. Start-up is the time until the first record: Python, the
composition of all points, and the first point itself. Points are simulated in the order of the table, so each stretch
has small and large ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.reports import RESULTS, about
from sp_bench.markdown import of_rows

ROOT = Path(__file__).resolve().parent.parent
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
    started, found = time.monotonic(), []
    with subprocess.Popen(command(folder), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            if rss_mb := _rss_mb(process.pid):
                found.append(Seen(time.monotonic() - started, _records(folder), _cpu_s(process.pid), rss_mb))
    if process.returncode:
        raise RuntimeError(f"the sweep ended with {process.returncode}")
    return found


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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = watch(Path(folder))
    first = next(seen for seen in found if seen.points)
    at = {mark: next(seen for seen in found if seen.points >= mark) for mark in MARKS}
    last = at[MARKS[-1]]
    rows = [
        {
            "points": seen.points,
            "s since the start": f"{seen.seconds:.1f}",
            "CPU s": f"{seen.cpu_s:.1f}",
            "resident memory": f"{seen.rss_mb:.0f} MB",
        }
        for seen in at.values()
    ]
    points = last.points - first.points
    each_s, each_cpu_s = (last.seconds - first.seconds) / points, (last.cpu_s - first.cpu_s) / points
    summary = (
        f"{last.points} points in {found[-1].seconds:.0f} s. After start-up ({first.seconds:.1f} s, of CPU "
        f"{first.cpu_s:.1f} s) a point took {each_s:.3f} s, of CPU {each_cpu_s:.3f} s. From point 100 to the last the "
        f"memory changed by {last.rss_mb - at[100].rss_mb:+.1f} MB.\n\n{os.cpu_count()} cores, with a load of "
        f"{os.getloadavg()[1]:.1f} over the last five minutes: the seconds include the effect of other work on these "
        "cores, the CPU seconds don't."
    )
    print(summary)
    print(of_rows(rows))
    (RESULTS / "sweeps.md").write_text(f"""# The cost of a long sweep

Made by `python -m benchmarks.sweep_scale`.

{about(__doc__)}

    python -m sp_bench -m mode=simulate {" ".join(f"{key}={values}" for key, values in AXES.items())}

{summary}

{of_rows(rows)}
""")


if __name__ == "__main__":
    main()
