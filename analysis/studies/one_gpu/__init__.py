"""One GPU as a rank of many, beside its simulation.

device=cuda     cpu: small shapes, for a try
kernels=        one or more of conf/kernel; without any, those of torch
measure=true    false: the page alone, of what the folder of records has; this needs no GPU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sp_bench import calibrate, records
from sp_bench.analysis.measured import known
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import fused_blocks
from sp_bench.analysis.studies.fused_blocks import Where
from sp_bench.calibrating.clock import CLOCKS
from sp_bench.cli.arguments import flag
from sp_bench.cli.compose import Composer
from sp_bench.cluster.kernel_table import RATES
from sp_bench.errors import RequestError, unknown
from sp_bench.kernels import KERNELS
from sp_bench.markdown import of_rows
from sp_bench.point import resolve
from sp_bench.point.simulated import simulate_point
from sp_bench.records import Record

OPTIONS = {"device": "cuda", "kernels": "", "measure": "true"}
ABOUT_SHARES = (
    "The blocks and folds of a rank of 8 are timed in turn with one call of the kernel on the whole sequence. A share"
    " is the time of the call over 8 times that of the rank, by medians."
)
Row = dict[str, str]
Point = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The measurements of a device."""

    kernels: tuple[str, ...]
    cluster: str
    """The cluster with such GPUs; empty: none."""
    sizes: tuple[tuple[int, str], ...]
    """Ranks and tokens of the whole sequence."""
    where: Where
    """The shape of heads and the dtype of all measurements."""
    calibration: tuple[str, ...]


GPU = Where(device="cuda", kernel="", dtype="bfloat16", heads=32, head_dim=128, clock=CLOCKS["cuda"])
CPU = Where(device="cpu", kernel="", dtype="float32", heads=2, head_dim=32, clock=CLOCKS["cpu"])
BENCHES = {
    "cuda": Bench(
        kernels=("cudnn", "aten_flash"), cluster="h100_ndr400",
        sizes=((8, "128k"), (64, "256k"), (256, "1M")), where=GPU, calibration=(),
    ),
    "cpu": Bench(
        kernels=("aten_cpu",), cluster="", sizes=((8, "4k"), (16, "8k")), where=CPU,
        calibration=("quick=true", "ranks=2", "heads=2"),
    ),
}  # fmt: skip
ZIGZAG, FUSED = "method.layout=zigzag", "method.fuse=true"
METHODS: tuple[Point, ...] = (
    ("method=ring", "method.layout=striped"),
    ("method=ring", ZIGZAG),
    ("method=mesh", "method.layout=striped"),
    ("method=mesh", ZIGZAG),
    ("method=mesh", ZIGZAG, FUSED),
    ("method=all_gather", ZIGZAG),
    ("method=all_gather", ZIGZAG, FUSED),
    ("method=tokenring",),
    ("method=usp", "method.ulysses=8", ZIGZAG),
    ("method=mesh", "method.ulysses=8", ZIGZAG),
)
ITERATIONS = ("iters=5", "warmup=1", "parts=false")
TILES = {(8, 1): (2, 4), (16, 1): (4, 4), (64, 1): (8, 8), (256, 1): (16, 16), (64, 8): (2, 4), (256, 8): (4, 8)}
"""Mesh's tile by GPUs and heads' groups."""


def points(bench: Bench) -> list[Point]:
    """The points of all sizes, without kernel and cluster."""
    where, asked = bench.where, []
    common = [f"heads={where.heads}", f"head_dim={where.head_dim}", f"dtype={where.dtype}", "baseline=null"]
    for n, seqlen in bench.sizes:
        for method in METHODS:
            u = next((int(key.partition("=")[2]) for key in method if key.startswith("method.ulysses")), 1)
            if u > 1 and (u >= n or u > where.heads):
                continue
            tile = TILES.get((n, u)) if "method=mesh" in method else None
            keys = (f"method.tile=[{tile[0]},{tile[1]}]",) if tile else ()
            asked.append((*method, *keys, f"gpus={n}", f"seqlen={seqlen}", *common, "logger=none"))
    return asked


def measure(folder: Path, bench: Bench) -> Iterator[str]:
    """Measure what is not in `folder`; yields what failed."""
    for kernel in bench.kernels:
        for part in (_calibrate, _ranks_alone, _shares):
            try:
                yield from part(folder, bench, kernel)
            except Exception as error:  # the other parts go on
                yield f"{part.__name__.strip('_')}, {kernel}: {type(error).__name__}: {' '.join(str(error).split())}"


