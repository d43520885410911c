"""Record files: written whole, and validated when read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sp_bench.extras import require
from sp_bench.records.record import SCHEMA_VERSION, Record
from sp_bench.records.schema import columns, complaints
from sp_bench.records.timeline import Timeline
from sp_bench.resources import write_whole

if TYPE_CHECKING:
    import pandas as pd

BESIDE = ("samples", "trace", "ranks", "hang", "timeline")
"""Names of the files that may stand beside a record, in <run_id>.<name>.json."""


class OtherVersionError(ValueError):
    """A record that older or newer code wrote."""


def write(
    folder: Path,
    record: Record,
    *,
    samples: Mapping[str, Any] | None = None,
    trace: Mapping[str, Any] | None = None,
    ranks: Mapping[str, Any] | None = None,
    hang: Mapping[str, Any] | None = None,
    timeline: Timeline | None = None,
) -> Path:
    """Write a record, after the files beside it; return its path. Those of an earlier record of the point are removed.

    Raises OSError if the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.run_id}.json"
    for name, content in zip(BESIDE, (samples, trace, ranks, hang, timeline), strict=True):
        other = path.with_suffix(f".{name}.json")
        if content is None:
            other.unlink(missing_ok=True)
        else:
            write_whole(other, _encoded(name, content))
    write_whole(path, json.dumps(record.to_dict(), indent=1) + "\n")
    return path


def _encoded(name: str, content: Any) -> bytes:
    """The content of a file beside a record. A simulated trace has no NaN, which samples may have, and is long."""
    if name == "trace":
        return msgspec.json.encode(content) + b"\n"
    return json.dumps(msgspec.to_builtins(content)).encode() + b"\n"


def beside(path: Path) -> dict[str, Path]:
    """The files beside the record at `path`, by their names in `BESIDE`."""
    others = {name: path.with_suffix(f".{name}.json") for name in BESIDE}
    return {name: other for name, other in others.items() if other.exists()}


def read(path: Path) -> Record:
    """The record in a file. Raises ValueError if it is no record, OSError if it can't be read."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a whole JSON object ({error})") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        kind = OtherVersionError if type(version) is int else ValueError
        raise kind(f"{path}: schema_version={version}, and this code reads {SCHEMA_VERSION}")
    if wrong := complaints(content):
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    try:
        return Record(**content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def read_all(folder: Path) -> list[Record]:
    """All records of a folder, by run_id. A file that is not a record is left out, with a warning."""
    records = []
    for path in sorted(folder.glob("*.json")):
        if not is_beside(path):
            try:
                records.append(read(path))
            except (OSError, ValueError) as error:
                warnings.warn(f"left out: {error}", stacklevel=2)
    return records


def is_beside(path: Path) -> bool:
    """Whether a JSON file's name is that of a file beside a record, or of one that is not whole yet."""
    return "." in path.stem


def load(folder: str | Path) -> pd.DataFrame:
    """All records of a folder as a frame, a row for each. A file that is not a record is left out, with a warning.

    Raises RequestError if pandas is not installed.
    """
    require("analysis", "records.load")
    import pandas as pd

    return pd.DataFrame([record.to_dict() for record in read_all(Path(folder))], columns=list(columns()))
