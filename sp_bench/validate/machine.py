"""python -m sp_bench.validate published
python -m sp_bench.validate [out=FOLDER] [--config-dir DIR] [key=value,value ...]

`published` compares simulations with others' published measurements (sp_bench.validate.published). Otherwise:
measures every point on this machine, simulates it with its cluster's figures, and reports how far apart the two are.
The figures should be calibrated ones (python -m sp_bench.calibrate). The speed of the cores is measured in turn with
the points: the blocks of the first point run on all ranks without transfers. Simulated cores get that speed. Writes
FOLDER/validation.md, .csv and .svg: both times of each point, the error, and whether the simulator ranks the methods
like the measurements do, wherever their intervals don't overlap.

  out=results/validate    the folder, also for records and speeds; a point that has both is not measured again
  key=value,value         axes as in python -m sp_bench -m; without any, the points below

Without keys, on cluster=shaped (its hosts need root):
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from sp_bench import markdown, records
from sp_bench.calibrating.speed import cluster_at, speed_of
from sp_bench.cli.arguments import config_dir, run_command, writable_folder
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.extras import require
from sp_bench.point import Outcome, Request, resolve, run_points, work_of
from sp_bench.point.request import setting_of
from sp_bench.point.simulations import simulation_of
from sp_bench.records import Record
from sp_bench.terminal import say
from sp_bench.validate.common import Row, count_in_order

if TYPE_CHECKING:
    import pandas as pd

COMMON = (
    "heads=8", "head_dim=64", "dtype=float32", "causal=false", "seqlen=4k", "iters=5", "warmup=1", "parts=false",
    "logger=none",
)  # fmt: skip
METHODS = (
    "method=ring,mesh,ulysses,tokenring,pass_q,all_gather", "method=startrail method.team=2",
    "method=usp method.ulysses=2", "method=double_ring method.inner=2",
)  # fmt: skip
"""Options are fixed where auto could choose another method's plan, as USP with a head for each rank is Ulysses."""
LINK, LEAVES = "cluster.hosts.link_bytes_per_s", "cluster.hosts.hosts_per_leaf=4 cluster.hosts.uplink_bytes_per_s=25e6"
SETTINGS = (
    f"gpus=4 {LINK}=12.5e6",
    f"gpus=8 {LINK}=25e6",
    f"gpus=8 {LINK}=25e6 {LEAVES}",
    f"gpus=8 {LINK}=12.5e6 seqlen=2k",
    f"gpus=8 {LINK}=25e6 causal=true",
    f"gpus=16 {LINK}=25e6 heads=16",
)
"""Settings: keys in addition to COMMON."""
MORE = (
    (f"gpus=8 {LINK}=25e6 causal=true", "method=striped,zigzag"),
    (f"gpus=16 {LINK}=12.5e6", "method=mesh method.tile=[1,16],[2,8],[4,4],[8,2],[16,1]"),
)
"""More settings, each with its own methods."""
SETTING = ["cluster", "link_mbit_per_s", "uplink_mbit_per_s", "gpus", "seqlen", "causal", "heads"]
"""Columns that points must share to be compared."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    lines = [*METHODS, "in each of", *SETTINGS, "and", *map(" ".join, MORE), "all with", " ".join(COMMON)]
    usage = (__doc__ or "") + "".join(f"  {line}\n" for line in lines)
    return run_command("sp_bench.validate", usage, _validate, argv, flags=("--config-dir",))


def _validate(arguments: list[str]) -> int:
    require("analysis", "validating")
    own, rest = config_dir(arguments)
    keys = [argument for argument in rest if not argument.startswith("out=")]
    out = Path(next((a.removeprefix("out=") for a in reversed(rest) if a not in keys), "results/validate"))
    sweeps = [keys] if any("=" in key and not key.startswith("cluster=") for key in keys) else _default_sweeps(keys)
    with Composer(own) as composer:
        points = [point for sweep in sweeps for point in composer.points(sweep, sweep=True)]
        configs = [composer.compose(point) for point in points]
    table = validate(configs, writable_folder("out", str(out)))
    write(table, out)
    print((out / "validation.md").read_text())
    return 0


def _default_sweeps(keys: Sequence[str]) -> list[list[str]]:
    """The default points, on the cluster that the command line names."""
    cluster = keys or ["cluster=shaped"]
    sweeps = []
    for setting, methods in [*itertools.product(SETTINGS, METHODS), *MORE]:
        given = {key.partition("=")[0] for key in setting.split()}
        common = [key for key in COMMON if key.partition("=")[0] not in given]
        sweeps.append([*cluster, *common, *setting.split(), *methods.split()])
    return sweeps


def validate(configs: Sequence[Mapping[str, Any]], out: Path) -> pd.DataFrame:
    """Measure and simulate each point; return a table with a row for each (see `row`).

    Records go to out/records, and the speeds of the cores to out/speeds.json. A point that is in both is not measured
    again. Raises RequestError if no point can be measured here.
    """
    groups: dict[str, list[Request]] = {}
    refused: list[RequestError] = []
    for config in configs:
        try:
            resolve({**config, "mode": "simulate"})
            request = resolve({**config, "mode": "measure"})
        except RequestError as error:
            refused.append(error)
            continue
        groups.setdefault(setting_of(request.config), []).append(request)
    if not groups:
        raise refused[0] if refused else RequestError("no points", "there is nothing to do", "method=ring would work")
    for error in refused:
        say(f"left out: {error}")
    console, rows, done = Console(), [], 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("points", total=sum(map(work_of, groups.values())))
        for requests in groups.values():
            rows += _rows(requests, out, lambda steps: progress.advance(task, steps))
            done += work_of(requests)
            progress.update(task, completed=done)
    import pandas as pd

    return pd.DataFrame(rows)


def _rows(requests: Sequence[Request], out: Path, progress: Callable[[int], None]) -> list[dict[str, Any]]:
    """The rows of points that differ only in their methods: measured and simulated, with the speed of the cores."""
    run, speeds_file = partial(run_points, folder=out / "records"), out / "speeds.json"
    speeds: dict[str, float | None] = json.loads(speeds_file.read_text()) if speeds_file.exists() else {}
    # A record without a speed is measured again: the speed at its time is not known.
    new = [request for request in requests if request.run_id not in speeds]
    measured: dict[str, Record] = {}
    if new:
        measured, speed = _measure(requests[0], new, partial(run, reuse=False, progress=progress))
        speeds |= {record.run_id: speed for record in measured.values() if record.status == "ok"}
        records.write_whole(speeds_file, json.dumps(speeds, indent=1))
    kept = run([request for request in requests if request not in new], reuse=True)
    measured |= {outcome.record.run_id: outcome.record for outcome in kept}
    simulated = run([resolve({**request.config, "mode": "simulate", "trace": 0}) for request in requests], reuse=True)
    rows = []
    for request, outcome in zip(requests, simulated, strict=True):
        speed, ok = speeds.get(request.run_id), outcome.record.status == "ok"
        simulated_ms = at_speed_ms(request, speed or 1) if ok else {}
        rows.append(row(measured[request.run_id], outcome.record, speed, simulated_ms))
    return rows


def _measure(
    first: Request, new: Sequence[Request], run: Callable[[list[Request]], list[Outcome]]
) -> tuple[dict[str, Record], float | None]:
    """The records of new points by run_id, and the speed of the cores meanwhile (calibrating.speed).

    The speed comes from the `first` point of the setting, timed without transfers in turn with the new ones, so that it
    means the same for all points of the setting. It is None, with a message, if that point fails.
    """
    on_cores = first.devices.kind == "cpu"
    reference = resolve({**first.config, "parts": True})
    extra = [reference] if on_cores and reference.run_id not in [request.run_id for request in new] else []
    records = {outcome.record.run_id: outcome.record for outcome in run([*extra, *new])}
    if not on_cores:
        return records, 1.0
    record = records[reference.run_id]
    if record.status == "ok":
        return records, speed_of(reference, record)
    say(f"the speed of the cores is not known, and taken to be as calibrated: {record.error}")
    return records, None


def at_speed_ms(request: Request, speed: float) -> dict[str, float]:
    """The simulated time of a point's plans on its cluster with cores `speed` times as fast, by phase.

    Raises RequestError if no plan fits in memory, or it is too large to simulate.
    """
    return simulation_of(request).phases_ms(request, cluster_at(request, speed))


def row(measured: Record, simulated: Record, speed: float | None, simulated_ms: Mapping[str, float]) -> dict[str, Any]:
    """The row of one point: its setting, both times in milliseconds, and the simulation's error.

    `simulated_ms` is by phase, with cores at `speed`, or as calibrated if that is None. `simulated` has the times with
    the cluster's own figures.
    """
    hosts = (measured.config or {}).get("cluster", {}).get("hosts") or {}
    shape = ("method", "variant", "cluster", "gpus", "seqlen", "causal", "heads")
    fields = {key: getattr(measured, key) for key in shape}
    for tier in ("link", "uplink"):
        fields[f"{tier}_mbit_per_s"] = (hosts.get(f"{tier}_bytes_per_s") or 0) * 8e-6 or None
    fields |= {
        "hosts_per_leaf": hosts.get("hosts_per_leaf"),
        "status": measured.status,
        "why": measured.error or simulated.error,
        "bound_by": simulated.bound_by,
        "measured_run_id": measured.run_id,
        "simulated_run_id": simulated.run_id,
    }
    times_ms = {"step": sum(simulated_ms.values()), **simulated_ms} if simulated_ms else {}
    for phase in ("step", "forward", "backward"):
        phase_ms = getattr(measured, f"{phase}_ms_median")
        fields |= {f"{phase}_measured_ms": phase_ms, f"{phase}_simulated_ms": times_ms.get(phase)}
        fields[f"{phase}_error"] = _error(times_ms.get(phase), phase_ms)
    return fields | {
        "speed": speed,
        "step_as_calibrated_ms": simulated.step_ms_median,
        "step_error_as_calibrated": _error(simulated.step_ms_median, measured.step_ms_median),
        "low_ms": measured.step_ms_ci95_low,
        "high_ms": measured.step_ms_ci95_high,
    }


def _error(simulated_ms: float | None, measured_ms: float | None) -> float | None:
    return simulated_ms / measured_ms - 1 if measured_ms and simulated_ms else None


def pairs_in_order(table: pd.DataFrame) -> tuple[int, int, list[str]]:
    """(number of pairs that both modes rank alike, number of pairs, pairs ranked differently).

    The points of a pair differ only in method or variant, and their measured intervals don't overlap.
    """

    def tied(one: Row, other: Row) -> bool:
        return one["low_ms"] <= other["high_ms"] and other["low_ms"] <= one["high_ms"]

    def words(one: Row, other: Row) -> str:
        return f"{_name(one)} and {_name(other)} ({_setting(one)})"

    groups = table.dropna(subset=["step_error"]).groupby(SETTING, dropna=False)
    return count_in_order(groups, "step_measured_ms", "step_simulated_ms", tied=tied, words=words)


def write(table: pd.DataFrame, out: Path) -> None:
    """Write the table as CSV and Markdown, and a scatter plot."""
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / "validation.csv", index=False)
    done = table.dropna(subset=["step_error"])
    if len(done):
        plot(done, out / "validation.svg")
    (out / "validation.md").write_text(_report(table, done))


def _report(found: pd.DataFrame, done: pd.DataFrame) -> str:
    machine = records.machine()
    parts = [
        "# Simulated against measured",
        f"Made by `python -m sp_bench.validate` on {machine['cores']} cores ({machine['cpu']}), code version "
        f"{records.code_version()}. The error is simulated / measured - 1.",
    ]
    if len(done):
        alike, pairs, wrong = pairs_in_order(done)
        verdict = f"{len(done)} points. Ordered alike: {alike} of {pairs} pairs whose measured intervals don't overlap."
        verdict += f"\nNot: {', '.join(wrong)}." if wrong else ""
        as_calibrated = done["step_error_as_calibrated"].abs()
        speeds = (
            "In turn with the points of a setting, the blocks and folds of its first one ran on all ranks without "
            f"transfers: {done['speed'].min():.2f} to {done['speed'].max():.2f} times as fast as the cluster's figures "
            "say. This speed includes other load on the machine, and how well the figures fit blocks of this size on "
            "so many ranks. Simulated cores have this speed. With the figures alone, the errors of steps would be: "
            f"median {as_calibrated.median():.1%}, 90th percentile {np.percentile(as_calibrated, 90):.1%}."
        )
        parts += [_errors(done), verdict, speeds, "![simulated over measured](validation.svg)"]
    head = ["setting", "method", "measured, ms [95%]", "simulated, ms", "error", "forward", "backward", "bound by"]
    parts.append(markdown.table([*head, "records"], map(_cells, found.to_dict("records"))))
    return "\n\n".join(parts) + "\n"


def _errors(done: pd.DataFrame) -> str:
    sizes = {phase: done[f"{phase}_error"].dropna().abs() for phase in ("step", "forward", "backward")}
    rows = [
        [phase, *(f"{x:.1%}" for x in (size.median(), np.percentile(size, 90), size.max()))]
        for phase, size in sizes.items()
        if len(size)
    ]
    return markdown.table(["", "median absolute error", "90th percentile", "largest"], rows)


def _cells(point: Mapping[str, Any]) -> list[str]:
    ids = f"{point['measured_run_id']} {point['simulated_run_id']}"
    if point["step_error"] is None or np.isnan(point["step_error"]):
        return [_setting(point), _name(point), f"{point['status']}: {point['why']}", *[""] * 5, ids]
    measured = f"{point['step_measured_ms']:.0f} [{point['low_ms']:.0f}, {point['high_ms']:.0f}]"
    errors = [f"{point[f'{phase}_error']:+.1%}" for phase in ("step", "forward", "backward")]
    simulated = f"{point['step_simulated_ms']:.0f}"
    return [_setting(point), _name(point), measured, simulated, *errors, str(point["bound_by"]), ids]


def _name(point: Mapping[str, Any]) -> str:
    return f"{point['method']} {point['variant']}" if isinstance(point["variant"], str) else point["method"]


def _setting(point: Mapping[str, Any]) -> str:
    thousands, rest = divmod(point["seqlen"], 1024)
    tokens = f"{point['seqlen']} tokens" if rest else f"{thousands}k"
    words = [f"{point['gpus']} ranks", tokens, "causal" if point["causal"] else "full"]
    for tier in ("link", "uplink"):
        rate = point[f"{tier}_mbit_per_s"]
        if rate and not np.isnan(rate):
            words.append(
                f"{rate:.0f} Mbit/s" + (f" for {point['hosts_per_leaf']:.0f} hosts" if tier == "uplink" else "")
            )
    return ", ".join([*words, f"{point['heads']} heads"])


def plot(done: pd.DataFrame, path: Path) -> None:
    """Plot simulated over measured times, on logarithmic axes, with the diagonal."""
    import matplotlib
    import seaborn as sns

    matplotlib.use("Agg")
    sns.set_theme(style="whitegrid", context="paper", palette="colorblind")
    grid = sns.relplot(
        done, x="step_measured_ms", y="step_simulated_ms", hue="method", style="method", height=4, aspect=1.4, s=50
    )
    ends = [done[["step_measured_ms", "step_simulated_ms"]].min().min(), done["step_measured_ms"].max()]
    grid.ax.axline((ends[0], ends[0]), slope=1, color="0.5", linewidth=1, zorder=0)
    grid.set(xscale="log", yscale="log", xlabel="measured step (ms)", ylabel="simulated step (ms)")
    grid.savefig(path)
