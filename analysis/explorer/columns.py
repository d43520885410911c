"""Records as the columns of the explorer's page: settings as codes into their values, results as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sp_bench.analysis.explorer.fields import RESULTS, SETTINGS
from sp_bench.analysis.frames import methods_in_order
from sp_bench.analysis.number import RECORD_KINDS, command
from sp_bench.records import Record
from sp_bench.records.interval import interval as step_interval
from sp_bench.records.rows import Result

NAMED = (
    *("gpus", "seqlen", "batch", "heads", "kv_heads", "head_dim", "mask", "causal", "phase", "dtype", "wire_dtype"),
    *("kernel", "workload", "mode", "method", "cluster", "iters", "warmup", "seed", "logger", "results_dir", "verify"),
)
"""Keys that have a column of their own, or that don't change a point's value."""


def columns(found: Mapping[Path, Record]) -> dict[str, Any]:
    """The page's columns. Raises nothing: what a record doesn't have is null.

    `settings` has for each field its distinct values in order and a code for each record; `results` a number for each;
    `low` and `high` the intervals; `id` and `written` the run_ids and when their files were written.
    """
    rows = list(found.values())
    texts = [setting_values(record) for record in rows]
    settings = {name: _coded(name, [text[name] for text in texts]) for name in SETTINGS}
    results = {name: [_scaled(getattr(record, name), one) for record in rows] for name, one in RESULTS.items()}
    ends = {name: [_interval(record, name, one) for record in rows] for name, one in RESULTS.items() if one.interval}
    return {
        "settings": {name: column for name, column in settings.items() if column["values"] != [None]},
        "results": {name: column for name, column in results.items() if any(v is not None for v in column)},
        "low": {name: [pair[0] for pair in pairs] for name, pairs in ends.items()},
        "high": {name: [pair[1] for pair in pairs] for name, pairs in ends.items()},
        "id": [record.run_id for record in rows],
        "written": [path.stat().st_mtime for path in found],
    }


def setting_values(record: Record) -> dict[str, Any]:
    """The settings of a record by name. The options are arguments that no other column shows."""
    known = record.provenance or {}
    own = {
        "mode": RECORD_KINDS[record.mode],
        **_options(record),
        "code": str(known.get("code_version") or "")[:8] or None,
        "phase": record.phase.replace("_", " + "),
    }
    return {name: own[name] if name in own else getattr(record, name) for name in SETTINGS}


def _options(record: Record) -> dict[str, str | None]:
    """The arguments that no other column shows: the method's, the cluster's, and others."""
    words = command(record.config).split(" ") if record.config else []
    kept = [word for word in words if word and word.partition("=")[0] not in NAMED]
    starts = {"method_options": "method.", "cluster_options": "cluster.", "options": ""}
    by_name: dict[str, list[str]] = {name: [] for name in starts}
    for word in kept:
        by_name[next(name for name, start in starts.items() if word.startswith(start))].append(word)
    return {name: " ".join(of_name) or None for name, of_name in by_name.items()}


def _coded(name: str, values: Sequence[Any]) -> dict[str, Any]:
    distinct = list(dict.fromkeys(values))
    if name == "method":
        ordered: list[Any] = methods_in_order(distinct)
    else:
        numbers = all(value is None or isinstance(value, int | float) for value in distinct)
        ordered = sorted(distinct, key=lambda v: (v is None, v if numbers and v is not None else str(v)))
    code = {value: i for i, value in enumerate(ordered)}
    return {"values": ordered, "codes": [code[value] for value in values]}


def _scaled(value: float | None, result: Result) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value * result.factor:.9g}")


def _interval(record: Record, name: str, result: Result) -> tuple[float | None, float | None]:
    """The interval of a result, which follows from the step's; (None, None) where that has none.

    A measured step has its 95% interval, unless its iterations are too few to tell of the spread. A simulated one has
    what two of three measured steps like it would be within, if it is validated (point.backing). Both are the record's.
    """
    step, value = record.step_ms_median, getattr(record, name)
    interval = step_interval(record) if step else None
    if not step or value is None or not interval or not interval.meaningful or interval.ends is None:
        return None, None
    if record.measured and result.interval == "of simulated":
        return None, None
    by = [end / step for end in interval.ends]
    low, high = (value / by[1], value / by[0]) if result.interval == "inverse" else (value * by[0], value * by[1])
    return _scaled(low, result), _scaled(high, result)
