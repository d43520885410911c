"""One GPU as a rank of many, beside its simulation: `python -m benchmarks.one_gpu folder=FOLDER [key=value ...]`.

  folder=results/one_gpu   what is measured goes there, and what is there is not measured again
  device=cuda              cpu: small shapes, for a try
  kernels=null             one or more of conf/kernel; null: those of torch
  page=false               true: simulate the same points, and write docs/results/one_gpu.md; this needs no GPU

Each kernel is calibrated on this GPU (`python -m sp_bench.calibrate`). One rank of several methods is executed by
itself, with copies for transfers (`mode=alone`): its blocks and folds are those of a rank among so many. The same
points are simulated with the calibrated figures, and with the published ones of the cluster file. So the table shows
what simulated compute is off by: by the simulator, if it is off with both, else by the published figures.

Then the blocks and folds of a rank of 8 are timed in turn with one call of the kernel on the whole sequence. A share is
the time of the call over 8 times that of the rank, by medians.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import fused_blocks
from benchmarks.fused_blocks import Where
from benchmarks.reports import RESULTS, about, known, run
from sp_bench import calibrate, records
from sp_bench.bench import resolve
from sp_bench.bench.simulated import simulate_point
from sp_bench.calibrating.clock import CLOCKS
from sp_bench.cli.arguments import only_keys, run_command
from sp_bench.cli.compose import Composer
from sp_bench.cluster.kernel_table import RATES
from sp_bench.errors import RequestError, unknown
from sp_bench.markdown import of_rows
from sp_bench.reading import read
from sp_bench.records import Record

REPORT = RESULTS / "one_gpu.md"
KEYS = {"folder": "results/one_gpu", "device": "cuda", "kernels": "", "page": "false"}
Row = dict[str, str]
Point = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured on a device."""

    kernels: tuple[str, ...]
    published: str
    """The cluster whose published figures are compared; empty: none."""
    sizes: tuple[tuple[int, str], ...]
    """Ranks and tokens of the whole sequence."""
    where: Where
    """The shape of heads and the dtype of all measurements."""
    calibration: tuple[str, ...]


GPU = Where(device="cuda", kernel="", dtype="bfloat16", heads=32, head_dim=128, clock=CLOCKS["cuda"])
CPU = Where(device="cpu", kernel="", dtype="float32", heads=2, head_dim=32, clock=CLOCKS["cpu"])
BENCHES = {
    "cuda": Bench(
        kernels=("cudnn", "aten_flash"), published="h100_ndr400",
        sizes=((8, "128k"), (64, "256k"), (256, "1M")), where=GPU, calibration=(),
    ),
    "cpu": Bench(
        kernels=("aten_cpu",), published="", sizes=((8, "4k"), (16, "8k")), where=CPU,
        calibration=("quick=true", "ranks=2", "heads=2"),
    ),
}  # fmt: skip
PUBLISHED_AS = {"aten_flash": "flash_attn"}
"""Kernels whose published figures are those of another kernel, by the same code."""
METHODS: tuple[Point, ...] = (
    ("method=ring", "method.layout=striped"),
    ("method=ring", "method.layout=zigzag"),
    ("method=mesh", "method.layout=striped"),
    ("method=mesh", "method.layout=zigzag"),
    ("method=mesh", "method.layout=zigzag", "method.fuse=true"),
    ("method=all_gather", "method.layout=zigzag"),
    ("method=all_gather", "method.layout=zigzag", "method.fuse=true"),
    ("method=tokenring",),
    ("method=usp", "method.ulysses=8", "method.layout=zigzag"),
    ("method=mesh", "method.ulysses=8", "method.layout=zigzag"),
)
ITERATIONS = ("iters=5", "warmup=1", "parts=false")
TILES = {(8, 1): (2, 4), (16, 1): (4, 4), (64, 1): (8, 8), (256, 1): (16, 16), (64, 8): (2, 4), (256, 8): (4, 8)}
"""Mesh's tile by GPUs and heads' groups."""


