"""A point's run_id: a hash of everything its numbers depend on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sp_bench.machine import cores_here, cpu_model, gpus_and_driver
from sp_bench.resources import place

SIMULATED_CODE = (
    *("plan", "methods", "lower", "cluster", "labs", "simulate", "workload", "point", "account", "check"),
    *("packing.py", "reading.py", "records/workloads.py"),
)
"""Folders and files of the package that compute and name a simulated point, with the data that stands in them."""
MEASURED_CODE = (*SIMULATED_CODE, "kernels", "measure", "peers", "run", "launch.py", "machine.py", "termination.py")
"""Those of a measured point. Simulation is part of it: it chooses the variant."""
CACHE = "__pycache__"
SIMULATED_PACKAGES = ("numpy", "numba")
GPU_VARIABLES = ("NCCL_", "TORCH_NCCL_", "NVTE_", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "PYTORCH_")
"""Prefixes of variables that change what is measured on GPUs."""
LOGS = ("NCCL_DEBUG_FILE",)
"""Variables with such a prefix that change nothing, and often differ from job to job."""


def run_id(config: Mapping[str, Any], *, measured: bool, gpu_packages: tuple[str, ...] | None = None) -> str:
    """The run_id of a point: a hash of its resolved config and of the code and packages its numbers depend on.

    For a `measured` point it also depends on the machine and, on GPUs, on them and their software: `gpu_packages` are
    the packages whose code it may run there.
    """
    versions = {name: version(name) for name in SIMULATED_PACKAGES}
    content = {"config": config, "code": code_version(measured=measured), "versions": versions}
    if measured:
        content["machine"] = machine()
    if gpu_packages is not None:
        content["gpus"] = gpu_software(gpu_packages)
    return digest(content)


def digest(content: Mapping[str, Any]) -> str:
    """A hash of the content in 16 hexadecimal digits. The order of keys doesn't matter."""
    text = json.dumps(_text_keys(content), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text_keys(value: Any) -> Any:
    """The value with the keys of its mappings as text: mixed types can't be sorted."""
    return {str(key): _text_keys(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value


@cache
def code_version(*, measured: bool = True) -> str:
    """A hash of the files that compute a measured, or a simulated, point: sources, and the data that they read."""
    names = MEASURED_CODE if measured else SIMULATED_CODE
    return hashlib.sha256("".join(f"{name} {source_hash(name)}\n" for name in names).encode()).hexdigest()[:16]


@cache
def source_hash(name: str) -> str:
    """A hash of one file of this package, or of all files below a folder, whatever their kind, but for caches and
    hidden ones.
    """
    top, found = place(name), hashlib.sha256()
    for path in [top] if top.is_file() else sorted(_files(top)):
        below = os.path.relpath(path, top)
        found.update(below.encode() + b"\0" + Path(path).read_bytes())
    return found.hexdigest()


def _files(top: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(top):
        folders[:] = [each for each in folders if each != CACHE and not each.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


@cache
def machine() -> dict[str, Any]:
    """The machine that a measured number depends on: host, processor, cores, torch, thread settings."""
    return {
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": cores_here(),
        "torch": version("torch"),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("OMP_", "GLOO_"))},
    }


@cache
def gpu_software(packages: tuple[str, ...]) -> dict[str, Any]:
    """GPUs and software that a measured number depends on: driver, CUDA, NCCL, cuDNN, packages, and their variables."""
    import torch
    from torch.cuda import nccl

    return {
        "gpus": gpus_and_driver(),
        "cuda": torch.version.cuda,
        "nccl": nccl.version() if torch.distributed.is_nccl_available() else None,
        "cudnn": torch.backends.cudnn.version(),
        "packages": {name: version(name) for name in packages},
        "environment": gpu_environment(),
    }


def gpu_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that change what is measured on GPUs."""
    return {
        name: value for name, value in sorted(environment.items())
        if name.startswith(GPU_VARIABLES) and name not in LOGS
    }  # fmt: skip


@cache
def version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
