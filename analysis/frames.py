"""Records and their samples as pandas frames, in seconds and bytes, with methods in the order of all figures.

points("results")                        # a row for each record
samples(record, Path("results"))         # a row for each rank, iteration and phase
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from sp_bench import records
from sp_bench.analysis.number import RECORD_KINDS
from sp_bench.measure.samples import STEP
from sp_bench.methods import REGISTRY
from sp_bench.records import Record

PHASES = ("forward", "backward")


def points(folder: str | Path) -> pd.DataFrame:
    """The records of a folder, a row for each. Fields in milliseconds become seconds (step_s_median).

    `method` is an ordered category, and `mode` a category of words (measured, simulated). A warning names files that
    are no records.
    """
    frame = records.load(folder)
    for name in [name for name in frame.columns if "_ms_" in f"{name}_"]:
        frame[name] = np.asarray(frame[name], float) / 1e3
        frame = frame.rename(columns={name: f"{name}_".replace("_ms_", "_s_").removesuffix("_")})
    frame["mode"] = pd.Categorical([RECORD_KINDS[mode] for mode in frame["mode"]], [*RECORD_KINDS.values()])
    frame["method"] = pd.Categorical(frame["method"], methods_in_order(frame["method"]), ordered=True)
    return frame


def named(record: Record) -> str:
    """The method, with its variant if it has several."""
    return f"{record.method} {record.variant or ''}".strip()


def methods_in_order(names: Iterable[str]) -> list[str]:
    """Each name once: our methods in the registry's order, then others by name."""
    given = set(names)
    return [*(name for name in REGISTRY if name in given), *sorted(given - set(REGISTRY))]


def samples(record: Record, path: Path) -> pd.DataFrame:
    """Raw samples of a measured point's step: run_id, method, variant, mode, rank, iteration, phase and seconds.

    `path` is the record's file. Simulated and failed points have no samples, and give no rows.
    """
    file = records.beside(path).get("samples")
    columns = ["rank", "iteration", "phase", "part", "seconds"]
    stored = pd.DataFrame(json.loads(file.read_text()) if file else None, columns=columns)
    of_step = stored.loc[stored["part"] == STEP].drop(columns="part").reset_index(drop=True)
    phases = [phase for phase in PHASES if phase in set(of_step["phase"])]
    of_step["phase"] = pd.Categorical(of_step["phase"], phases, ordered=True)
    about = {"run_id": record.run_id, "method": record.method, "variant": record.variant or ""}
    for at, (name, value) in enumerate({**about, "mode": RECORD_KINDS[record.mode]}.items()):
        of_step.insert(at, name, value)
    return of_step


def iterations(found: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each iteration by phase, and of the step. A phase is as long as its slowest rank: all start together.

    `found` holds the samples of one point. The index of the result is the iteration.
    """
    slowest = found.pivot_table(index="iteration", columns="phase", values="seconds", aggfunc="max", observed=True)
    slowest.columns = slowest.columns.astype(str)
    return slowest.assign(step=slowest.sum(axis=1))
