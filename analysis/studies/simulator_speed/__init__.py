"""The cost of simulating: whole commands, both solvers, and points where no two ranks are alike.

What was timed is kept in the folder of records, a file for each table; without a file its table is timed again.

before=CHECKOUT    another checkout of this repository, whose commands run in turn with this one's
largest=false      leaves out 4096 GPUs
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from sp_bench.analysis import earlier
from sp_bench.analysis.figure import Figure, new_figure, styles
from sp_bench.analysis.runs import Runs
from sp_bench.cli.compose import Composer
from sp_bench.methods import REGISTRY
from sp_bench.plan.method import Method
from sp_bench.point import resolve
from sp_bench.records import read_all
from sp_bench.resources import ROOT
from sp_bench.simulate import simulate
from sp_bench.simulate.flows import Solver, solve
from sp_bench.simulate.graph import build_graph

OPTIONS = {"before": "", "largest": "true"}
METHODS = ("ring", "mesh", "ulysses", "usp", "startrail", "tokenring", "double_ring", "all_gather", "pass_q", "zigzag")
SIZES = (16, 64, 256)
LARGE, LARGEST = (("ring", 1024), ("mesh", 1024)), (("ring", 4096), ("mesh", 4096))
TWINS = (("ring", 16), ("mesh", 16), ("ring", 64), ("mesh", 64))
"""Points whose graphs of all ranks the plain Python solver solves too."""
TIMES = 3
"""How often a command is run, but for those of LARGEST."""
SEQLEN, LONG = "1M", "4M"
"""The sequence length, and the one for 1024 GPUs or more."""
JITTER_SIZES = (64, 256)
EVERY_METHOD = tuple(name for name in REGISTRY if name != "reference")
DOCUMENTED = ("ring", "mesh", "usp", "ulysses")
"""The methods whose every layout of documents is timed."""
PACK = ("mask=document", "data=magi_attention", "gpus=256", "seqlen=512k")


COMMON = ("baseline=null", "logger=none")


class Cost(NamedTuple):
    """The cost of one command: wall time, peak memory and user CPU time."""

    wall_s: float
    peak_mb: float
    cpu_s: float


def overrides(method: str, gpus: int) -> list[str]:
    """The overrides of a point: a method and a size. Methods that split heads get as many heads as GPUs."""
    heads = [f"heads={max(32, gpus)}"] if method == "ulysses" else []
    return [f"method={method}", f"gpus={gpus}", f"seqlen={LONG if gpus >= 1024 else SEQLEN}", *COMMON, *heads]


class DoesNotFit(RuntimeError):
    """A point that no GPU has the memory for."""


def command_cost(keys: Sequence[str], root: Path = ROOT) -> Cost:
    """Run a point by its command, with the code of a checkout.

    Raises DoesNotFit where memory is too small, RuntimeError if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sp_bench", *keys, f"results_dir={folder}"]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder, env=earlier.environment(root))
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started
        if status:
            oom = any(record.status == "oom" for record in read_all(Path(folder)))
            raise (DoesNotFit if oom else RuntimeError)(f"{' '.join(command)} ended with status {status}")
    return Cost(wall_s, usage.ru_maxrss / 1024, usage.ru_utime)


def _in_turn(keys: Sequence[str], before: str, times: int) -> dict[str, Any]:
    """The cells of a command: its cost, and its wall time with the code of before, in turn, where that can run it.

    Costs are those of the run with the median wall time. Raises as `command_cost`.
    """
    root, costs, before_s = earlier.checkout(before) if before else None, list[Cost](), list[float]()
    for _ in range(times):
        costs.append(command_cost(keys))
        with suppress(RuntimeError):
            before_s += [command_cost(keys, root).wall_s] if root else []
    now = median_low(costs)
    cells: dict[str, Any] = {"wall_s": now.wall_s}
    if before:
        then_s = median_low(before_s) if before_s else None
        cells |= {"before": then_s, "now / before": then_s and now.wall_s / then_s}
    return cells | {"peak_mb": now.peak_mb}


def asymmetric(runs: Runs) -> list[dict[str, str]]:
    """A row for each point where no two ranks are alike."""
    return runs.kept("asymmetric", lambda: [_row(*point) for point in _without_symmetry()])


def _without_symmetry() -> Iterator[tuple[str, str, list[str]]]:
    """Why no two ranks of a point are alike, its GPUs in words, and its overrides.

    Points with jitter have as many heads as GPUs, for which pass_q has memory on short chunks.
    """
    jitter = ["stragglers.jitter=0.05", *COMMON]
    for method, gpus in product(EVERY_METHOD, JITTER_SIZES):
        shape = [f"gpus={gpus}", f"heads={gpus}", f"kv_heads={gpus}", "seqlen=256k"]
        yield "jitter", f"{gpus}", [f"method={method}", *shape, *jitter]
    yield "jitter", "64, 2 key heads, batch 2", ["method=usp", "gpus=64", "kv_heads=2", "batch=2", *jitter]
    for method in DOCUMENTED:
        heads = ["heads=256", "kv_heads=256"] if method == "ulysses" else []
        for layout in REGISTRY[method].all_layouts():
            keys = [f"method={method}", f"method.layout={layout}", *PACK, *heads, *COMMON]
            yield "documents", f"256, {layout}", keys


