"""The grid of points on which methods are compared, and the best method at each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from sp_bench.analysis.ranking import Winner, by_time, step
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.point.backing import TELLING
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
TIE = TELLING
"""Methods within this share of each other count as equally fast: simulations don't tell them apart."""

Key = tuple[str, int, str, int]
"""Cluster, KV heads, seqlen, GPUs."""
EVERY_VARIANT: tuple[Key, ...] = (("h100_ndr400", 32, "512k", 64), ("h100_ndr400", 32, "2M", 256))
"""Attentions whose time is shown against memory, of all variants."""
TILED_GPUS = (64, 256)
"""Numbers of GPUs on which all tiles of Mesh are compared."""
Grid = dict[tuple[Key, str], Record]
KEYS: tuple[Key, ...] = tuple(product(CLUSTERS, KV_HEADS, SEQLENS, GPUS))


def asked(key: Key, method: str) -> Point:
    """The point of a method: causal, forward and backward, 32 heads of 128 in bfloat16. TokenRing is the hybrid."""
    cluster, kv_heads, seqlen, gpus = key
    options: dict[str, Any] = {"nodes": gpus // NODE} if method == "tokenring" else {}
    if key in EVERY_VARIANT or (method == "mesh" and gpus in TILED_GPUS):
        options["every_variant"] = True
    return point(method=method, gpus=gpus, seqlen=seqlen, kv_heads=kv_heads, cluster=cluster, **options)


def grid(runs: Runs) -> Grid:
    """The records of all methods at all keys, including points that can't be served."""
    return runs.grid(asked, KEYS, METHODS)


def best(found: Grid, key: Key, methods: Sequence[str]) -> Winner | None:
    """The fastest of the methods at a key, and others with another plan; None if none can be served.

    Of equal plans, the one that is listed first.
    """
    ranked = by_time(found[key, method] for method in methods)
    return Winner(ranked[0], tuple(one for one in ranked if _plan(one) != _plan(ranked[0]))) if ranked else None


def tied(winner: Winner) -> bool:
    """Whether others count as equally fast."""
    return bool(winner.within(TIE))


def leanest(found: Grid, key: Key, methods: Sequence[str]) -> Record | None:
    """The method with the least memory among those that tie with the fastest; None if none can be served."""
    served = [record for method in methods if (record := found[key, method]).status == "ok"]
    equal = [record for record in served if step(record) < (1 + TIE) * min(map(step, served))]
    return min(equal, key=lambda record: record.peak_mem_bytes_max or 0, default=None)


def _plan(record: Record) -> tuple[float | None, float | None, int | None]:
    """Time, bytes and memory, which two methods with the same plan share."""
    return record.step_ms_median, record.comm_bytes_per_gpu, record.peak_mem_bytes_max
