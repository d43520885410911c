"""Measured kernels beside published ones: `python -m benchmarks.measured_kernels FILE [cluster=NAME]` prints a table.

`python -m sp_bench.calibrate device=cuda out=FILE` writes FILE on a GPU, with the links of the cluster NAME (default:
the one with such GPUs). Mesh on 256 GPUs is simulated with each kernel of FILE and of that cluster's file. The steps
differ only by the cost of blocks, folds and copies, and by the fastest tile.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sp_bench.analysis.measured import known
from sp_bench.calibrating.gpu_file import base_cluster
from sp_bench.cli.arguments import keys_and_paths, run_command
from sp_bench.cli.compose import Composer
from sp_bench.cluster import Cluster
from sp_bench.cluster.cluster import NETWORK_KEYS
from sp_bench.errors import RequestError
from sp_bench.markdown import of_rows
from sp_bench.point import resolve
from sp_bench.point.simulated import simulate_point
from sp_bench.records import Record
from sp_bench.resources import conf_files

WOULD_WORK = "what python -m sp_bench.calibrate device=cuda out=FILE writes would work"
GPUS, TOKENS = 256, ("256k", "1M")
MEASURED = "measured_kernels"
"""The name under which FILE is composed, beside conf/cluster."""


def compare(path: Path, cluster: str | None = None, *, gpus: int = GPUS, tokens: Sequence[str] = TOKENS) -> str:
    """The table of a calibrated file. Raises RequestError for another file, and if no cluster file has these links."""
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
                records = [(name, _simulated(composer, gpus, seqlen, name, kernel)) for name, kernel in cases]
                measured_ms = min(known(record.step_ms_median) for name, record in records if name == MEASURED)
                rows += [_row(record, measured_ms) for _, record in records]
    return of_rows(rows)


def _calibrated(path: Path) -> Mapping[str, Any]:
    """The content of a cluster file. Raises RequestError unless all of its kernels were measured."""
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
    """The kernels that have figures in a cluster file, each once."""
    return list(dict.fromkeys(rates.get("kernel", name) for name, rates in config["device"]["rates"].items()))


def _simulated(composer: Composer, gpus: int, seqlen: str, cluster: str, kernel: str) -> Record:
    """Mesh simulated with one kernel of a cluster file. Raises RequestError if that is not possible."""
    common = ("method=mesh", "mode=simulate", "logger=none")
    config = composer.compose([*common, f"gpus={gpus}", f"seqlen={seqlen}", f"cluster={cluster}"])
    config["cluster"]["device"]["kernel"] = kernel
    return simulate_point(resolve(config))[0]


def _row(record: Record, measured_ms: float) -> dict[str, str]:
    """The row of a simulated step, with the fastest step of measured kernels over it."""
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
        "fastest measured / step": f"{measured_ms / step_ms:.3f}",
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