def _row(what: str, gpus: str, keys: list[str]) -> dict[str, str]:
    row = {"method": keys[0].removeprefix("method="), "with": what, "GPUs": gpus}
    try:
        cost = command_cost(keys)
        row |= {"user CPU s": f"{cost.cpu_s:.1f}", "wall_s": f"{cost.wall_s:.1f}", "peak_mb": f"{cost.peak_mb:.0f}"}
    except DoesNotFit:
        row |= {"user CPU s": "doesn't fit", "wall_s": "-", "peak_mb": "-"}
    print(" | ".join(row.values()), flush=True)
    return row


def timed(call, *arguments, **named) -> float:
    """Seconds of the faster of two calls."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        call(*arguments, **named)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def ratios(method: str, gpus: int) -> dict[str, Any]:
    """Ratios for a method's forward: both solvers on the graph of all ranks, and all ranks over one of each kind."""
    with Composer() as composer:
        request = resolve(composer.compose(overrides(method, gpus)))
    assert isinstance(request.method, Method)
    chosen = request.method.candidates(request.problem)[-1]
    problem, cluster = chosen.assigned(request.problem), request.cluster
    plan = chosen.plan(problem, "forward", cluster.profile(problem))
    whole, kinds = (build_graph(plan, problem, cluster, use_symmetry=use).tasks for use in (False, True))
    engines: tuple[Solver, Solver] = ("python", "numba")
    python_s, numba_s = (timed(solve, whole, solver) for solver in engines)
    all_s, one_s = (timed(simulate, plan, problem, cluster, use_symmetry=use) for use in (False, True))
    return {
        "point": f"{method} {chosen.variant(gpus)}, {gpus} GPUs, forward".replace(" ,", ","),
        "tasks": int(whole.delay_s.size),
        "Python / numba": f"{python_s / numba_s:.0f}",
        "tasks, one rank of a kind": int(kinds.delay_s.size),
        "all / one of a kind": f"{all_s / one_s:.1f}",
    }


def _costs(runs: Runs) -> list[dict[str, Any]]:
    """Wall time and memory of the command of each method and size."""

    def timed_commands() -> list[dict[str, Any]]:
        points = [(method, gpus) for method in METHODS for gpus in SIZES] + [*LARGE]
        rows = []
        for method, gpus in (*points, *(LARGEST if runs.options["largest"] == "true" else ())):
            times = 1 if (method, gpus) in LARGEST else TIMES
            cells = _in_turn(overrides(method, gpus), runs.options["before"], times)
            rows.append({"method": method, "gpus": gpus, **cells})
            print(f"{method:>12} {gpus:>5} {cells['wall_s']:>8.2f} s {cells['peak_mb']:>6.0f} MB", flush=True)
        return rows

    return runs.kept("commands", timed_commands)


def commands(runs: Runs) -> list[dict[str, Any]]:
    """A row for each command."""
    return [{key: _cell(key, value) for key, value in row.items()} for row in _costs(runs)]


def _cell(key: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if key == "peak_mb" else f"{value:.2f}"
    return "-" if value is None else str(value)


def code(runs: Runs) -> str:
    """Sentences on the code of before and how often commands ran; empty if there is none."""
    before = earlier.in_words(runs.options["before"])
    return f"{before} Times are medians of {TIMES}, and on {LARGEST[0][1]} GPUs of one." if before else ""


def twins(runs: Runs) -> list[dict[str, Any]]:
    """The ratios of solvers, and of all ranks to one of each kind."""
    return runs.kept("twins", lambda: [ratios(method, gpus) for method, gpus in TWINS])


def plot(runs: Runs) -> Figure:
    """The wall time over the number of GPUs, both axes logarithmic."""
    costs = _costs(runs)
    canvas, axes = new_figure(width=6, height=4)
    axis = axes[0, 0]
    for method, style in styles(METHODS).items():
        at = {row["gpus"]: row["wall_s"] for row in costs if row["method"] == method}
        axis.plot([*at], [*at.values()], label=method, **style)
    sizes = sorted({row["gpus"] for row in costs})
    axis.set(xscale="log", yscale="log", xlabel="simulated GPUs", ylabel="wall time of the command (s)")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return Figure("simulator_speed", "wall time over GPUs", canvas, ())
