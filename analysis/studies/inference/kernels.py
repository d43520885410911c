"""Kernels of few queries behind many keys, simulated beside published times of cuDNN on one GPU."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.checkout import place
from sp_bench.cli.words import tokens

Row = dict[str, str]
CLUSTERS = {"NVIDIA H200": "h200_ndr400", "NVIDIA B200": "b200"}


class Call(NamedTuple):
    """A published kernel call: causal, the queries are the last tokens of the keys."""

    gpu: str
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    ms: float

    @property
    def point(self) -> Point:
        """The call as a point of one GPU, which sends nothing."""
        lengths = {"seqlen": self.queries} | ({"kv_seqlen": self.keys} if self.keys != self.queries else {})
        shape = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "phase": "forward"}
        return point(
            method="ring", gpus=1, layout="contiguous", cluster=CLUSTERS[self.gpu], kernel="cudnn", baseline=None,
            trace=0, **lengths, **shape,
        )  # fmt: skip


def published() -> Iterator[Call]:
    """The calls of analysis/published/kernel_prefill.csv."""
    with (place("analysis") / "published" / "kernel_prefill.csv").open() as file:
        for row in csv.DictReader(file):
            shape = (int(row[name]) for name in ("heads", "kv_heads", "head_dim", "new_tokens", "kv_seqlen"))
            yield Call(row["gpu"], *shape, ms=float(row["ms"]))


def errors(runs: Runs) -> dict[Call, float]:
    """Simulated over published time, less one, of each call."""
    records = runs.by_key({call: call.point for call in published()})
    return {call: (record.step_ms_median or 0.0) / call.ms - 1 for call, record in records.items()}


def kernels(runs: Runs) -> list[Row]:
    """A row for each GPU and number of heads: errors by the queries of a call, in the median and the largest."""
    by_call = errors(runs)
    rows = list[Row]()
    for gpu, heads, kv_heads in dict.fromkeys((call.gpu, call.heads, call.kv_heads) for call in by_call):
        alike = {call: error for call, error in by_call.items() if (call.gpu, call.heads) == (gpu, heads)}
        row = {"GPU": gpu.removeprefix("NVIDIA "), "heads": f"{heads}/{kv_heads}"}
        behind = {call: error for call, error in alike.items() if call.keys > call.queries}
        for queries in sorted({call.queries for call in behind}):
            row[f"{tokens(queries)} behind 8k-128k"] = _range([e for c, e in behind.items() if c.queries == queries])
        row["2k-16k alone"] = _range([error for call, error in alike.items() if call not in behind])
        sizes = [abs(error) for error in alike.values()]
        rows.append(row | {"median": f"{median(sizes):.1%}", "largest": f"{max(sizes):.1%}"})
    return rows


def _range(errors: list[float]) -> str:
    return f"{min(errors):+.0%} to {max(errors):+.0%}"
