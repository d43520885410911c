"""The cost of simulating: `python -m benchmarks.simulator_speed [--largest | --asymmetric]` writes
docs/results/simulator_speed.*, the second of them its last section alone.

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
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pandas as pd
import seaborn as sns

from benchmarks.reports import RESULTS, about
from sp_bench.bench import resolve
from sp_bench.cli.compose import Composer
from sp_bench.markdown import of_rows
from sp_bench.methods import REGISTRY
from sp_bench.plan.method import Method
from sp_bench.records import read_all
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


HEADING = "## Where no two ranks are alike"
ABOUT_ASYMMETRIC = """
Made by `python -m benchmarks.simulator_speed --asymmetric`. With jitter, and with documents, all ranks are simulated.
User CPU seconds are those of the whole command, in which every variant and layout of a method that `auto` stands for is
bounded or simulated. A dealing that doesn't fit a GPU's memory has no time: with whole documents, the chunk of the
longest one is many times as long as others.
"""
JITTER_SIZES = (64, 256)
EVERY_METHOD = tuple(name for name in REGISTRY if name != "reference")
DOCUMENTED = ("ring", "mesh", "usp", "ulysses")
"""The methods whose every dealing of documents is timed."""
PACK = ("mask=document", "data=magi_attention", "gpus=256", "seqlen=512k")


class Cost(NamedTuple):
    """What one command takes."""

    wall_s: float
    peak_mb: float
    cpu_s: float
    """User CPU seconds."""


def overrides(method: str, gpus: int) -> list[str]:
    """The overrides of a point: a method and a size. Methods that split heads get as many heads as GPUs."""
    seqlen = LONG if gpus >= 1024 else SEQLEN
    heads = [f"heads={max(32, gpus)}"] if method == "ulysses" else []
    return [f"method={method}", f"gpus={gpus}", f"seqlen={seqlen}", "baseline=null", "logger=none", *heads]


class DoesNotFit(RuntimeError):
    """A point that no GPU has the memory for."""


def command_cost(keys: Sequence[str]) -> Cost:
    """Run a point by its command. Raises DoesNotFit where memory is too small, RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sp_bench", *keys, f"results_dir={folder}"]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started
        if status:
            oom = any(record.status == "oom" for record in read_all(Path(folder)))
            raise (DoesNotFit if oom else RuntimeError)(f"{' '.join(command)} ended with status {status}")
    return Cost(wall_s, usage.ru_maxrss / 1024, usage.ru_utime)


def with_jitter(method: str, gpus: int) -> list[str]:
    """The overrides of a point with jitter, with as many heads as GPUs, for which pass_q has memory on short chunks."""
    shape = [f"heads={gpus}", f"kv_heads={gpus}", "seqlen=256k"]
    return [f"method={method}", f"gpus={gpus}", *shape, "stragglers.jitter=0.05", "baseline=null", "logger=none"]


def dealt(method: str, dealing: str) -> list[str]:
    """The overrides of a point with documents, dealt in one way."""
    heads = ["heads=256", "kv_heads=256"] if method == "ulysses" else []
    return [f"method={method}", f"method.layout={dealing}", *PACK, *heads, "baseline=null", "logger=none"]


def asymmetric() -> str:
    """The section on points where no two ranks are alike."""
    jitter = [("jitter", f"{gpus}", with_jitter(method, gpus)) for method in EVERY_METHOD for gpus in JITTER_SIZES]
    usp = ["method=usp", "gpus=64", "kv_heads=2", "batch=2", "stragglers.jitter=0.05", "baseline=null", "logger=none"]
    jitter.append(("jitter", "64, 2 key heads, batch 2", usp))
    packs = [
        ("documents", f"256, {dealing}", dealt(method, dealing))
        for method in DOCUMENTED
        for dealing in REGISTRY[method].dealings()
    ]
    rows = []
    for what, gpus, keys in (*jitter, *packs):
        rows.append({"method": keys[0].removeprefix("method="), "with": what, "GPUs": gpus})
        try:
            cost = command_cost(keys)
        except DoesNotFit:
            rows[-1] |= {"user CPU s": "doesn't fit", "wall_s": "-", "peak_mb": "-"}
        else:
            wall_s, peak_mb = f"{cost.wall_s:.1f}", f"{cost.peak_mb:.0f}"
            rows[-1] |= {"user CPU s": f"{cost.cpu_s:.1f}", "wall_s": wall_s, "peak_mb": peak_mb}
        print(" | ".join(rows[-1].values()), flush=True)
    return f"{HEADING}\n{ABOUT_ASYMMETRIC}\n{of_rows(rows)}\n"


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
    parser.add_argument("--asymmetric", action="store_true", help="only the points where no two ranks are alike")
    asked, page = parser.parse_args(), RESULTS / "simulator_speed.md"
    before, _, last = page.read_text().partition(HEADING)
    if asked.asymmetric:
        page.write_text(before.rstrip() + "\n\n" + asymmetric())
        return
    points = [(method, gpus) for method in METHODS for gpus in SIZES] + [*LARGE]
    points += LARGEST if asked.largest else ()
    rows = []
    for method, gpus in points:
        cost = command_cost(overrides(method, gpus))
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
    page.write_text(f"{text}\n{HEADING}{last}" if last else text)
    print(twins)


if __name__ == "__main__":
    main()
