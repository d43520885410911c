"""What of a record goes where in a W&B run. Knows records, not wandb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONFIG = (
    *("schema_version", "method", "tile_a", "tile_b", "variant", "layout", "mode", "phase"),
    *("gpus", "nodes", "seqlen", "batch", "heads", "kv_heads", "head_dim", "causal", "dtype", "wire_dtype"),
    *("cluster", "kernel", "device", "device_name", "model", "iters", "warmup", "verify", "seed", "git_commit"),
)
"""The fields of a record that say what was asked for."""
SAMPLE_COLUMNS = ("rank", "iteration", "phase", "ms")
MAX_TAG = 64
"""Characters that W&B allows in a tag."""


def config(record: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for; a None stays a None."""
    return {key: record[key] for key in CONFIG if key in record}


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """What came out: status, error, and every number that isn't config; a None stays a None.

    Other texts and nested values are left out: among them are host names, arguments and environment variables.
    """
    return {
        key: value
        for key, value in record.items()
        if key in ("status", "error") or (key not in CONFIG and (value is None or isinstance(value, (int, float))))
    }


def tags(record: Mapping[str, Any]) -> list[str]:
    """Mode, cluster and status."""
    values = (record.get(key) for key in ("mode", "cluster", "status"))
    return [str(value)[:MAX_TAG] for value in values if value]


def name(record: Mapping[str, Any]) -> str:
    """The run's name, such as "mesh 16x16 256gpu"."""
    variant = f" {record['variant']}" if record.get("variant") else ""
    return f"{record.get('method')}{variant} {record.get('gpus')}gpu"


def sample_rows(samples: Mapping[str, Any]) -> list[tuple[int | None, int, str, float | None]]:
    """The rows of the table of raw times (`SAMPLE_COLUMNS`), from the form that `Logger.log` takes.

    The phase is the name without its unit; the rank of a flat list is None.
    """
    rows = []
    for key, times in samples.items():
        per_rank = enumerate(times) if any(isinstance(item, list) for item in times) else [(None, times)]
        for rank, iterations in per_rank:
            rows += [(rank, i, key.removesuffix("_ms"), time) for i, time in enumerate(iterations)]
    return rows
