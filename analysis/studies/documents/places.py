"""The points of the study of packed documents: methods, dealings, lengths of documents and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sp_bench.analysis.number import Number, derived, of_record
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.methods import REGISTRY
from sp_bench.plan.dealers import DEALERS
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
DEALT_GPUS = 32
"""The number of GPUs at which each method runs on each dealing."""
METHODS = ("ring", "double_ring", "pass_q", "all_gather", "tokenring", "startrail", "mesh", "ulysses", "usp")
"""The methods that are compared. Striped and zigzag are Ring on a layout, so that they are not listed."""
SPLIT_HEADS = ("ulysses", "usp")
DEALINGS = (*LAYOUTS, *DEALERS)
CLOSE = 0.05
"""Two simulated times within this share of each other are too close to call."""

Dealt = dict[tuple[str, str, str], Record]
"""Records at DEALT_GPUS by data, method and dealing."""
Fastest = dict[tuple[str, int, str], Record]
"""The record of each method's fastest dealing, by data, GPUs and method."""


def asked(data: str, gpus: int, method: str, **keys: Any) -> Point:
    """The point of a method: causal documents, forward and backward. TokenRing is the hybrid."""
    nodes = {"nodes": gpus // NODE} if method == "tokenring" else {}
    pack = {"mask": "document", "data": data, "seqlen": f"{TOKENS * gpus}k"}
    return point(method=method, gpus=gpus, **pack, **SETTING, **nodes, **keys)


def dealt(runs: Runs) -> Dealt:
    """The records of all methods on each dealing that they support, including points that can't be served."""
    return runs.by_key(
        {
            (data, method, dealing): asked(data, DEALT_GPUS, method, layout=dealing)
            for data in DATA
            for method in METHODS
            for dealing in REGISTRY[method].dealings()
        }
    )


def fastest(runs: Runs) -> Fastest:
    """The fastest dealing of every method: of `dealt`, and as layout=auto finds it at other numbers of GPUs."""
    found = dealt(runs)
    best: Fastest = {}
    for (data, method, _), record in found.items():
        key = data, DEALT_GPUS, method
        if key not in best or step(record) < step(best[key]):
            best[key] = record
    others = [(data, gpus, method) for data in DATA for gpus in GPUS if gpus != DEALT_GPUS for method in METHODS]
    return best | runs.by_key({key: asked(*key) for key in others})


def step(record: Record) -> float:
    """The time of a step in ms; infinite where there is none."""
    return record.step_ms_median if record.status == "ok" and record.step_ms_median else float("inf")


@dataclass(frozen=True)
class Winner:
    """The fastest of some methods on one pack, and the others in the order of their times."""

    record: Record
    others: tuple[Record, ...]

    @property
    def step(self) -> Number:
        """The time of the fastest method in ms."""
        return of_record(self.record, "step_ms_median")

    @property
    def margin(self) -> Number:
        """How much longer the second takes, as a share of the fastest time."""
        if not self.others:
            return Number(None, "simulated", self.step.sources, "no other method can be served")
        return derived(lambda b, a: b / a - 1, of_record(self.others[0], "step_ms_median"), self.step)

    @property
    def close(self) -> tuple[Record, ...]:
        """Methods that are too close to the fastest to tell."""
        return tuple(record for record in self.others if step(record) < (1 + CLOSE) * self.step.known)


def winner(found: Fastest, data: str, gpus: int, methods: Sequence[str]) -> Winner:
    """The fastest of the methods. Raises ValueError if none can be served."""
    ranked = sorted((found[data, gpus, method] for method in methods), key=step)
    served = [record for record in ranked if record.status == "ok"]
    if not served:
        raise ValueError(f"no method can be served on data={data} gpus={gpus}: {ranked[0].error}")
    return Winner(served[0], tuple(served[1:]))