def _calibrate(folder: Path, bench: Bench, kernel: str) -> Iterator[str]:
    path, where = _calibrated(folder, kernel), bench.where
    if path.exists():
        return
    links = [f"cluster={bench.cluster}"] if bench.cluster else []
    keys = [f"name={kernel}", f"kernel={kernel}", f"device={where.device}", f"head_dim={where.head_dim}"]
    if code := calibrate.calibrate([*keys, f"out={path}", *links, *bench.calibration]):
        yield f"calibrating {kernel}: exit code {code}"


def _ranks_alone(folder: Path, bench: Bench, kernel: str) -> Iterator[str]:
    cluster = bench.cluster or "cpu_local"
    keys = (f"cluster={cluster}", f"kernel={kernel}", "mode=alone", f"device={bench.where.device}", *ITERATIONS)
    asked = [(*point, *keys) for point in points(bench)]
    for point, record in zip(asked, Runs(folder / "alone").ask(asked), strict=True):
        if record.status != "ok":
            yield f"{' '.join(point)}: {record.status}: {record.error}"


def _shares(folder: Path, bench: Bench, kernel: str) -> Sequence[str]:
    kept = _shares_kept(folder, kernel)
    if not kept.exists():
        kept.write_text(json.dumps(fused_blocks.shares(replace(bench.where, kernel=kernel))))
    return ()


def _calibrated(folder: Path, kernel: str) -> Path:
    return folder / "conf" / "cluster" / f"{kernel}.yaml"


def _shares_kept(folder: Path, kernel: str) -> Path:
    return folder / f"shares_{kernel}.json"


@cache
def measured(runs: Runs) -> Bench:
    """The bench, once all of it is in the folder of records.

    Raises RequestError for a device that has no bench, and where measurements are neither there nor asked for;
    SystemExit with what failed if they can't be had.
    """
    device, kernels = runs.options["device"], runs.options["kernels"]
    if device not in BENCHES:
        raise unknown("device", device, BENCHES)
    bench = BENCHES[device]
    bench = replace(bench, kernels=tuple(kernels.split(","))) if kernels else bench
    if flag(runs.options, "measure"):
        runs.failed += measure(runs.folder, bench)
    if missing := [kernel for kernel in bench.kernels if not _calibrated(runs.folder, kernel).exists()]:
        if runs.failed:
            raise SystemExit("\n".join(runs.failed))
        would = "measure=true on a GPU, first, would work"
        raise RequestError(f"records={runs.folder}", f"has no figures of {', '.join(missing)}", would)
    return bench


def _figures(runs: Runs) -> Mapping[str, Any]:
    return yaml.safe_load(_calibrated(runs.folder, measured(runs).kernels[0]).read_text())


def asked_for(runs: Runs) -> str:
    """The kernels, as they are asked for."""
    return f"kernels={','.join(measured(runs).kernels)}"


def device(runs: Runs) -> str:
    """The name of the GPU."""
    return _figures(runs)["device"]["name"]


def software(runs: Runs) -> str:
    """The GPU's software."""
    return _figures(runs)["sources"].get("software", "")


def kernels(runs: Runs) -> str:
    """The tables of each kernel."""
    bench, folder, text = measured(runs), runs.folder, []
    for kernel in bench.kernels:
        rows, code, lacking = _alone_rows(folder, bench, kernel)
        text += [f"## Ranks alone, {kernel}", f"Measured by code {', '.join(code)}.", of_rows(rows)]
        text += [f"Not measured: {'; '.join(lacking)}."] if lacking else []
        text += [f"## Rates, {kernel}, TFLOP/s", of_rows(_rates(folder, bench, kernel))]
        if (kept := _shares_kept(folder, kernel)).exists():
            table = of_rows(json.loads(kept.read_text()))
            text += [f"## A rank's blocks against one call, {kernel}", ABOUT_SHARES, table]
    return "\n\n".join(text)


