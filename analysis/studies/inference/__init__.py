"""Prefill behind a history: which method is fastest for a part of a prompt, simulated, beside what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

from sp_bench.analysis.ranking import by_method, step
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.analysis.studies.inference.kernels import kernels
from sp_bench.analysis.studies.inference.models import of_models, packs, steps
from sp_bench.analysis.studies.inference.whole_prompts import prompts, published
from sp_bench.cli.words import tokens
from sp_bench.records import Record

__all__ = ["crossings", "fastest", "kernels", "of_models", "packs", "prompts", "published", "steps"]

METHODS = ("ring", "pass_q", "tokenring", "ulysses", "all_gather", "usp", "mesh")
CLUSTER = "h100_ndr400"
GPUS = (8, 64)
HISTORIES = (2**17, 2**20)
"""Keys that are cached before the new part of a prompt."""
PARTS = (2**11, 2**13, 2**15, 2**17)
"""New tokens: queries, and as many more keys."""


class Shape(NamedTuple):
    """The heads of an attention."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int = 128


SHAPES = (
    Shape("llama3_8b: 32 heads, 8 of keys", 32, 8),
    Shape("llama3_70b: 64 heads, 8 of keys", 64, 8),
    Shape("64 heads, all of keys", 64, 64),
)


class Setting(NamedTuple):
    """A part of a prompt on some GPUs."""

    shape: Shape
    history: int
    gpus: int
    part: int


SETTINGS = [Setting(*each) for each in product(SHAPES, HISTORIES, GPUS, PARTS)]
Row = dict[str, str]


def _point(setting: Setting, method: str) -> Point:
    shape = {key: value for key, value in setting.shape._asdict().items() if key != "name"}
    lengths = {"seqlen": setting.part, "kv_seqlen": setting.history + setting.part}
    usual = {"phase": "forward", "cluster": CLUSTER, "baseline": None, "trace": 0}
    return point(method=method, gpus=setting.gpus, **lengths, **shape, **usual)


def fastest(runs: Runs) -> list[Row]:
    """A row for each setting: every method's step, the fastest ones, and what bounds the first."""
    rows = []
    for setting, records in runs.by_setting(_point, SETTINGS, METHODS):
        row = {"attention": setting.shape.name, "history": tokens(setting.history), "GPUs": str(setting.gpus)}
        rows.append(row | {"new tokens": tokens(setting.part)} | by_method(records))
    return rows


def crossings(runs: Runs) -> list[Row]:
    """A row for each attention, history and number of GPUs: the largest part for which pass-Q sends less than Ring, by
    the closed form, and that for which it is faster in simulation.
    """
    of_points, rows = runs.grid(_point, SETTINGS, ("ring", "pass_q")), []
    for shape, history, gpus in product(SHAPES, HISTORIES, GPUS):
        pairs = {
            part: [of_points[Setting(shape, history, gpus, part), name] for name in ("ring", "pass_q")]
            for part in PARTS
        }
        less = [part for part, (ring, pass_q) in pairs.items() if _sent(pass_q) < _sent(ring)]
        faster = [part for part, (ring, pass_q) in pairs.items() if step(pass_q) < step(ring)]
        row = {"attention": shape.name, "history": tokens(history), "GPUs": str(gpus)}
        row |= {"sends less up to": f"{shape.kv_heads / shape.heads:.1%} of all keys"}
        row |= {"sends less, new tokens": _up_to(less), "is faster, new tokens": _up_to(faster)}
        rows.append(row | {"ring sends, MB; pass_q": "; ".join(_sent_range(pairs, i) for i in range(2))})
    return rows


def _up_to(parts: list[int]) -> str:
    return f"up to {tokens(max(parts))}" if parts else "none of these"


def _sent_range(here: Mapping[int, list[Record]], which: int) -> str:
    sent = [_sent(pair[which]) / 1e6 for pair in here.values()]
    return f"{min(sent):,.0f} to {max(sent):,.0f}"


def _sent(record: Record) -> float:
    assert record.comm_bytes_per_gpu is not None, record.error
    return record.comm_bytes_per_gpu
