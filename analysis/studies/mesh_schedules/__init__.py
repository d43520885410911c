"""Mesh-Attention's schedules over a certified bound, and their steps on clusters."""

from __future__ import annotations

from collections.abc import Iterator

from sp_bench.analysis.measured import known
from sp_bench.analysis.runs import Runs
from sp_bench.cli.compose import Composer
from sp_bench.methods import build
from sp_bench.methods.mesh import tiles
from sp_bench.plan.method import PHASES
from sp_bench.point import resolve

GPUS = (16, 64, 256)
HEAD = ["gpus", "tile", "phase", "bound ms", "paper", "searched"]
CLUSTERS = (
    ("h200_ndr400", "16", "256k"),
    ("h200_ndr400", "64", "256k"),
    ("a100_hdr200", "64", "128k"),
    ("b200", "32", "256k"),
)
"""Those with shorter blocks or hops than the default point, GPUs and tokens."""
MODEL = ("heads=32", "kv_heads=32", "head_dim=128", "causal=false")
SEARCHED = ("method=mesh", "method.schedule=searched")
SCHEDULES = {
    "the paper's": ("method=mesh",),
    "searched": SEARCHED,
    "2 slices": (*SEARCHED, "method.slices=2"),
    "4 slices": (*SEARCHED, "method.slices=4"),
}


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


def clusters(runs: Runs) -> list[dict[str, str]]:
    """Simulated steps in ms of schedules and slices, each with its fastest tile."""
    rows = []
    for cluster, gpus, seqlen in CLUSTERS:
        common = ["mode=simulate", f"cluster={cluster}", f"gpus={gpus}", f"seqlen={seqlen}", *MODEL]
        records = runs.ok([(*common, *keys) for keys in SCHEDULES.values()])
        row = {"cluster": cluster, "GPUs": gpus, "tokens": seqlen, "compute": f"{known(records[0].compute_ms):.1f}"}
        for name, record in zip(SCHEDULES, records, strict=True):
            tile = (record.variant or "").split()[0]
            row[name] = f"{known(record.step_ms_median):.1f} ({tile})"
        rows.append(row)
    return rows
