"""The report of a first hour, in Markdown: what the doctor found, errors against fp64, times beside simulated ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sp_bench import markdown, records
from sp_bench.records import Record

ERRORS = ("err_out", "err_dq", "err_dk", "err_dv")


def report(folder: Path, steps: Mapping[str, Mapping[str, Any]]) -> str:
    """The report of a folder whose steps have run so far."""
    parts = ["# The first hour", _steps(steps)]
    doctor = folder / "doctor.json"
    if doctor.exists():
        parts += ["## Doctor", _doctor(json.loads(doctor.read_text()))]
    simulated = {_point(record): record for record in _records(folder / "simulated")}
    for name, title, table in (
        ("exactness", "Errors against fp64", _exactness),
        ("headline", "Measured", lambda of_part: _measured(of_part, simulated)),
        ("alone", "One rank alone, without its peers", _alone),
    ):
        if of_part := _records(folder / name):
            parts += [f"## {title}", table(of_part)]
    return "\n\n".join(parts) + "\n"


def _records(folder: Path) -> list[Record]:
    in_folder = records.read_all(folder) if folder.is_dir() else []
    return sorted(in_folder, key=lambda record: (record.gpus, record.seqlen, record.mask, record.method))


def _point(record: Record) -> tuple:
    return (record.method, record.gpus, record.seqlen, record.mask, record.dtype, record.phase)


def _steps(steps: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [[name, f"`{' '.join(step['command'])}`", _state(step)] for name, step in steps.items()]
    return markdown.table(["step", "command", "state"], rows)


def _state(step: Mapping[str, Any]) -> str:
    return "cut off" if step["exit_code"] is None else f"exit code {step['exit_code']}"


def _doctor(found: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{number} {status}" for status, number in found["counts"].items())
    rows = [[x["status"], f"{x['section']}: {x['check']}", x["found"], x["fix"]] for x in found["findings"]]
    bad = [row for row in rows if row[0] != "ok"]
    return "\n\n".join([f"{counts}.", *([markdown.table(["status", "check", "found", "fix"], bad)] if bad else [])])


def _exactness(found: Sequence[Record]) -> str:
    rows = []
    for x in found:
        errors = ["-" if (error := getattr(x, name)) is None else f"{error:.1e}" for name in ERRORS]
        name = f"{x.method} {x.variant or ''}".strip()
        rows.append([name, x.gpus, x.mask, x.dtype, x.kernel or "-", *errors, x.error or x.status])
    return markdown.table(["method", "ranks", "mask", "dtype", "kernel", "out", "dq", "dk", "dv", "status"], rows)


def _measured(found: Sequence[Record], simulated: Mapping[tuple, Record]) -> str:
    rows = []
    for x in found:
        name = f"{x.method} {x.variant or ''}".strip()
        if x.status != "ok" or x.step_ms_median is None:
            rows.append([x.seqlen, name, f"{x.status}: {x.error}", *["-"] * 5])
            continue
        step = f"{x.step_ms_median:.4g} [{x.step_ms_ci95_low:.4g}, {x.step_ms_ci95_high:.4g}]"
        beside = simulated.get(_point(x))
        wanted = beside.step_ms_median if beside else None
        ratio = f"{wanted:.4g} ({wanted / x.step_ms_median:.2f}x)" if wanted else "-"
        mfu = f"{x.mfu:.1%}" if x.mfu else "-"
        rate = "-" if x.tflops_per_gpu is None else f"{x.tflops_per_gpu:.4g}"
        equal = "=" if x.comm_bytes_per_gpu == x.comm_bytes_expected else f"not {x.comm_bytes_expected}"
        sent = "-" if x.comm_bytes_per_gpu is None else f"{x.comm_bytes_per_gpu:.4g} {equal}"
        rows.append([x.seqlen, name, step, ratio, rate, mfu, sent, " ".join(x.notes or ())])
    head = ["seqlen", "method", "step, ms [95%]", "simulated, ms", "TFLOP/s a rank", "MFU", "bytes sent, closed form"]
    return markdown.table([*head, "notes"], rows)


def _alone(found: Sequence[Record]) -> str:
    rows = [
        [x.gpus, x.seqlen, x.method, f"{x.alone_ms_median:.4g}" if x.alone_ms_median else x.error or x.status]
        for x in found
    ]
    return markdown.table(["GPUs", "seqlen", "method", "rank 0, ms"], rows)
