"""Training steps on shaped hosts, simulated and measured. Needs root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sp_bench import calibrate, markdown, records
from sp_bench.analysis.frames import named
from sp_bench.analysis.measured import known
from sp_bench.analysis.runs import Runs
from sp_bench.calibrating.speed import cluster_at
from sp_bench.cli.compose import Composer
from sp_bench.point import resolve
from sp_bench.point.training import simulate_training
from sp_bench.records import Record
from sp_bench.validate.machine import pairs_in_order, validate

METHODS = (
    ("method=ring",), ("method=striped",), ("method=mesh",), ("method=tokenring",), ("method=pass_q",),
    ("method=all_gather",), ("method=startrail", "method.team=2"), ("method=usp", "method.ulysses=2"),
)  # fmt: skip
SETTINGS = ((4, "2k", 12.5e6), (4, "4k", 25e6), (8, "4k", 12.5e6), (8, "8k", 25e6), (4, "1k", 25e6))
"""Ranks, tokens, bytes/s of a link: 512 and 1024 tokens a rank, and a short setting with 256."""
SHORT = 1024
"""Up to so many tokens, what threads and Python cost beside blocks and messages is a large part of a step."""
COMMON = ("model=tiny", "dtype=float32", "iters=4", "warmup=1", "parts=false", "logger=none", "timeout_s=180")
NAME, LINK = "tiny_hosts", "cluster.hosts.link_bytes_per_s"
CALIBRATION = ("cluster=shaped", "heads=4", "kv_heads=2", "head_dim=16", "ranks=8", "repetitions=2")
PARTS = ("attention", "dense", "loss", "gradient_sync", "optimizer")
"""The parts of a step, as in records."""


def points(folder: Path) -> list[Mapping[str, Any]]:
    """The configs of all points, on the cluster whose file is in the folder."""
    with Composer(folder) as composer:
        return [
            composer.compose(
                [*COMMON, f"cluster={NAME}", *method, f"gpus={gpus}", f"seqlen={seqlen}", f"{LINK}={rate}"]
            )
            for gpus, seqlen, rate in SETTINGS
            for method in METHODS
        ]


def simulated(measured: Record, speed: float) -> Record:
    """The simulation of a measured point with cores of that speed."""
    request = resolve({**(measured.config or {}), "mode": "simulate"})
    return simulate_training(request, cluster_at(request, speed))


def errors(found: Sequence[float] | np.ndarray) -> dict[str, str]:
    """The absolute errors of a row: the median, the 90th percentile, the largest."""
    sizes = np.abs(found)
    return {
        "median error": f"{np.median(sizes):.1%}",
        "90th percentile": f"{np.percentile(sizes, 90):.1%}",
        "largest": f"{sizes.max():.1%}",
        "median of simulated / measured": f"{1 + np.median(found):.2f}",
    }


class Found(NamedTuple):
    """The points: all, those that could be compared, and the records of these, measured and simulated."""

    table: pd.DataFrame
    done: list[dict[str, Any]]
    pairs: list[tuple[Record, Record]]


@cache
def found(runs: Runs) -> Found:
    """All points, measured and simulated, after a calibration. Raises RuntimeError if that fails."""
    file = runs.folder / "cluster" / f"{NAME}.yaml"
    if not file.exists() and calibrate.main([*CALIBRATION, f"out={file}"]):
        raise RuntimeError("the calibration failed")
    table = validate(points(runs.folder), runs.folder)
    done = table.dropna(subset=["step_error"]).to_dict("records")
    measured = [records.read(runs.folder / "records" / f"{point['measured_run_id']}.json") for point in done]
    pairs = [(one, simulated(one, point["speed"] or 1)) for one, point in zip(measured, done, strict=True)]
    return Found(table, done, pairs)


def cpu(_: Runs) -> str:
    """The model of this machine's cores."""
    return str(records.machine()["cpu"])


def summary(runs: Runs) -> str:
    """The number of points, the speed of the cores, and the pairs of methods that are ordered alike."""
    table, done, _ = found(runs)
    alike, compared, wrong = pairs_in_order(table)
    speeds = [point["speed"] for point in done if point["speed"]]
    return (
        f"{len(done)} points; cores were {min(speeds):.2f} to {max(speeds):.2f} times as fast as calibrated. Ordered"
        f" alike: {alike} of {compared} pairs of methods whose measured intervals don't overlap.\n"
        + (f"Not: {', '.join(wrong)}." if wrong else "")
    )


def steps(runs: Runs) -> list[dict[str, str]]:
    """The errors of steps and of their phases."""
    done = found(runs).done
    short = [point["seqlen"] <= SHORT for point in done]
    step = np.array([point["step_error"] for point in done])
    by_name = {"step": step, f"step, up to {SHORT:,} tokens": step[short], "step, of more": step[~np.array(short)]}
    by_name |= {phase: [point[f"{phase}_error"] for point in done] for phase in ("forward", "backward")}
    by_name["step, with the calibration's figures alone"] = [point["step_error_as_calibrated"] for point in done]
    return [{"": name, **errors(of_name)} for name, of_name in by_name.items()]


def by_part(runs: Runs) -> list[dict[str, str]]:
    """A row for each part of the step: its share of the measured step, and the errors of its time."""
    rows = []
    for part in PARTS:
        both = [(getattr(one, f"{part}_ms"), getattr(other, f"{part}_ms"), one) for one, other in found(runs).pairs]
        share = np.median([ms / known(one.step_ms_median) for ms, _, one in both])
        off = [simulated_ms / ms - 1 for ms, simulated_ms, _ in both]
        rows.append({"part": part.replace("_", " "), "of the step": f"{share:.0%}", **errors(off)})
    return rows


def row(point: Mapping[str, Any], measured: Record, other: Record) -> dict[str, str]:
    """The row of a point. Its parts are measured, simulated."""
    parts = {"attention": "attention", "products and the rest": "dense", "gradients": "gradient_sync"}
    of_parts = {
        name: ", ".join(f"{known(getattr(record, f'{part}_ms')):.0f}" for record in (measured, other))
        for name, part in parts.items()
    }
    return {
        "ranks": str(point["gpus"]),
        "tokens": f"{point['seqlen']:,}",
        "Mbit/s": f"{point['link_mbit_per_s']:.0f}",
        "method": named(measured),
        "measured, ms [95%]": f"{point['step_measured_ms']:.0f} [{point['low_ms']:.0f}, {point['high_ms']:.0f}]",
        "simulated, ms": f"{point['step_simulated_ms']:.0f}",
        "error": f"{point['step_error']:+.1%}",
        "as calibrated": f"{point['step_error_as_calibrated']:+.1%}",
        "tokens/s": f"{known(measured.tokens_per_s):,.0f}",
        **of_parts,
    }


def rows(runs: Runs) -> str:
    """A row for each point, and the points that failed."""
    table, done, pairs = found(runs)
    failed = [point for point in table.to_dict("records") if point["status"] != "ok"]
    lines = [f"- {point['method']} on {point['gpus']} ranks: {point['status']}: {point['why']}" for point in failed]
    made = markdown.of_rows([row(point, *pair) for point, pair in zip(done, pairs, strict=True)])
    return "\n\n".join([made, *(["\n".join(lines)] if lines else [])])
