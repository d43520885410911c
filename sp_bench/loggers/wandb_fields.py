"""The fields of a record by their place in a W&B run. Imports no wandb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sp_bench.records.schema import columns

CONFIG = (
    *("schema_version", "workload", "method", "impl", "tile_a", "tile_b", "variant", "layout", "mode", "phase"),
    *("gpus", "nodes", "seqlen", "batch", "heads", "kv_heads", "head_dim", "mask", "causal"),
    *("documents", "longest_document", "window", "dtype", "wire_dtype", "implementation"),
    *("model", "recompute", "sharded", "tensor_parallel", "workload_id", "source"),
    *("cluster", "alone_ranks", "kernel", "transport", "device_name", "iters", "warmup", "seed", "stragglers"),
)
"""Fields of the run's config: the request."""
PROVENANCE = ("code_version", "git_commit", "git_dirty", "versions")
"""Fields of the provenance in the run's config: none about the machine or its user."""
SUMMARY = (
    *("status", "error", "bound_by", "peak_mem_source", "comm_bytes_by_lane", "comm_bytes_by_link", "validation"),
    "clocks_held_down",
)
"""Fields of the run's summary that are no numbers."""
SAMPLE_COLUMNS = ("rank", "iteration", "phase", "part", "seconds")
MAX_TAG = 64
"""The most characters that W&B allows in a tag."""
TIMELINE = ("trace", "ranks")
"""The files beside a simulated record that its artifact has: some ranks' timelines, and all ranks' times."""


def config(record: Mapping[str, Any]) -> dict[str, Any]:
    """The run's config: the request and the code's version. None stays None."""
    provenance = record.get("provenance") or {}
    return {key: record[key] for key in CONFIG if key in record} | {
        key: provenance[key] for key in PROVENANCE if key in provenance
    }


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """The run's summary: status, error, bytes by lane and link, and all numbers that are not config. None stays None.

    Other texts and nested values are left out, since they include host names, arguments and environment variables.
    """
    return {
        key: record[key]
        for key, kind in columns().items()
        if key in record and key not in CONFIG and (key in SUMMARY or kind in (int, float))
    }


def group(record: Mapping[str, Any]) -> str | None:
    """The run's group: the sweep that the record was made in."""
    return ((record.get("config") or {}).get("logger") or {}).get("group")


def notes(record: Mapping[str, Any]) -> str | None:
    """The record's notes as a text; None if it has none."""
    return "\n".join(record.get("notes") or []) or None


def tags(record: Mapping[str, Any]) -> list[str]:
    """The run's tags: mode, cluster and status."""
    values = (record.get(key) for key in ("mode", "cluster", "status"))
    return [str(value)[:MAX_TAG] for value in values if value]


def name(record: Mapping[str, Any]) -> str:
    """The run's name, such as "mesh 16x16 256gpu"."""
    variant = f" {record['variant']}" if record.get("variant") else ""
    return f"{record.get('method')}{variant} {record.get('gpus')}gpu"


def sample_rows(samples: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The rows of the table of samples, in the order of `SAMPLE_COLUMNS`, from the content of <run_id>.samples.json."""
    return list(zip(*(samples[name] for name in SAMPLE_COLUMNS), strict=True))
