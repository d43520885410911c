"""Decoding over long caches: which method, and how many GPUs share heads, simulated, beside what bounds a step."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from sp_bench.analysis.measured import known
from sp_bench.analysis.ranking import as_fast, by_method, by_time
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.cli.words import tokens
from sp_bench.records import Record

METHODS = ("helix", "tree", "dcp", "pass_q")
CLUSTER = "h100_ndr400"
GPUS = (8, 64)
CACHES = (2**10, 2**13, 2**17, 2**20)
"""Keys of each sequence."""
BATCHES = (1, 32)
DEGREES = (1, 2, 4, 8)
"""GPUs that share heads."""


class Shape(NamedTuple):
    """The heads of an attention."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int = 128
    v_head_dim: int | None = None

    @property
    def latent(self) -> bool:
        """Whether values are a part of keys."""
        return self.v_head_dim is not None


SHAPES = (
    Shape("llama3_8b: 32 heads, 8 of keys", 32, 8),
    Shape("llama3_70b: 64 heads, 8 of keys", 64, 8),
    Shape("deepseek_v3: 128 heads, latent keys", 128, 1, 576, 512),
)


class Setting(NamedTuple):
    """A batch of sequences on some GPUs."""

    shape: Shape
    cache: int
    batch: int
    gpus: int
    degree: int = 1


SETTINGS = [Setting(*each) for each in product(SHAPES, CACHES, BATCHES, GPUS)]
SPLIT = [
    Setting(shape, cache, batch, gpus, degree)
    for shape, gpus, batch, cache, degree in product(SHAPES[:2], GPUS, BATCHES, CACHES[-2:], DEGREES)
]
Row = dict[str, str]


def _point(setting: Setting, method: str) -> Point:
    shape = {key: value for key, value in setting.shape._asdict().items() if key != "name"}
    step = {"workload": "decode", "kv_seqlen": setting.cache, "batch": setting.batch, "seqlen": 1}
    decode = {"latent": setting.shape.latent, "tensor_parallel": setting.degree}
    usual = {"phase": "forward", "cluster": CLUSTER, "baseline": None, "trace": 0}
    return point(method=method, gpus=setting.gpus, **step, **shape, **usual, decode=decode)


def fastest(runs: Runs) -> list[Row]:
    """A row for each setting: every method's step, the fastest ones, what bounds the first, and a GPU's cache."""
    rows = []
    for setting, steps in runs.by_setting(_point, SETTINGS, METHODS):
        row = {"attention": setting.shape.name, "cache": tokens(setting.cache), "batch": str(setting.batch)}
        row |= {"GPUs": str(setting.gpus)} | by_method(steps, digits=2)
        rows.append(row | {"cache a GPU, MB": _megabytes(by_time(steps.values())[0])})
    return rows


def shared(runs: Runs) -> list[Row]:
    """A row for each attention, batch, cache and number of GPUs: Helix's step by how many GPUs share heads."""
    records = runs.by_key({setting: _point(setting, "helix") for setting in SPLIT})
    rows: dict[Setting, Row] = {}
    for setting in SPLIT:
        key = setting._replace(degree=1)
        about = {"attention": setting.shape.name, "GPUs": str(setting.gpus), "batch": str(setting.batch)}
        row = rows.setdefault(key, about | {"cache": tokens(setting.cache)})
        row[f"TP {setting.degree}, ms"] = f"{known(records[setting].step_ms_median):.3g}"
    for key, row in rows.items():
        steps = {degree: known(records[key._replace(degree=degree)].step_ms_median) for degree in DEGREES}
        row["fastest"] = ", ".join(f"TP {degree}" for degree in as_fast(steps))
    return [*rows.values()]


def _megabytes(record: Record) -> str:
    assert record.cache_bytes is not None, record.error
    return f"{record.cache_bytes / 1e6:,.3g}"
