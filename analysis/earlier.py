"""before=CHECKOUT: code of another checkout of this repository, which a study runs in turn with its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sp_bench.errors import RequestError
from sp_bench.records.provenance import git


def checkout(given: str) -> Path:
    """The folder of before=. Raises RequestError if it is no checkout."""
    if not given or not (Path(given) / "sp_bench").is_dir():
        rule = "has no folder sp_bench"
        raise RequestError(f"before={given}", rule, "the folder of a checkout, as git worktree add makes, would work")
    return Path(given).resolve()


def environment(root: Path) -> Mapping[str, str]:
    """The environment of a Python process that runs the code of a checkout, and keeps the bytecode that it compiles."""
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return rest | {"PYTHONPATH": str(root)}


def in_words(given: str) -> str:
    """The sentence that names the code of before=; empty if there is none."""
    if not given:
        return ""
    commit = git(checkout(given), "log", "-1", "--format=`%h` of %cs")
    return f"Before is the code of {commit or given}, in processes in turn with those of now."
