"""Records for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sp_bench import records
from sp_bench.measure.samples import STEP, Row, Samples
from sp_bench.records import Record

PLAIN: dict[str, Any] = {
    "status": "ok",
    "mode": "simulate",
    "workload": "attention",
    "method": "mesh",
    "tile_a": 16,
    "tile_b": 16,
    "variant": "16x16",
    "gpus": 256,
    "seqlen": 2**20,
    "batch": 1,
    "heads": 32,
    "kv_heads": 32,
    "head_dim": 128,
    "causal": True,
    "dtype": "bfloat16",
    "wire_dtype": "bfloat16",
    "phase": "forward_backward",
    "cluster": "h100_ndr400",
    "step_ms_median": 12.5,
    "comm_bytes_per_gpu": 7658,
    "comm_bytes_by_lane": {"forward/rings/kv/k": 1.5, "backward/kv": 2},
    "notes": ["2 ranks share a core", "so"],
    "config": {"method": {"name": "mesh", "tile": [16, 16]}, "logger": {"name": "wandb", "group": None}},
    "provenance": {"argv": ["a, b"], "host": "private-host", "git_commit": "abc", "environment": {}},
}


def made(run_id: str = "3fa2c0de", /, **changes: Any) -> Record:
    """A record with a few fields."""
    return Record(run_id=run_id, **(PLAIN | changes))


def columns(steps_ms: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[Any]]:
    """The samples beside a record whose phases took so long, by phase, rank and iteration."""
    rows = [
        Row(rank, iteration, phase, STEP, milliseconds / 1e3)
        for phase, by_rank in steps_ms.items()
        for rank, of_rank in enumerate(by_rank)
        for iteration, milliseconds in enumerate(of_rank)
    ]
    return Samples.of(rows).columns()


SHAPE = {"mode": "measure", "gpus": 2, "cluster": "local", "iters": 8}


def written(folder: Path, run_id: str, steps_ms: list[float] | None = None, **changes: Any) -> Path:
    """A measured record with samples of two ranks, of which the second is the slower; forward is a quarter."""
    changes = {"provenance": {**PLAIN["provenance"], "measured_at": str(folder)}, **SHAPE, **changes}
    samples = None
    if steps_ms:
        by_phase = {"forward": np.array(steps_ms) / 4, "backward": 3 * np.array(steps_ms) / 4}
        samples = columns({phase: [(0.9 * x).tolist(), x.tolist()] for phase, x in by_phase.items()})
        medians = {f"{phase}_ms_median": float(np.median(x)) for phase, x in by_phase.items()}
        changes = {"step_ms_median": float(np.median(steps_ms)), **medians, **changes}
    return records.write(folder, made(run_id, **changes), samples=samples)


def simulated(folder: Path, run_id: str, step_ms: float, **changes: Any) -> Path:
    return records.write(folder, made(run_id, step_ms_median=step_ms, **changes))


def spread(median_ms: float, by: float = 0.01, iters: int = 8) -> list[float]:
    return (median_ms * (1 + by * np.linspace(-1, 1, iters))).tolist()
