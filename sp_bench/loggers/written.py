"""Remember which records W&B has: in a small file beside each, <run_id>.wandb.json.

The file has, for each destination, a hash of the record and the files beside it when their run was written. Each record
has its own, because the array tasks of a sweep write to one folder concurrently.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from sp_bench.loggers.wandb_client import WandbSettings
from sp_bench.records import beside, write_whole


def content_hash(path: Path) -> str:
    """A hash of the record at `path` and the files beside it. Raises OSError."""
    digest = hashlib.sha256()
    for name, file in {"record": path, **beside(path)}.items():
        content = file.read_bytes()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def is_written(path: Path, settings: WandbSettings) -> bool:
    """Whether W&B has this record as it is now. Raises OSError if the record can't be read."""
    return _written(path).get(_destination(settings)) == content_hash(path)


def remember(path: Path, settings: WandbSettings, content: str) -> None:
    """Remember that W&B has the record with this `content_hash`. Raises OSError."""
    written = _written(path) | {_destination(settings): content}
    write_whole(_beside(path), json.dumps(written, indent=1) + "\n")


def _destination(settings: WandbSettings) -> str:
    return f"{settings.mode} {settings.entity or ''}/{settings.project}"


def _beside(path: Path) -> Path:
    return path.with_suffix(".wandb.json")


def _written(path: Path) -> dict[str, str]:
    try:
        content = json.loads(_beside(path).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
