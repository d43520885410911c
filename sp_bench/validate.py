"""python -m sp_bench.validate key=value ...: measure points and simulate them, and say how far apart the two are."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from sp_bench import markdown, records
from sp_bench.bench import Outcome, Request, resolve, run_points, work_of
from sp_bench.bench.choose import choose
from sp_bench.calibrating.speed import cluster_at, speed_of
from sp_bench.cli.arguments import config_dir, run_command, writable_folder
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.extras import require
from sp_bench.records import Record
from sp_bench.simulate import simulate

if TYPE_CHECKING:
    import pandas as pd

USAGE = """\
python -m sp_bench.validate [out=FOLDER] [--config-dir DIR] [key=value,value ...]

Measures every point on this machine and simulates it with the figures of the same cluster, which should be calibrated
ones (python -m sp_bench.calibrate). How fast the cores are just then is measured in turn with the points, by the blocks
of the first one on all ranks without transfers, and simulated cores are as fast. Writes FOLDER/validation.md, .csv and
.svg: both times of each point, the error, and whether the simulator orders the methods as the measurements do wherever
these can tell them apart.

  out=results/validate    the folder; records and speeds are in it too, and what has both is not measured again
  key=value,value         axes as in python -m sp_bench -m; without any, the points below

Without keys, on cluster=shaped (its hosts need root):
"""
COMMON = (
    "heads=8", "head_dim=64", "dtype=float32", "causal=false", "seqlen=4k", "iters=5", "warmup=1", "parts=false",
    "logger=none",
)  # fmt: skip
METHODS = (
    "method=ring,mesh,ulysses,tokenring,pass_q,all_gather", "method=startrail method.team=2",
    "method=usp method.ulysses=2", "method=double_ring method.inner=2",
)  # fmt: skip
"""Each as it is itself: what auto takes can be another's plan, as USP is Ulysses where all ranks have heads."""
LINK, LEAVES = "cluster.hosts.link_bytes_per_s", "cluster.hosts.hosts_per_leaf=4 cluster.hosts.uplink_bytes_per_s=25e6"
SETTINGS = (
    f"gpus=4 {LINK}=12.5e6",
    f"gpus=8 {LINK}=25e6",
    f"gpus=8 {LINK}=25e6 {LEAVES}",
    f"gpus=8 {LINK}=12.5e6 seqlen=2k",
    f"gpus=8 {LINK}=25e6 causal=true",
    f"gpus=16 {LINK}=25e6 heads=16",
)
"""With keys beside COMMON."""
MORE = (
    (f"gpus=8 {LINK}=25e6 causal=true", "method=striped,zigzag"),
    (f"gpus=16 {LINK}=12.5e6", "method=mesh method.tile=[1,16],[2,8],[4,4],[8,2],[16,1]"),
)
"""Settings with the methods that are measured in these alone."""
SETTING = ["cluster", "link_mbit_per_s", "uplink_mbit_per_s", "gpus", "seqlen", "causal", "heads"]
"""What points must share to be compared."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    lines = [*METHODS, "in each of", *SETTINGS, "and", *map(" ".join, MORE), "all with", " ".join(COMMON)]
    usage = USAGE + "".join(f"  {line}\n" for line in lines)
    return run_command("sp_bench.validate", usage, _validate, argv, flags=("--config-dir",))


def _validate(arguments: list[str]) -> int:
    require("analysis", "validating")
    out, own, keys = _arguments(arguments)
    sweeps = [keys] if any("=" in key and not key.startswith("cluster=") for key in keys) else None
    with Composer(own) as composer:
        configs = [config for sweep in sweeps or _shaped(keys) for config in _configs(composer, sweep)]
    table = validate(configs, writable_folder("out", str(out)))
    write(table, out)
    print((out / "validation.md").read_text())
    return 0


def _arguments(arguments: Sequence[str]) -> tuple[Path, Path | None, list[str]]:
    """The folder, the user's own conf, and the rest."""
    out = Path("results/validate")
    own, rest = config_dir(arguments)
    for argument in [a for a in rest if a.startswith("out=")]:
        out = Path(argument.removeprefix("out="))
        rest.remove(argument)
    return out, own, rest


