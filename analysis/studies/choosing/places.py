"""The grid of points on which methods are compared, and the best method at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from sp_bench.analysis.number import Number, derived, of_record
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.records import Record

CLUSTERS = ("h100_ndr400", "a100_hdr200", "h20")
KV_HEADS = (32, 8)
SEQLENS = ("128k", "512k", "2M")
GPUS = (8, 32, 64, 256)
SPLIT_HEADS = ("ulysses", "usp")
METHODS = ("striped", "all_gather", "tokenring", "startrail", "mesh", *SPLIT_HEADS)
"""The methods that are compared. Ring is not among them: with a causal mask it is striped by default."""
NODE = 8
"""GPUs of a node on all of these clusters."""
TIE = 0.02
"""Methods within this share of each other count as equally fast, as the simulator is not more exact."""

Key = tuple[str, int, str, int]
"""Cluster, KV heads, seqlen, GPUs."""
Grid = dict[tuple[Key, str], Record]
KEYS: tuple[Key, ...] = tuple(product(CLUSTERS, KV_HEADS, SEQLENS, GPUS))


def asked(key: Key, method: str) -> Point:
    """The point of a method: causal, forward and backward, 32 heads of 128 in bfloat16. TokenRing is the hybrid."""
    cluster, kv_heads, seqlen, gpus = key
    options: dict[str, Any] = {"nodes": gpus // NODE} if method == "tokenring" else {}
    return point(method=method, gpus=gpus, seqlen=seqlen, kv_heads=kv_heads, cluster=cluster, **options)


def grid(runs: Runs) -> Grid:
    """The records of all methods at all keys, including points that can't be served."""
    return runs.by_key({(key, method): asked(key, method) for key in KEYS for method in METHODS})


@dataclass(frozen=True)
class Best:
    """The fastest method at a key, and the second: the next one whose plan is a different one."""

    record: Record
    second: Record | None

    @property
    def step(self) -> Number:
        """The time of the fastest method in ms."""
        return of_record(self.record, "step_ms_median")

    @property
    def margin(self) -> Number:
        """How much longer the second takes, as a share of the fastest time."""
        if self.second is None:
            return Number(None, "simulated", self.step.sources, "no other method can be served")
        return derived(lambda b, a: b / a - 1, of_record(self.second, "step_ms_median"), self.step)

    @property
    def tied(self) -> bool:
        """Whether the second counts as equally fast."""
        return self.second is not None and self.margin.known < TIE


def best(found: Grid, key: Key, methods: Sequence[str]) -> Best | None:
    """The fastest of the methods at a key; None if none can be served. Of equal plans, the one that is listed first."""
    ranked = sorted(
        (record for method in methods if (record := found[key, method]).status == "ok"),
        key=lambda record: record.step_ms_median or 0.0,
    )
    if not ranked:
        return None
    other = (record for record in ranked[1:] if _plan(record) != _plan(ranked[0]))
    return Best(ranked[0], next(other, None))


def leanest(found: Grid, key: Key, methods: Sequence[str]) -> Record | None:
    """The method with the least memory among those that tie with the fastest; None if none can be served."""
    served = [record for method in methods if (record := found[key, method]).status == "ok"]
    if not served:
        return None
    fastest = min(record.step_ms_median or 0.0 for record in served)
    equal = [record for record in served if (record.step_ms_median or 0.0) < (1 + TIE) * fastest]
    return min(equal, key=lambda record: record.peak_mem_bytes_max or 0)


def _plan(record: Record) -> tuple[float | None, float | None, int | None]:
    """What two methods with the same plan share: time, bytes and memory."""
    return record.step_ms_median, record.comm_bytes_per_gpu, record.peak_mem_bytes_max


def payload_over_bound(record: Record, field: str = "comm_bytes_lower_bound") -> Number:
    """The bytes of a GPU without the lse, over a bound: the fewest that a method with the same head split can send."""
    sent, lse = of_record(record, "comm_bytes_per_gpu"), of_record(record, "comm_bytes_statistics")
    bound = of_record(record, field)
    if not bound.value:
        return Number(None, "computed", sent.sources, record.error or "the bound is zero")
    return derived(lambda a, b, c: (a - b) / c, sent, lse, bound)
