"""Records: one flat JSON object for each benchmark point, written whole or not at all.

`python -m sp_bench` writes them to <results_dir>/<run_id>.json, and beside them raw samples in <run_id>.samples.json
or, where a point is simulated, each rank's times in <run_id>.ranks.json and some ranks' timelines, which Perfetto
opens, in <run_id>.trace.json.
`load(dir)` gives all of them as a pandas frame.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sp_bench.machine import cores_here

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 3
STATUSES = ("ok", "oom", "unsupported", "incorrect", "timeout", "failed")
MODES = ("measure", "simulate")
KEPT_VARIABLES = ("NCCL_", "TORCH_", "SLURM_", "OMP_")
"""Prefixes of the environment variables that a record keeps; no other is."""


@dataclass(kw_only=True)
class Record:
    """One benchmark point: what was asked, what came out, and where it comes from. None is "not known"."""

    run_id: str
    """Hash of the resolved config, the code version and, if measured, the machine."""
    status: str
    mode: str
    """measure or simulate; the two are never mixed."""
    method: str
    gpus: int
    seqlen: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: str
    wire_dtype: str
    phase: str
    cluster: str
    schema_version: int = SCHEMA_VERSION
    error: str | None = None
    impl: str | None = None
    """With method=peer, whose code ran."""
    layout: str | None = None
    tile_a: int | None = None
    tile_b: int | None = None
    variant: str | None = None
    """Which of the method's variants ran, where it has several: its tile, ring or group sizes."""
    nodes: int | None = None
    kernel: str | None = None
    device_name: str | None = None
    seed: int | None = None
    iters: int | None = None
    warmup: int | None = None

    step_ms_median: float | None = None
    step_ms_p25: float | None = None
    step_ms_p75: float | None = None
    step_ms_ci95_low: float | None = None
    step_ms_ci95_high: float | None = None
    forward_ms_median: float | None = None
    backward_ms_median: float | None = None
    iters_per_s: float | None = None
    tokens_per_s: float | None = None
    tflops_per_gpu: float | None = None
    """Model FLOPs: causal counts half, backward 2.5 times forward."""
    mfu: float | None = None
    """None where the device's peak is not known."""

    comm_bytes_per_gpu: float | None = None
    """Sent, counted, the mean over the GPUs: from the tensors handed to the network if measured, else from the plan."""
    comm_bytes_busiest_gpu: int | None = None
    """Of the GPU that sends most."""
    comm_bytes_expected: float | None = None
    """The method's closed form."""
    comm_bytes_lower_bound: float | None = None
    """Payload that no method can go below which splits the heads as this one does (account.lower_bound_bytes)."""
    comm_bytes_statistics: float | None = None
    """The part of comm_bytes_per_gpu that is lse, which the papers leave out."""
    comm_bytes_by_lane: dict[str, float] | None = None
    """comm_bytes_per_gpu by phase, lane, tensor and field."""
    comm_bytes_across_nodes_max: int | None = None
    """Of the rank that sends most to other nodes."""
    comm_bytes_by_link: dict[str, float] | None = None
    """Bytes that cross links of each class (port, nic, ...) in one step, over the number of GPUs."""
    interface_bytes_per_gpu: float | None = None
    """Measured on shaped hosts: what their links' counters say was sent, headers included; hosts' sum over the GPUs."""
    bound_ms: float | None = None
    """What the step takes at least on that cluster: each phase its blocks, or its busiest link, or its latencies."""
    bound_by: str | None = None
    """What sets most of it: compute, latency, or a class of links."""
    compute_ms: float | None = None
    """Blocks and folds of the busiest rank in one step; on shared cores this includes waiting for a core."""
    compute_only_ms_median: float | None = None
    """Measured: the same plans without their transfers, in turn with the step."""
    communication_only_ms_median: float | None = None
    """Measured: the same plans without their blocks, in turn with the step."""
    exposed_comm_ms: float | None = None
    """The step less compute_only_ms_median or, where that was not measured, less compute_ms."""
    rank_step_ms_min: float | None = None
    """Measured: the median of each rank's own steps, of the rank with the shortest."""
    rank_step_ms_max: float | None = None
    peak_mem_bytes_max: int | None = None
    """What a rank holds at most for the attention: inputs, buffers, accumulators, results."""
    peak_mem_bytes_min: int | None = None
    """Of the rank with least, where memory is measured."""
    peak_mem_source: str | None = None
    """What these two are: computed from the plans, or of which tensors they are the sum."""
    peak_mem_bytes_expected: int | None = None
    """Computed from the plans, for lanes as late as the waits allow (account.peak_bytes)."""
    peak_rss_growth_bytes_max: int | None = None
    """Measured on CPU: how much a rank's resident memory grew, from before its inputs to its peak in the first step."""
    peak_rss_growth_bytes_min: int | None = None
    rank_idle_ms_max: float | None = None
    """Of a simulated step: how long the first rank to end waits for the last one, over the phases."""
    rank_imbalance: float | None = None
    """Blocks and folds of the busiest rank over the mean of all."""
    err_out: float | None = None
    """Relative L2 error against fp64, of the scaled-down problem of the correctness gate; so for the gradients."""
    err_dq: float | None = None
    err_dk: float | None = None
    err_dv: float | None = None
    candidates: list[dict[str, Any]] | None = None
    """Where an option was auto: every variant with its simulated or bounded time."""
    stragglers: dict[str, Any] | None = None
    """Slow ranks, slow links and noise that were simulated."""
    notes: list[str] | None = None
    """What a reader must know about these numbers."""
    config: dict[str, Any] | None = None
    """All that was asked for, resolved: what `--cfg` prints."""
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status}: must be one of {', '.join(STATUSES)}")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode}: must be one of {', '.join(MODES)}")

    def to_dict(self) -> dict[str, Any]:
        """The flat JSON object."""
        return asdict(self)