def _shaped(keys: Sequence[str]) -> list[list[str]]:
    """The default sweeps, on the cluster that the command line names."""
    cluster = keys or ["cluster=shaped"]
    found = []
    for setting, methods in [*itertools.product(SETTINGS, METHODS), *MORE]:
        given = {key.partition("=")[0] for key in setting.split()}
        common = [key for key in COMMON if key.partition("=")[0] not in given]
        found.append([*cluster, *common, *setting.split(), *methods.split()])
    return found


def _configs(composer: Composer, sweep: Sequence[str]) -> list[dict[str, Any]]:
    return [composer.compose(point) for point in composer.points(sweep, sweep=True)]


def validate(configs: Sequence[Mapping[str, Any]], out: Path) -> pd.DataFrame:
    """Both modes of each point, a row for each (see `row`).

    Records go to out/records, and the speeds of the cores to out/speeds.json; points that are in both are not measured
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
        groups.setdefault(_but_its_method(request), []).append(request)
    if not groups:
        raise refused[0] if refused else RequestError("no points", "there is nothing to do", "method=ring would work")
    for error in refused:
        print(f"left out: {error}", file=sys.stderr)
    console, rows, done = Console(), [], 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("points", total=sum(map(work_of, groups.values())))
        for requests in groups.values():
            rows += _rows(requests, out, lambda steps: progress.advance(task, steps))
            done += work_of(requests)
            progress.update(task, completed=done)
    import pandas as pd

    return pd.DataFrame(rows)


def _but_its_method(request: Request) -> str:
    """All of a point's config but its method: points that share it are measured together, with one speed."""
    config = {key: value for key, value in request.config.items() if key not in ("method", "impl")}
    return json.dumps(config, sort_keys=True, default=str)


def _rows(requests: Sequence[Request], out: Path, progress: Callable[[int], None]) -> list[dict[str, Any]]:
    """Points that differ in their methods, measured and simulated, with the speed of the cores at that time."""
    run, speeds = partial(run_points, folder=out / "records"), _Speeds(out / "speeds.json")
    # A record without its speed was cut off from it: it is of another time than any speed that could be had now.
    new = [request for request in requests if request.run_id not in speeds.known]
    measured: dict[str, Record] = {}
    if new:
        measured, speed = _measure(requests[0], new, partial(run, reuse=False, progress=progress))
        speeds.add({record.run_id: speed for record in measured.values() if record.status == "ok"})
    kept = run([request for request in requests if request not in new], reuse=True)
    measured |= {outcome.record.run_id: outcome.record for outcome in kept}
    simulated = run([resolve({**request.config, "mode": "simulate", "trace": 0}) for request in requests], reuse=True)
    rows = []
    for request, outcome in zip(requests, simulated, strict=True):
        speed, ok = speeds.known.get(request.run_id), outcome.record.status == "ok"
        rows.append(
            row(measured[request.run_id], outcome.record, speed, at_speed_ms(request, speed or 1) if ok else {})
        )
    return rows


def _measure(
    first: Request, new: Sequence[Request], run: Callable[[list[Request]], list[Outcome]]
) -> tuple[dict[str, Record], float | None]:
    """The records of new points, by run_id, and the speed of the cores meanwhile (calibrating.speed).

    The `first` point of their setting tells it, whose blocks are timed without transfers in turn with them: whichever
    points are new, all of the setting mean the same by a speed. None, and said, where that point fails.
    """
    on_cores = first.devices.kind == "cpu"
    alone = resolve({**first.config, "parts": True})
    extra = [alone] if on_cores and alone.run_id not in [request.run_id for request in new] else []
    found = {outcome.record.run_id: outcome.record for outcome in run([*extra, *new])}
    if not on_cores:
        return found, 1.0
    told = found[alone.run_id]
    if told.status == "ok":
        return found, speed_of(alone, told)
    print(f"the speed of the cores is not known, and taken to be as calibrated: {told.error}", file=sys.stderr)
    return found, None