def _alone_rows(folder: Path, bench: Bench, kernel: str) -> tuple[list[Row], list[str], list[str]]:
    """A row for each point that was measured with the kernel, the versions of the code that measured them, and the
    points that weren't.

    Raises RequestError if a point was measured twice, by two versions of the code or on two machines.
    """
    by_point: dict[str, Record] = {}
    for record in records.read_all(folder / "alone"):
        asked = _asked(record.config or {})
        if asked in by_point:
            rule = f"has two records of a point, {by_point[asked].run_id} and {record.run_id}"
            raise RequestError(f"folder={folder}", rule, "the folder without one of them would work")
        by_point[asked] = record
    rows, code, lacking, filed_as = [], [], [], KERNELS[kernel].published_as or kernel
    with Composer(folder / "conf") as composer:
        is_filed = filed_as in _filed(composer, bench)
        for point in points(bench):
            record = by_point.get(_asked(composer.compose([*point, f"kernel={kernel}"])))
            if record and record.status == "ok":
                simulated = {"calibrated": _simulated(composer, point, kernel, "auto")}
                if is_filed:
                    simulated[bench.cluster] = _simulated(composer, point, bench.cluster, filed_as)
                rows.append(_row(record, simulated))
                code.append((record.provenance or {})["code_version"])
            else:
                words = [key.rpartition(".")[2].rpartition("method=")[2] for key in point if key.startswith("method")]
                words += [key for key in point if key.startswith("gpus=")]
                lacking.append(" ".join(words) + (f" ({record.error})" if record else ""))
    return rows, list(dict.fromkeys(code)), lacking


def _asked(config: Mapping[str, Any]) -> str:
    """The keys that tell a point from others. Its run_id won't do: it depends on the machine that asks."""
    return json.dumps([config.get(key) for key in ("method", "gpus", "seqlen", "kernel")], sort_keys=True)


def _row(record: Record, simulated: Mapping[str, Record]) -> Row:
    measured_ms, step_ms = known(record.compute_ms), known(record.alone_ms_median)
    row = {
        "GPUs": str(record.gpus),
        "tokens": f"{record.seqlen // 1024}k",
        "method": f"{record.method} {record.variant or ''}".strip(),
        "layout": str(record.layout),
        "kernels + folds, ms": f"{known(record.kernels_ms):.1f} + {known(record.folds_ms):.1f}",
        "computed, ms": f"{measured_ms:.1f}",
        "step, ms": f"{step_ms:.1f}",
        "queueing": f"{known(record.interpreter_ms) / step_ms:.0%}",
    }
    if record.sm_mhz_median:
        row["clock, power"] = f"{record.sm_mhz_median:.0f} MHz, {record.gpu_power_w_median:.0f} W"
    for name, other in simulated.items():
        row[f"simulated, {name}, ms"] = f"{known(other.compute_ms):.1f}"
        row[f"ratio, {name}"] = f"{known(other.compute_ms) / measured_ms:.3f}"
    return row


def _filed(composer: Composer, bench: Bench) -> Mapping[str, Any]:
    """The tables of rates in the cluster's file, by name."""
    return composer.compose([f"cluster={bench.cluster}"])["cluster"]["device"]["rates"] if bench.cluster else {}


def _simulated(composer: Composer, point: Point, cluster: str, kernel: str) -> Record:
    keys = (f"cluster={cluster}", f"kernel={kernel}", "mode=simulate")
    return simulate_point(resolve(composer.compose([*point, *keys])))[0]


def _rates(folder: Path, bench: Bench, kernel: str) -> list[Row]:
    """A row for each phase and mask, in the dtype of the ranks."""
    measured = yaml.safe_load(_calibrated(folder, kernel).read_text())["device"]["rates"]
    with Composer() as composer:
        filed = _filed(composer, bench).get(KERNELS[kernel].published_as or kernel, {})
    table = next(table for table in measured.values() if bench.where.dtype in table["dtypes"])
    rows = []
    for case in RATES:
        row = {"": case.replace("_", ", ")}
        for tokens, rate in _square(table[case]).items():
            other = _square(filed.get(case, {})).get(tokens, rate)
            row[tokens] = f"{rate:.0f}" + (f" ({other:.0f})" if round(other) != round(rate) else "")
        rows.append(row)
    return rows


def _square(rates: Mapping[Any, float]) -> dict[str, float]:
    """The rates of blocks with as many queries as keys, by these."""
    sides = {size: str(size).split("x") for size in rates}
    return {side[0]: rates[size] for size, side in sides.items() if side[0] == side[-1]}
