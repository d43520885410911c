"""What command lines have in common. Imports little, so that a wrong flag is answered at once."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sp_bench.errors import RequestError


def config_dir(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The folder that --config-dir names, None without it, and the other arguments.

    Raises RequestError where the folder is missing.
    """
    rest = list(arguments)
    if "--config-dir" not in rest:
        return None, rest
    at = rest.index("--config-dir")
    if at + 1 == len(rest):
        raise RequestError("--config-dir", "needs a folder", "--config-dir my_conf would work")
    own = Path(rest[at + 1])
    del rest[at : at + 2]
    return own, rest


def writable_folder(key: str, name: str) -> Path:
    """The folder that a key names, made if need be. Raises RequestError where no file can be written to it.

    Permission bits would not tell root of a read-only mount, nor anybody of a full disk, so it is tried.
    """
    folder, done = Path(name), "made"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = "written"
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        rule = f"can't be {done} ({error.strerror})"
        raise RequestError(f"{key}={name}", rule, f"{key}=results would work") from None
    return folder


def sweep_name(arguments: Sequence[str]) -> str:
    """What the points of a sweep have in common as a W&B group, which may have 128 characters: what was asked for.

    The same when it is started again with its records or runs elsewhere.
    """
    text = " ".join(a for a in arguments if a.partition("=")[0].partition(".")[0] not in ("results_dir", "logger"))
    return text if len(text) <= 128 else f"{text[:119]} {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def in_group(config: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The config with its W&B group, unless it asks for one; its record has it too, for a later upload."""
    return {**config, "logger": {**config["logger"], "group": config["logger"].get("group") or group}}
