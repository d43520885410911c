"""The cost of simulating: `python -m benchmarks.simulator_speed [--largest]` writes docs/results/simulator_speed.*.

The wall time and the peak memory of a point are those of its whole command, `python -m sp_bench method=... gpus=...`,
in a process of its own: start-up, tile search if any, proof and account, forward + backward, record and trace. Both
sides of a ratio are from one run. The same task graphs are solved by the compiled solver and by the same functions in
plain Python, and simulated with one rank of each kind and with all ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pandas as pd
import seaborn as sns

from benchmarks.reports import RESULTS, about
from sp_bench.bench import resolve
from sp_bench.cli.compose import Composer
from sp_bench.markdown import of_rows
from sp_bench.plan.method import Method
from sp_bench.simulate import simulate
from sp_bench.simulate.flows import Solver, solve
from sp_bench.simulate.graph import build_graph

METHODS = ("ring", "mesh", "ulysses", "usp", "startrail", "tokenring", "double_ring", "all_gather", "pass_q", "zigzag")
SIZES = (16, 64, 256)
LARGE, LARGEST = (("ring", 1024), ("mesh", 1024)), (("ring", 4096), ("mesh", 4096))
TWINS = (("ring", 16), ("mesh", 16), ("ring", 64), ("mesh", 64))
"""Points whose graphs of all ranks the plain Python solver solves too."""
SEQLEN, LONG = "1M", "4M"
"""The sequence length, and the one for 1024 GPUs or more."""


class Cost(NamedTuple):
    """The wall time and the peak memory of one command."""

    wall_s: float
    peak_mb: float


def overrides(method: str, gpus: int) -> list[str]:
    """The overrides of a point: a method and a size. Methods that split heads get as many heads as GPUs."""
    seqlen = LONG if gpus >= 1024 else SEQLEN
    heads = [f"heads={max(32, gpus)}"] if method == "ulysses" else []
    return [f"method={method}", f"gpus={gpus}", f"seqlen={seqlen}", "baseline=null", "logger=none", *heads]


def command_cost(method: str, gpus: int) -> Cost:
    """Run a point by its command. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sp_bench", *overrides(method, gpus), f"results_dir={folder}"]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}")
    return Cost(wall_s, usage.ru_maxrss / 1024)


def timed(call, *arguments, **named) -> float:
    """Seconds of the faster of two calls."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        call(*arguments, **named)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def ratios(method: str, gpus: int) -> dict[str, object]:
    """Ratios for a method's forward: both solvers on the graph of all ranks, and all ranks over one of each kind."""
    with Composer() as composer:
        request = resolve(composer.compose(overrides(method, gpus)))
    assert isinstance(request.method, Method)
    chosen = request.method.candidates(request.problem)[-1]
    problem, cluster = chosen.dealt(request.problem), request.cluster
    plan = chosen.plan(problem, "forward", cluster.profile(problem))
    whole, kinds = (build_graph(plan, problem, cluster, use_symmetry=use).tasks for use in (False, True))
    engines: tuple[Solver, Solver] = ("python", "numba")
    python_s, numba_s = (timed(solve, whole, solver) for solver in engines)
    all_s, one_s = (timed(simulate, plan, problem, cluster, use_symmetry=use) for use in (False, True))
    return {
        "point": f"{method} {chosen.variant(gpus)}, {gpus} GPUs, forward".replace(" ,", ","),
        "tasks": whole.delay_s.size,
        "Python / numba": f"{python_s / numba_s:.0f}",
        "tasks, one rank of a kind": kinds.delay_s.size,
        "all / one of a kind": f"{all_s / one_s:.1f}",
    }


def plot(costs: pd.DataFrame, path: Path) -> None:
    """Plot the wall time over the number of GPUs, both axes logarithmic."""
    matplotlib.use("Agg")
    sns.set_theme(style="whitegrid", context="paper", palette="colorblind")
    grid = sns.relplot(
        costs, x="gpus", y="wall_s", hue="method", style="method", markers=True, dashes=False, kind="line",
        height=4, aspect=1.5,
    )  # fmt: skip
    sizes = sorted(costs["gpus"].unique())
    grid.set(xscale="log", yscale="log", xlabel="simulated GPUs", ylabel="wall time of the command (s)")
    grid.ax.set_xticks(sizes, [str(size) for size in sizes])
    grid.ax.minorticks_off()
    grid.ax.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    grid.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", action="store_true", help="add 4096 GPUs")
    points = [(method, gpus) for method in METHODS for gpus in SIZES] + [*LARGE]
    points += LARGEST if parser.parse_args().largest else ()
    rows = []
    for method, gpus in points:
        cost = command_cost(method, gpus)
        rows.append({"method": method, "gpus": gpus, "wall_s": cost.wall_s, "peak_mb": cost.peak_mb})
        print(f"{method:>12} {gpus:>5} {cost.wall_s:>8.2f} s {cost.peak_mb:>6.0f} MB", flush=True)
    plot(pd.DataFrame(rows), RESULTS / "simulator_speed.svg")
    shown = [row | {"wall_s": f"{row['wall_s']:.2f}", "peak_mb": f"{row['peak_mb']:.0f}"} for row in rows]
    twins = of_rows([ratios(method, gpus) for method, gpus in TWINS])
    text = f"""# The cost of simulating

Made by `python -m benchmarks.simulator_speed --largest` on {os.cpu_count()} cores.

{about(__doc__)}

{of_rows(shown)}

![wall time over GPUs](simulator_speed.svg)

Ratios:

{twins}
"""
    (RESULTS / "simulator_speed.md").write_text(text)
    print(twins)


if __name__ == "__main__":
    main()
