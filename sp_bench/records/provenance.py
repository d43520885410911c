"""Which point a record is of, and where it comes from."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sp_bench.machine import cores_here
from sp_bench.resources import PACKAGE

KEPT_VARIABLES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "SLURM_", "OMP_")
"""Prefixes of the environment variables that a record keeps; no other is."""


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
    digest = hashlib.sha256()
    for folder in (PACKAGE / "methods", PACKAGE):  # a checkout has links, which rglob doesn't follow
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
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
