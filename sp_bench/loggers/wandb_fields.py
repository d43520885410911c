"""The fields of a record by their place in a W&B run. Imports no wandb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sp_bench.records.rows import CONFIG, SUMMARY
from sp_bench.records.schema import quantities

PROVENANCE = ("code_version", "git_commit", "git_dirty", "versions")
"""Fields of the provenance in the run's config: none about the machine or its user."""
SAMPLE_COLUMNS = ("rank", "iteration", "phase", "part", "seconds")
MAX_TAG = 64
"""The most characters that W&B allows in a tag."""
TIMELINE = ("trace", "ranks")
"""The files beside a simulated record that its artifact has: some ranks' timelines, and all ranks' times."""


def config(record: Mapping[str, Any]) -> dict[str, Any]:
    """The run's config: the request and the code's version. None stays None."""
    provenance = record.get("provenance") or {}
    return _placed(record, CONFIG) | {key: provenance[key] for key in PROVENANCE if key in provenance}


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """The run's summary: status, error, bytes by lane and link, and all numbers that are not config. None stays None.

    Other texts and nested values are left out, since they include host names, arguments and environment variables.
    """
    return _placed(record, SUMMARY)


def _placed(record: Mapping[str, Any], place: str) -> dict[str, Any]:
    return {name: record[name] for name, one in quantities().items() if one.wandb == place and name in record}


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
