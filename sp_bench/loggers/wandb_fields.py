"""What of a record goes where in a W&B run. Knows records, not wandb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sp_bench.records.schema import columns

CONFIG = (
    *("schema_version", "workload", "method", "impl", "tile_a", "tile_b", "variant", "layout", "mode", "phase"),
    *("gpus", "nodes", "seqlen", "batch", "heads", "kv_heads", "head_dim", "mask", "causal", "dtype", "wire_dtype"),
    *("cluster", "alone_ranks", "kernel", "device_name", "iters", "warmup", "seed", "stragglers"),
)
"""The fields of a record that say what was asked for."""
PROVENANCE = ("code_version", "git_commit", "git_dirty", "versions")
"""What goes to the config of where a record comes from: nothing of the machine and its user."""
SUMMARY = ("status", "error", "bound_by", "peak_mem_source", "comm_bytes_by_lane", "comm_bytes_by_link")
"""The fields that say what came out and are no numbers."""
SAMPLE_COLUMNS = ("rank", "iteration", "phase", "part", "seconds")
MAX_TAG = 64
"""Characters that W&B allows in a tag."""
TIMELINE = ("trace", "ranks")
"""What stands beside a simulated record, and makes its artifact: some ranks' timelines, and all ranks' times."""


def config(record: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, and of which code; a None stays a None."""
    provenance = record.get("provenance") or {}
    return {key: record[key] for key in CONFIG if key in record} | {
        key: provenance[key] for key in PROVENANCE if key in provenance
    }


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """What came out: status, error, bytes by lane and link, and every number that isn't config; a None stays a None.

    Other texts and nested values are left out: among them are host names, arguments and environment variables.
    """
    return {
        key: record[key]
        for key, kind in columns().items()
        if key in record and key not in CONFIG and (key in SUMMARY or kind in (int, float))
    }


def group(record: Mapping[str, Any]) -> str | None:
    """The sweep that the record was made in."""
    return ((record.get("config") or {}).get("logger") or {}).get("group")


def notes(record: Mapping[str, Any]) -> str | None:
    """What a reader of the numbers must know."""
    return "\n".join(record.get("notes") or []) or None


def tags(record: Mapping[str, Any]) -> list[str]:
    """Mode, cluster and status."""
    values = (record.get(key) for key in ("mode", "cluster", "status"))
    return [str(value)[:MAX_TAG] for value in values if value]


def name(record: Mapping[str, Any]) -> str:
    """The run's name, such as "mesh 16x16 256gpu"."""
    variant = f" {record['variant']}" if record.get("variant") else ""
    return f"{record.get('method')}{variant} {record.get('gpus')}gpu"


def sample_rows(samples: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The rows of the table of raw times, in the order of `SAMPLE_COLUMNS`, from what <run_id>.samples.json has."""
    return list(zip(*(samples[name] for name in SAMPLE_COLUMNS), strict=True))
