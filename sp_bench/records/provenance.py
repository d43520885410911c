"""The provenance of a record: code, software versions, command line, host."""

from __future__ import annotations

import os
import platform
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from sp_bench.machine import output_of
from sp_bench.records.identity import code_version, version
from sp_bench.resources import ROOT

KEPT_VARIABLES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "SLURM_", "OMP_")
"""Prefixes of the only environment variables that a record keeps."""


@cache
def provenance() -> dict[str, Any]:
    """The provenance of records that this process writes. Of the environment it keeps only KEPT_VARIABLES."""
    versions = {package: version(package) for package in ("torch", "numpy", "numba", "hydra-core")}
    return {
        "code_version": code_version(),
        **git_state(ROOT),
        "versions": {"python": platform.python_version(), **versions},
        "argv": sys.argv[1:],
        "host": platform.node(),
        "platform": platform.platform(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(KEPT_VARIABLES)},
    }


def git_state(root: Path) -> dict[str, Any]:
    """The git commit of a checkout, and whether files differ from it; None if `root` is no checkout of this project.
    Files in docs/ are no part of what ran: the pages of studies that are made one after the other may differ.

    An installed package may stand in another project's repository, whose state says nothing about this code.
    """
    if not _is_checkout(root):
        return {"git_commit": None, "git_dirty": None}
    changed = git(root, "status", "--porcelain", "--", ".", ":!docs")
    return {"git_commit": git(root, "rev-parse", "HEAD"), "git_dirty": None if changed is None else bool(changed)}


def _is_checkout(root: Path) -> bool:
    """Whether a folder is the top of this project's repository."""
    top = git(root, "rev-parse", "--show-toplevel")
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]["name"]
    except (OSError, ValueError, KeyError):
        return False
    return project == "sp-bench" and top is not None and Path(top).resolve() == root.resolve()


def git(root: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails. GIT_* variables, as in a hook, may name another repository."""
    elsewhere = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    shown = output_of("git", "-C", str(root), *arguments, timeout_s=10, environment=elsewhere)
    return None if shown is None else shown.strip()