def points(bench: Bench) -> list[Point]:
    """The points of all sizes, without kernel and cluster."""
    where, found = bench.where, []
    common = [f"heads={where.heads}", f"head_dim={where.head_dim}", f"dtype={where.dtype}", "baseline=null"]
    for n, seqlen in bench.sizes:
        for method in METHODS:
            u = next((int(key.partition("=")[2]) for key in method if key.startswith("method.ulysses")), 1)
            if u > 1 and (u >= n or u > where.heads):
                continue
            tile = TILES.get((n, u)) if "method=mesh" in method else None
            keys = (f"method.tile=[{tile[0]},{tile[1]}]",) if tile else ()
            found.append((*method, *keys, f"gpus={n}", f"seqlen={seqlen}", *common, "logger=none"))
    return found


def measure(folder: Path, bench: Bench) -> Iterator[str]:
    """Measure what is not in `folder`; yields what failed."""
    for kernel in bench.kernels:
        for part in (_calibrate, _ranks_alone, _shares):
            try:
                yield from part(folder, bench, kernel)
            except Exception as error:  # the other parts go on
                yield f"{part.__name__}, {kernel}: {type(error).__name__}: {' '.join(str(error).split())}"


def _calibrate(folder: Path, bench: Bench, kernel: str) -> Iterator[str]:
    path, where = _calibrated(folder, kernel), bench.where
    if path.exists():
        return
    links = [f"cluster={bench.published}"] if bench.published else []
    keys = [f"name={kernel}", f"kernel={kernel}", f"device={where.device}", f"head_dim={where.head_dim}"]
    if code := calibrate.calibrate([*keys, f"out={path}", *links, *bench.calibration]):
        yield f"calibrating {kernel}: exit code {code}"


def _ranks_alone(folder: Path, bench: Bench, kernel: str) -> Iterator[str]:
    cluster = bench.published or "cpu_local"
    keys = (f"cluster={cluster}", f"kernel={kernel}", "mode=alone", f"device={bench.where.device}", *ITERATIONS)
    asked = [(*point, *keys) for point in points(bench)]
    for point, record in zip(asked, run(asked, folder / "alone"), strict=True):
        if record.status != "ok":
            yield f"{' '.join(point)}: {record.status}: {record.error}"


def _shares(folder: Path, bench: Bench, kernel: str) -> Iterator[str]:
    kept = _shares_kept(folder, kernel)
    if not kept.exists():
        kept.write_text(json.dumps(fused_blocks.shares(replace(bench.where, kernel=kernel))))
    yield from ()


def _calibrated(folder: Path, kernel: str) -> Path:
    return folder / "conf" / "cluster" / f"{kernel}.yaml"


def _shares_kept(folder: Path, kernel: str) -> Path:
    return folder / f"shares_{kernel}.json"


def page(folder: Path, bench: Bench) -> str:
    """The page of what `measure` has found."""
    about_it = yaml.safe_load(_calibrated(folder, bench.kernels[0]).read_text())
    text = [
        f"# One GPU as a rank of many\n\nMade by `python -m benchmarks.one_gpu`, on {about_it['device']['name']},"
        f" {about_it['sources'].get('software', '')}.",
        about(__doc__).partition("\n\n")[2],
    ]
    for kernel in bench.kernels:
        text += [f"## Ranks alone, {kernel}", of_rows(_alone_rows(folder, bench, kernel))]
        if bench.published:
            text += [f"## Rates, {kernel}, TFLOP/s measured (published)", of_rows(_rates(folder, bench, kernel))]
        if (kept := _shares_kept(folder, kernel)).exists():
            text += [f"## A rank's blocks against one call, {kernel}", of_rows(json.loads(kept.read_text()))]
    return "\n\n".join(text) + "\n"


