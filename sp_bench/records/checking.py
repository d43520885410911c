"""Can others rely on a record? Its schema, and what must hold between its fields and with the files beside it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from sp_bench.records.files import beside, read
from sp_bench.records.record import REPORTED, Record
from sp_bench.records.work import peak_of, step_flops
from sp_bench.records.workloads import workload_id

WALL_TIME = (
    *("rank_step_ms_min", "rank_step_ms_max", "compute_only_ms_median", "communication_only_ms_median"),
    *("core_ms_mean", "kernels_ms", "folds_ms", "interpreter_ms", "peak_rss_growth_bytes_max", "alone_ms_median"),
)
"""Fields that only a clock, or the kernel, can know."""
ROUNDING = 1e-6
"""The relative difference of two values that should be the same."""
PRINTED = 0.02
"""The same of two that others have printed, with few digits."""


def problems_of(path: Path) -> list[str]:
    """The errors of the record in a file; empty if it has none."""
    try:
        record = read(path)
    except (OSError, ValueError) as error:
        return [str(error).removeprefix(f"{path}: ")]
    problems = [*_identity(path, record), *_values(record), *_mode(record, beside(path))]
    samples = beside(path).get("samples")
    if record.mode == "measure" and record.status == "ok" and samples and record.workload == "attention":
        problems += _samples(record, samples)
    return problems


def _identity(path: Path, record: Record) -> Iterator[str]:
    if path.stem != record.run_id:
        yield f"run_id={record.run_id} is not the file's name, which {record.run_id}.json would be"
    if record.workload_id != (right := workload_id(vars(record))):
        yield f"workload_id={record.workload_id} is not that of its fields, {right}"


def _values(record: Record) -> Iterator[str]:
    """Between fields, in any mode."""
    if record.status != "ok":
        if not record.error:
            yield f"status={record.status} has no error, which would say why"
        return
    step_ms = record.step_ms_median
    if step_ms is None and record.alone_ms_median is None:
        yield "status=ok has no time; step_ms_median, or alone_ms_median with mode=alone, would be one"
    if record.heads % record.kv_heads:
        yield f"kv_heads={record.kv_heads} doesn't divide heads={record.heads}"
    for low, middle, high in (("ci95_low", "median", "ci95_high"), ("p25", "median", "p75")):
        values = [getattr(record, f"step_ms_{name}") for name in (low, middle, high)]
        if None not in values and values != sorted(values):
            yield f"step_ms_{low}, step_ms_{middle}, step_ms_{high} = {values} are not in order"
    if record.mfu is not None and not 0 < record.mfu <= 1:
        yield f"mfu={record.mfu} is not between 0 and 1"
    yield from _rates(record)
    if step_ms:
        tokens = (record.sequences or record.batch) * record.seqlen
        rates = {"iters_per_s": 1e3 / step_ms, "tokens_per_s": 1e3 * tokens / step_ms}
        for name, right in rates.items():
            if (value := getattr(record, name)) is not None and not _same(value, right):
                yield f"{name}={value} is not that of step_ms_median={step_ms}, {right:g}"
    sent, least = record.comm_bytes_per_gpu, record.comm_bytes_lower_bound
    if sent is not None and least is not None and sent - (record.comm_bytes_statistics or 0) < least * (1 - ROUNDING):
        yield f"comm_bytes_per_gpu={sent:g} is below comm_bytes_lower_bound={least:g}"
    any_split = record.comm_bytes_least
    if least is not None and any_split is not None and least < any_split * (1 - ROUNDING):
        yield f"comm_bytes_lower_bound={least:g} is below comm_bytes_least={any_split:g}"


def _rates(record: Record) -> Iterator[str]:
    """FLOP/s and MFU against those of the record's shape, mask, model and step, and these against the device's peak."""
    flops, step_ms, peak = step_flops(record), record.step_ms_median, peak_of(record)
    if flops is None or not step_ms:
        return
    tflops, within = flops / (step_ms * 1e9) / record.gpus, PRINTED if record.mode == REPORTED else ROUNDING
    if record.tflops_per_gpu is not None and not _same(record.tflops_per_gpu, tflops, within):
        yield (
            f"tflops_per_gpu={record.tflops_per_gpu:g} is not that of its shape and step_ms_median={step_ms}, "
            f"{tflops:g}"
        )
    if peak is None:
        return
    if record.mfu is not None and record.mfu <= 1 and not _same(record.mfu, tflops / peak.tflops, within):
        yield (
            f"mfu={record.mfu:g} is not {tflops:g} TFLOP/s of its shape and step over {peak.tflops:g}, the peak of "
            f"{peak.device} in {record.dtype}: {tflops / peak.tflops:g}"
        )
    if tflops > peak.tflops:
        yield (
            f"step_ms_median={step_ms} would be {tflops:,.0f} TFLOP/s a GPU, and the dense peak of {peak.device} in "
            f"{record.dtype} is {peak.tflops:g}: no such step takes less than "
            f"{step_ms * tflops / peak.tflops:.4g} ms"
        )


def _mode(record: Record, files: Mapping[str, Path]) -> Iterator[str]:
    """The fields that each mode must have, and those that it can't have."""
    if record.mode == "measure" and record.status == "ok":
        if "samples" not in files:
            yield f"mode=measure has no {record.run_id}.samples.json beside it"
        if not record.device_name:
            yield "mode=measure has no device_name"
        if record.step_ms_ci95_low is None:
            yield "mode=measure has no interval; step_ms_ci95_low and step_ms_ci95_high would be one"
    if record.mode != REPORTED and not record.provenance:
        yield f"mode={record.mode} has no provenance"
    if not record.measured:
        clocked = [name for name in WALL_TIME if getattr(record, name) is not None]
        if clocked and record.mode == "simulate":
            yield f"mode=simulate has {', '.join(clocked)}, which only a measurement has"
        if "samples" in files:
            yield f"mode={record.mode} has samples beside it, which only a measurement has"


def _samples(record: Record, path: Path) -> Iterator[str]:
    """Whether the median step of the samples is the record's."""
    try:
        columns = json.loads(path.read_bytes())
        slowest: dict[tuple[int, str], float] = {}
        for at, phase, part, seconds in zip(
            *(columns[name] for name in ("iteration", "phase", "part", "seconds")), strict=True
        ):
            if part == "step":
                slowest[at, phase] = max(slowest.get((at, phase), 0.0), seconds)
        steps: dict[int, float] = {}
        for (at, _), seconds in slowest.items():
            steps[at] = steps.get(at, 0.0) + seconds
        median_ms = 1e3 * statistics.median(steps.values())
    except (KeyError, OSError, TypeError, ValueError) as error:
        yield f"{path.name} holds no samples ({type(error).__name__}: {error})"
        return
    if record.step_ms_median is not None and not _same(record.step_ms_median, median_ms):
        yield f"step_ms_median={record.step_ms_median} is not the median of its samples, {median_ms:g}"


def _same(one: float, other: float, within: float = ROUNDING) -> bool:
    return math.isclose(one, other, rel_tol=within)
