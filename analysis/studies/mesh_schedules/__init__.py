"""Mesh-Attention's schedules over a certified bound."""

from __future__ import annotations

from collections.abc import Iterator

from sp_bench.analysis.runs import Runs
from sp_bench.cli.compose import Composer
from sp_bench.methods import build
from sp_bench.methods.mesh import tiles
from sp_bench.plan.method import PHASES
from sp_bench.point import resolve

GPUS = (16, 64, 256)
HEAD = ["gpus", "tile", "phase", "bound ms", "paper", "searched"]


def rows(gpus: int) -> Iterator[list[str]]:
    """The table's rows for one number of GPUs."""
    with Composer() as composer:
        point = composer.point(["method=mesh", f"gpus={gpus}", "mode=simulate"])
        request = resolve(composer.compose(point))
    costs = request.cluster.profile(request.problem)
    for tile in tiles(gpus):
        for phase in PHASES:
            times = {}
            for schedule in ("paper", "searched"):
                method = build("mesh", {"tile": tile, "schedule": schedule})
                times[schedule] = method.schedule_time(request.problem, phase, costs)
            paper, searched = times["paper"], times["searched"]
            assert paper and searched
            above = (f"{max(time.scheduled_s / time.least_s - 1, 0.0):.2%}" for time in (paper, searched))
            yield [str(gpus), f"{tile[0]} x {tile[1]}", phase, f"{paper.least_s * 1e3:.4g}", *above]


def table(_: Runs) -> list[dict[str, str]]:
    """The rows of all numbers of GPUs."""
    return [dict(zip(HEAD, row, strict=True)) for gpus in GPUS for row in rows(gpus)]