def _alone_rows(folder: Path, bench: Bench, kernel: str) -> list[Row]:
    """A row for each point that was measured with the kernel."""
    found = {_asked(record.config or {}): record for record in records.read_all(folder / "alone")}
    rows = []
    with Composer(folder / "conf") as composer:
        for point in points(bench):
            record = found.get(_asked(composer.compose([*point, f"kernel={kernel}"])))
            if record and record.status == "ok":
                simulated = {"calibrated": _simulated(composer, point, kernel, "auto")}
                if bench.published and PUBLISHED_AS.get(kernel, kernel) in _published(composer, bench):
                    as_published = PUBLISHED_AS.get(kernel, kernel)
                    simulated["published"] = _simulated(composer, point, bench.published, as_published)
                rows.append(_row(record, simulated))
    return rows


def _asked(config: Mapping[str, Any]) -> str:
    """What a point was asked for. Its run_id won't do: it depends on the machine that asks."""
    return json.dumps([config.get(key) for key in ("method", "gpus", "seqlen", "kernel")], sort_keys=True)


def _row(record: Record, simulated: Mapping[str, Record]) -> Row:
    measured_ms = known(record.kernels_ms) + known(record.folds_ms)
    row = {
        "GPUs": str(record.gpus),
        "tokens": f"{record.seqlen // 1024}k",
        "method": f"{record.method} {record.variant or ''}",
        "layout": str(record.layout),
        "kernels + folds": f"{known(record.kernels_ms):.2f} + {known(record.folds_ms):.2f} ms",
        "whole step": f"{known(record.alone_ms_median):.2f} ms",
    }
    for name, other in simulated.items():
        row[f"simulated, {name}"] = f"{known(other.compute_ms):.2f} ms"
        row[f"{name} / measured"] = f"{known(other.compute_ms) / measured_ms:.3f}"
    return row


def _published(composer: Composer, bench: Bench) -> Mapping[str, Any]:
    """The published rates by kernel."""
    return composer.compose([f"cluster={bench.published}"])["cluster"]["device"]["rates"]


def _simulated(composer: Composer, point: Point, cluster: str, kernel: str) -> Record:
    return simulate_point(
        resolve(composer.compose([*point, f"cluster={cluster}", f"kernel={kernel}", "mode=simulate"]))
    )[0]


def _rates(folder: Path, bench: Bench, kernel: str) -> list[Row]:
    """The rates of square blocks, each with the published one of that size, whose batch differs."""
    measured = yaml.safe_load(_calibrated(folder, kernel).read_text())["device"]["rates"]
    with Composer() as composer:
        theirs = _published(composer, bench).get(PUBLISHED_AS.get(kernel, kernel), {})
    rows = []
    for name, table in measured.items():
        for case in RATES:
            row = {"figures": name, "case": case}
            for size, rate in table[case].items():
                other = theirs.get(case, {}).get(size)
                row[str(size)] = f"{rate:.0f}" + (f" ({other})" if other else "")
            rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or write the page; returns the exit code."""
    return run_command("benchmarks.one_gpu", __doc__ or "", _main, arguments)


def _main(arguments: list[str]) -> int:
    given = KEYS | only_keys(arguments, KEYS)
    if given["device"] not in BENCHES:
        raise unknown("device", given["device"], BENCHES)
    bench, folder = BENCHES[given["device"]], Path(given["folder"])
    if given["kernels"]:
        bench = replace(bench, kernels=tuple(given["kernels"].split(",")))
    if read(bool, {"true": True, "false": False}.get(given["page"], given["page"]), "page"):
        if missing := [kernel for kernel in bench.kernels if not _calibrated(folder, kernel).exists()]:
            would = f"python -m benchmarks.one_gpu folder={folder} on a GPU, first, would work"
            raise RequestError(f"folder={folder}", f"has no figures of {', '.join(missing)}", would)
        REPORT.write_text(page(folder, bench))
        print(REPORT)
        return 0
    failed = list(measure(folder, bench))
    print("\n".join(failed) or f"{folder}: all was measured")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
