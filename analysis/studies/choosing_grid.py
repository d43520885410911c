"""The points that "which method?" is asked of, and the best method at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from sp_bench.analysis.number import Number, derived, formula, of_record
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.records import Record

CLUSTERS = ("h100_ndr400", "a100_hdr200", "h20")
KV_HEADS = (32, 8)
SEQLENS = ("128k", "512k", "2M")
GPUS = (8, 32, 64, 256)
SPLIT_HEADS = ("ulysses", "usp")
METHODS = ("striped", "all_gather", "tokenring", "startrail", "mesh", *SPLIT_HEADS)
"""Ring with a causal mask is striped by default, and so is not listed apart."""
NODE = 8
"""GPUs of a node on all of these clusters."""
TIE = 0.02
"""Methods within this of each other count as equally fast: the simulator is not better than that."""

Key = tuple[str, int, str, int]
"""Cluster, key heads, seqlen, GPUs."""
Grid = dict[tuple[Key, str], Record]
KEYS: tuple[Key, ...] = tuple(product(CLUSTERS, KV_HEADS, SEQLENS, GPUS))


def asked(key: Key, method: str) -> Point:
    """The point: causal, forward and backward, 32 heads of 128 in bfloat16. TokenRing is the paper's hybrid."""
    cluster, kv_heads, seqlen, gpus = key
    options: dict[str, Any] = {"nodes": gpus // NODE} if method == "tokenring" else {}
    return point(method=method, gpus=gpus, seqlen=seqlen, kv_heads=kv_heads, cluster=cluster, **options)


def grid(runs: Runs) -> Grid:
    """The records of all methods at all keys, those that can't be served among them."""
    points = {(key, method): asked(key, method) for key in KEYS for method in METHODS}
    return dict(zip(points, runs.ask(points.values()), strict=True))


@dataclass(frozen=True)
class Best:
    """The fastest method at a key, and the next one that is not the same plan under another name."""

    record: Record
    second: Record | None

    @property
    def step(self) -> Number:
        """Its time."""
        return of_record(self.record, "step_ms_median")

    @property
    def margin(self) -> Number:
        """How much longer the second takes, as a share."""
        if self.second is None:
            return Number(None, "simulated", self.step.sources, "no other method can be served")
        return derived(lambda b, a: b / a - 1, of_record(self.second, "step_ms_median"), self.step)

    @property
    def tied(self) -> bool:
        """Whether the second is as fast as can be told."""
        return self.second is not None and self.margin.known < TIE


def best(found: Grid, key: Key, methods: Sequence[str]) -> Best | None:
    """The fastest of the methods at that key; None if none can be served. Of equal plans the first listed is it."""
    ranked = sorted(
        (record for method in methods if (record := found[key, method]).status == "ok"),
        key=lambda record: record.step_ms_median or 0.0,
    )
    if not ranked:
        return None
    other = (record for record in ranked[1:] if _plan(record) != _plan(ranked[0]))
    return Best(ranked[0], next(other, None))


def leanest(found: Grid, key: Key, methods: Sequence[str]) -> Record | None:
    """Of the methods that are as fast as the fastest, the one that needs least memory; None if none can be served."""
    served = [record for method in methods if (record := found[key, method]).status == "ok"]
    if not served:
        return None
    fastest = min(record.step_ms_median or 0.0 for record in served)
    equal = [record for record in served if (record.step_ms_median or 0.0) < (1 + TIE) * fastest]
    return min(equal, key=lambda record: record.peak_mem_bytes_max or 0)


def _plan(record: Record) -> tuple[float | None, float | None, int | None]:
    """What two names of one plan have in common."""
    return record.step_ms_median, record.comm_bytes_per_gpu, record.peak_mem_bytes_max


def tally(value: float, among: Sequence[Number], what: str) -> Number:
    """How many of the numbers something holds for."""
    source = formula(f"choosing-{what.replace(' ', '-')}", f"count of {what}", "this study")
    return Number(float(value), among[0].kind if among else "computed", (source, *_sources(among)))


def _sources(numbers: Sequence[Number]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(source for number in numbers for source in number.sources))


def setting(value: float, what: str) -> Number:
    """A value that was asked for, as a number of a text."""
    return Number(float(value), "computed", (formula(f"choosing-{what}", f"the {what} asked for", "this study"),))


def payload_over_bound(record: Record) -> Number:
    """What a GPU sends, lse apart, over what no method can go below that splits the heads as this one does."""
    sent, lse = of_record(record, "comm_bytes_per_gpu"), of_record(record, "comm_bytes_statistics")
    bound = of_record(record, "comm_bytes_lower_bound")
    if not bound.value:
        return Number(None, "computed", sent.sources, record.error or "the bound is zero")
    return derived(lambda a, b, c: (a - b) / c, sent, lse, bound)
