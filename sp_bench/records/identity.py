"""Which point a record is of: a hash of all that changes its numbers."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sp_bench.machine import cores_here, gpus_and_driver
from sp_bench.resources import PACKAGE

SIMULATED_CODE = (
    *("plan", "methods", "lower", "cluster", "labs", "simulate", "workload", "bench"),
    *("account.py", "check.py"),
)
"""What computes the numbers of a simulated point: folders and files of the package."""
MEASURED_CODE = (*SIMULATED_CODE, "kernels", "measure", "peers", "run")
"""A measured point's too: its variant is the one with the shortest simulated time."""
SIMULATED_PACKAGES = ("numpy", "numba")
KERNEL_PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4", "triton")


def run_id(config: Mapping[str, Any], *, measured: bool, on_gpus: bool = False) -> str:
    """The id of a point: a hash of its resolved config, and of the code and packages that its numbers depend on.

    A `measured` point's depends on the machine too and, `on_gpus`, on these and what drives them.
    """
    versions = {name: version(name) for name in SIMULATED_PACKAGES}
    content = {"config": config, "code": code_version(measured=measured), "versions": versions}
    if measured:
        content["machine"] = machine()
    if on_gpus:
        content["gpus"] = gpu_software()
    return digest(content)


def digest(content: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that stand for the content, whatever the order of its keys."""
    text = json.dumps(_text_keys(content), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text_keys(value: Any) -> Any:
    """The value with all keys of its mappings as text: numbers among texts can't be sorted."""
    return {str(key): _text_keys(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value


@cache
def code_version(*, measured: bool = True) -> str:
    """A hash of the sources that compute a measured point, or a simulated one."""
    return source_hash(PACKAGE, MEASURED_CODE if measured else SIMULATED_CODE)


def source_hash(package: Path, names: tuple[str, ...]) -> str:
    """A hash of these Python files of a package, and of those in these folders."""
    found = hashlib.sha256()
    for name in names:
        top = package / name
        for path in sorted([top] if top.is_file() else top.rglob("*.py")):
            found.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


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
        "torch": version("torch"),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("OMP_", "GLOO_"))},
    }


@cache
def gpu_software() -> dict[str, Any]:
    """What a number measured on GPUs depends on in addition: their models and driver, NCCL, cuDNN, kernel packages."""
    import torch
    from torch.cuda import nccl

    return {
        "gpus": gpus_and_driver(),
        "cuda": torch.version.cuda,
        "nccl": nccl.version() if torch.distributed.is_nccl_available() else None,
        "cudnn": torch.backends.cudnn.version(),
        "packages": {name: version(name) for name in KERNEL_PACKAGES},
    }


def version(package: str) -> str | None:
    """The version of an installed package; None where it isn't there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