def run_id(config: Mapping[str, Any]) -> str:
    """The id of a point: a hash of its resolved config and of the code that runs it."""
    text = json.dumps({"config": _text_keys(config), "code": code_version()}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text_keys(value: Any) -> Any:
    """The value with all keys of its mappings as text: numbers among texts can't be sorted."""
    return {str(key): _text_keys(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value


@cache
def machine() -> dict[str, Any]:
    """What a measured number depends on beside its config: host, processor, cores, torch, thread settings."""
    model = ""
    if (info := Path("/proc/cpuinfo")).exists():
        model = next((line for line in info.read_text().splitlines() if line.startswith("model name")), "")
    return {
        "host": platform.node(),
        "cpu": model.partition(":")[2].strip() or platform.processor(),
        "cores": cores_here(),
        "torch": _version("torch"),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("OMP_", "GLOO_"))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def code_version() -> str:
    """A hash of the suite's sources: sp_bench/ and methods/."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for package in ("methods", "sp_bench"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def provenance() -> dict[str, Any]:
    """Where a record comes from: code, versions, command line, the few environment variables that matter."""
    versions = {package: _version(package) for package in ("torch", "numpy", "numba", "hydra-core")}
    return {
        "code_version": code_version(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if (changed := _git("status", "--porcelain")) is None else bool(changed),
        "versions": {"python": platform.python_version(), **versions},
        "argv": sys.argv[1:],
        "host": platform.node(),
        "platform": platform.platform(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(KEPT_VARIABLES)},
    }


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write(folder: Path, record: Record, **beside: Mapping[str, Any] | None) -> Path:
    """Write a record, and first what stands beside it. Raises OSError where the folder can't be written."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in beside.items():
        if content is not None:
            write_whole(folder / f"{record.run_id}.{name}.json", json.dumps(content) + "\n")
    path = folder / f"{record.run_id}.json"
    write_whole(path, json.dumps(record.to_dict(), indent=1) + "\n")
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, whatever ends this process. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def read(path: Path) -> Record:
    """One record. Raises ValueError with what is wrong with the file."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not a whole JSON object ({error})") from None
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        version = content.get("schema_version") if isinstance(content, dict) else None
        raise ValueError(f"{path}: schema_version={version}, and this code reads {SCHEMA_VERSION}")
    known = {f.name for f in fields(Record)}
    if unknown := sorted(set(content) - known):
        raise ValueError(f"{path}: unknown fields {', '.join(unknown)}")
    try:
        return Record(**content)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None


def read_all(folder: Path) -> list[Record]:
    """All records of a folder, by run_id. A file that is not a record is named in a warning and left out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        if "." in path.stem:  # what stands beside a record, or is not whole yet
            continue
        try:
            found.append(read(path))
        except ValueError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
    return found


def load(folder: str | Path) -> pd.DataFrame:
    """All records of a folder as a frame, one row for each. Files that are no records are named in a warning."""
    import pandas as pd

    return pd.DataFrame(
        [record.to_dict() for record in read_all(Path(folder))], columns=[f.name for f in fields(Record)]
    )
