"""Measured kernels beside published ones: `python -m benchmarks.measured_kernels FILE [cluster=NAME]` prints a table.

FILE is what `python -m sp_bench.calibrate device=cuda out=FILE` wrote of this GPU. Mesh on 256 GPUs is simulated with
each of its kernels, and with each that has figures in the cluster file whose links it took: that of such GPUs, or NAME.
So the steps differ by what blocks, folds and copies cost, and by the tile that is best then.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reports import known
from sp_bench.bench import resolve
from sp_bench.bench.simulated import simulate_point
from sp_bench.calibrating.gpu_file import base_cluster
from sp_bench.cli.arguments import keys_and_paths, run_command
from sp_bench.cli.compose import Composer
from sp_bench.cluster import Cluster
from sp_bench.cluster.cluster import NETWORK_KEYS
from sp_bench.errors import RequestError
from sp_bench.markdown import of_rows
from sp_bench.records import Record
from sp_bench.resources import conf_files

WOULD_WORK = "what python -m sp_bench.calibrate device=cuda out=FILE writes would work"
GPUS, TOKENS = 256, ("256k", "1M")
MEASURED = "measured_kernels"
"""What the file is called where it is composed, beside conf/cluster."""


def compare(path: Path, cluster: str | None = None, *, gpus: int = GPUS, tokens: Sequence[str] = TOKENS) -> str:
    """The table of a calibrated file. Raises RequestError for a file that is none, or has nothing to stand beside."""
    config = _calibrated(path)
    base = base_cluster(config["device"]["name"], cluster, conf_files("cluster"))
    if any(base.get(key) != config.get(key) for key in NETWORK_KEYS):
        rule = f"has other links than {path}, so that steps would differ by more than kernels"
        raise RequestError(f"cluster={base['name']}", rule, "the cluster that the sources there name would work")
    cases = [(base["name"], kernel) for kernel in _kernels(base)] + [(MEASURED, kernel) for kernel in _kernels(config)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        (own / "cluster").mkdir()
        shutil.copy(path, own / "cluster" / f"{MEASURED}.yaml")
        with Composer(own) as composer:
            for seqlen in tokens:
                found = [(name, _simulated(composer, gpus, seqlen, name, kernel)) for name, kernel in cases]
                measured_ms = min(known(record.step_ms_median) for name, record in found if name == MEASURED)
                rows += [_row(record, measured_ms) for _, record in found]
    return of_rows(rows)


def _calibrated(path: Path) -> Mapping[str, Any]:
    """The content of a cluster file all of whose kernels were measured."""
    try:
        config = yaml.safe_load(path.read_text())
        Cluster.build(config)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RequestError) as error:
        raise RequestError(str(path), f"can't be read as a cluster file ({error})", WOULD_WORK) from None
    figures = {name: kernel["figures"] for name, kernel in config["device"]["rates"].items()}
    if others := sorted(name for name, figure in figures.items() if figure != "measured"):
        raise RequestError(str(path), f"has figures that were not measured, of {', '.join(others)}", WOULD_WORK)
    return config


def _kernels(config: Mapping[str, Any]) -> list[str]:
    """The kernels that a cluster file has figures of, each once."""
    return list(dict.fromkeys(rates.get("kernel", name) for name, rates in config["device"]["rates"].items()))


def _simulated(composer: Composer, gpus: int, seqlen: str, cluster: str, kernel: str) -> Record:
    """Mesh with one kernel of a cluster file. Raises RequestError for what can't be simulated with it."""
    common = ("method=mesh", "mode=simulate", "logger=none")
    config = composer.compose([*common, f"gpus={gpus}", f"seqlen={seqlen}", f"cluster={cluster}"])
    config["cluster"]["device"]["kernel"] = kernel
    return simulate_point(resolve(config))[0]


def _row(record: Record, measured_ms: float) -> dict[str, str]:
    """One simulated step, and the fastest of those with measured kernels over it."""
    step_ms = known(record.step_ms_median)
    return {
        "GPUs": str(record.gpus),
        "tokens": f"{record.seqlen // 1024}k",
        "kernel": str(record.kernel),
        "mesh": str(record.variant),
        "step": f"{step_ms:.2f} ms",
        "blocks and folds": f"{known(record.compute_ms):.2f} ms",
        "exposed": f"{known(record.exposed_comm_ms):.2f} ms",
        "MFU": "" if record.mfu is None else f"{record.mfu:.1%}",
        "the measured step over it": f"{measured_ms / step_ms:.3f}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    return run_command("benchmarks.measured_kernels", __doc__ or "", _print, arguments)


def _print(arguments: list[str]) -> int:
    given, paths = keys_and_paths(arguments, ["cluster"])
    if len(paths) != 1:
        raise RequestError(" ".join(paths) or "no FILE", "must be one cluster file", WOULD_WORK)
    print(compare(Path(paths[0]), given.get("cluster")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
