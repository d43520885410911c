"""The points of the study of packed documents: methods, layouts, lengths of documents and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sp_bench.analysis.ranking import Winner, by_time, step
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.methods import REGISTRY
from sp_bench.plan.assignments import ASSIGNMENTS
from sp_bench.plan.layout import LAYOUTS
from sp_bench.records import Record

CLUSTER = "h100_ndr400"
NODE = 8
"""GPUs of a node on that cluster."""
SETTING: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 128, "cluster": CLUSTER, "mode": "simulate"}
"""The setting of MagiAttention's benchmark of distributed attention."""
TOKENS = 8
"""Thousands of tokens of a GPU, as in that benchmark."""
DATA = ("magi_attention", "short", "long", "equal")
"""Lengths of documents, by their file in conf/data."""
GPUS = (8, 32, 64)
MAP_GPUS = 32
"""The number of GPUs at which each method runs on each layout."""
METHODS = (
    *("ring", "double_ring", "pass_q", "all_gather", "tokenring", "startrail", "mesh", "ulysses", "usp"),
    *("ulysses_all_gather", "hybrid_cp", "group_cast"),
)
"""The methods that are compared. Striped and zigzag are Ring on a layout, so that they are not listed."""
SPLIT_HEADS = ("ulysses", "usp", "ulysses_all_gather", "group_cast")
ALL_LAYOUTS = (*LAYOUTS, *ASSIGNMENTS)
CLOSE = 0.05
"""Two simulated times within this share of each other are too close to call."""

Cells = dict[tuple[str, str, str], Record]
"""Records at MAP_GPUS by data, method and layout."""
Fastest = dict[tuple[str, int, str], Record]
"""The record of each method's fastest layout, by data, GPUs and method."""


def asked(data: str, gpus: int, method: str, **keys: Any) -> Point:
    """The point of a method: causal documents, forward and backward. TokenRing is the hybrid."""
    nodes = {"nodes": gpus // NODE} if method == "tokenring" else {}
    pack = {"mask": "document", "data": data, "seqlen": f"{TOKENS * gpus}k"}
    return point(method=method, gpus=gpus, **pack, **SETTING, **nodes, **keys)


def cells(runs: Runs) -> Cells:
    """The records of all methods on each layout that they support, including points that can't be served."""
    places = [(method, layout) for method in METHODS for layout in REGISTRY[method].all_layouts()]
    return runs.by_key({(data, m, d): asked(data, MAP_GPUS, m, layout=d) for data in DATA for m, d in places})


def fastest(runs: Runs) -> Fastest:
    """The fastest layout of every method: of `cells`, and as layout=auto finds it at other numbers of GPUs."""
    of_layouts = cells(runs)
    best: Fastest = {}
    for (data, method, _), record in of_layouts.items():
        key = data, MAP_GPUS, method
        if key not in best or step(record) < step(best[key]):
            best[key] = record
    return best | runs.grid(asked, DATA, [gpus for gpus in GPUS if gpus != MAP_GPUS], METHODS)


def winner(found: Fastest, data: str, gpus: int, methods: Sequence[str]) -> Winner:
    """The fastest of the methods, and the others. Raises ValueError if none can be served."""
    if not (ranked := by_time(found[data, gpus, method] for method in methods)):
        error = found[data, gpus, methods[0]].error
        raise ValueError(f"no method can be served on data={data} gpus={gpus}: {error}")
    return Winner(ranked[0], tuple(ranked[1:]))
