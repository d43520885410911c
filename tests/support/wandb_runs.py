"""Offline W&B runs, read back, and a wandb that only pretends.

wandb 0.31 has no reader in Python any more: `entries` reads the log's form, and wandb's own messages what is in it.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

FAKE = """
class Table:
    def __init__(self, **_): pass
def Settings(**_): pass
def setup(_): pass
def teardown(): pass
"""
"""Parts of wandb that the writer needs before its first run."""


def shadow_wandb(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Puts another wandb in the writer's way."""
    (folder / "shadow").mkdir(exist_ok=True)
    (folder / "shadow" / "wandb.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder / "shadow"))


def entries(path: Path) -> Iterator[bytes]:
    """The entries of a .wandb file: a LevelDB log (blocks of 32 KiB; crc, length and part before each piece)."""
    data, at, entry = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at < len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        entry += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):
            yield entry
            entry = b""


def read_runs(folder: Path) -> list[SimpleNamespace]:
    """All offline runs in a folder, as W&B would upload them."""
    wandb_internal_pb2 = importlib.import_module("wandb.proto.wandb_internal_pb2")
    runs = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        found = SimpleNamespace(run=None, summary={}, exit_code=None, table=None, artifacts={}, raw=path.read_bytes())
        for entry in entries(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(entry)
            if record.HasField("run"):
                found.run = record.run
                found.config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("summary"):
                for item in record.summary.update:
                    keys, value = list(item.nested_key) or [item.key], json.loads(item.value_json)
                    at = found.summary
                    for key in keys[:-1]:
                        at = at.setdefault(key, {})
                    at[keys[-1]] = value
            if record.HasField("artifact"):
                found.artifacts[record.artifact.type] = record.artifact
            if record.HasField("exit"):
                found.exit_code = record.exit.exit_code
        if "samples" in found.summary:
            found.table = json.loads((path.parent / "files" / found.summary["samples"]["path"]).read_text())
        runs.append(found)
    return runs