def at_speed_ms(request: Request, speed: float) -> dict[str, float]:
    """What the plans that a point was measured with take on its cluster with cores so many times as fast, by phase.

    Raises RequestError where no plan fits the memory, or it is too large to simulate.
    """
    choice, cluster = choose(request), cluster_at(request, speed)
    return {name: 1e3 * simulate(plan, choice.problem, cluster).makespan_s for name, plan in choice.plans.items()}


class _Speeds:
    """The speeds at which points were measured, by run_id, so that they are kept with the records; None: not known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[str, float | None] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, speeds: Mapping[str, float | None]) -> None:
        self.known |= speeds
        records.write_whole(self._path, json.dumps(self.known, indent=1))


def row(measured: Record, simulated: Record, speed: float | None, simulated_ms: Mapping[str, float]) -> dict[str, Any]:
    """One point: what it is, both times in milliseconds, and the error of the simulated one.

    `simulated_ms` is by phase with cores at a `speed`, None where it isn't known, and `simulated` with the figures that
    the cluster has of them.
    """
    simulated_ms = {**simulated_ms, "step": sum(simulated_ms.values())} if simulated_ms else {}
    hosts = (measured.config or {}).get("cluster", {}).get("hosts") or {}
    found = {
        key: getattr(measured, key) for key in ("method", "variant", "cluster", "gpus", "seqlen", "causal", "heads")
    }
    for tier in ("link", "uplink"):
        found[f"{tier}_mbit_per_s"] = (hosts.get(f"{tier}_bytes_per_s") or 0) * 8e-6 or None
    found |= {
        "hosts_per_leaf": hosts.get("hosts_per_leaf"),
        "status": measured.status,
        "why": measured.error or simulated.error,
        "bound_by": simulated.bound_by,
    }
    found |= {"measured_run_id": measured.run_id, "simulated_run_id": simulated.run_id}
    for phase in ("step", "forward", "backward"):
        one, other = getattr(measured, f"{phase}_ms_median"), simulated_ms.get(phase)
        found |= {f"{phase}_measured_ms": one, f"{phase}_simulated_ms": other}
        found[f"{phase}_error"] = other / one - 1 if one and other else None
    one, other = measured.step_ms_median, simulated.step_ms_median
    found |= {"speed": speed, "step_as_calibrated_ms": other}
    found["step_error_as_calibrated"] = other / one - 1 if one and other else None
    return found | {"low_ms": measured.step_ms_ci95_low, "high_ms": measured.step_ms_ci95_high}


def pairs_in_order(table: pd.DataFrame) -> tuple[int, int, list[str]]:
    """(pairs ordered alike, pairs, those that are not): of points that differ in method or variant only.

    A pair counts where the measured intervals don't overlap.
    """
    alike, wrong, pairs = 0, [], 0
    for _, group in table.dropna(subset=["step_error"]).groupby(SETTING, dropna=False):
        for one, other in itertools.combinations(group.to_dict("records"), 2):
            if one["low_ms"] <= other["high_ms"] and other["low_ms"] <= one["high_ms"]:
                continue
            pairs += 1
            measured = one["step_measured_ms"] < other["step_measured_ms"]
            if measured == (one["step_simulated_ms"] < other["step_simulated_ms"]):
                alike += 1
            else:
                wrong.append(f"{_name(one)} and {_name(other)} ({_setting(one)})")
    return alike, pairs, wrong


def write(table: pd.DataFrame, out: Path) -> None:
    """The table as CSV and Markdown, and a scatter plot."""
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
            "say. That has in it what else the machine does, and how well the figures meet blocks of this size on so "
            "many ranks. Simulated cores are as fast. As the figures say, the errors of steps would be: median "
            f"{as_calibrated.median():.1%}, 90th percentile {np.percentile(as_calibrated, 90):.1%}."
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
    return markdown.table(["", "median of errors' sizes", "90th percentile", "largest"], rows)


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
    """Simulated over measured, both logarithmic, with the diagonal."""
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


if __name__ == "__main__":
    sys.exit(main())
