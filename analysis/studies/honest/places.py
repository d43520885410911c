"""The points of the study "Which method, honestly", the interval of each, and which methods can't be told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from sp_bench.analysis.number import Number, step_ms
from sp_bench.analysis.runs import Point, Runs, point
from sp_bench.plan.mask import WHOLE
from sp_bench.point.backing import known
from sp_bench.records import Record
from sp_bench.records.interval import Interval, interval
from sp_bench.workload.attention import Attention

CLUSTERS = ("a100_hdr200", "h100_ndr400", "b200", "a800")
GPUS = (8, 64, 512, 4096)
KV_HEADS = (32, 4, 1)
"""Key heads of 32 heads: every head has its own keys, 8 share them, and all do."""
SEQLEN = "1M"
HEADS_SPLIT, WHOLE_HEADS = "mesh with heads", "mesh"
METHODS: Mapping[str, Mapping[str, Any]] = {
    "zigzag": {"method": "zigzag"},
    "startrail": {"method": "startrail", "layout": "zigzag"},
    "ulysses": {"method": "ulysses"},
    "usp": {"method": "usp", "layout": "zigzag"},
    WHOLE_HEADS: {"method": "mesh", "layout": "zigzag"},
    HEADS_SPLIT: {"method": "mesh", "layout": "zigzag", "ulysses": "auto"},
}
"""The methods by their names in tables. Ring and Striped are zigzag's plan on other layouts."""
NIC_AT = {"cluster": "h100_ndr400", "gpus": 64, "kv_heads": 4}
NIC_GB_PER_S = (25, 50, 100, 200, 400, 800)
SCALE_AT = {"cluster": "h100_ndr400", "kv_heads": 4}

Key = tuple[str, int, int]
"""Cluster, KV heads, GPUs."""
KEYS: tuple[Key, ...] = tuple(product(CLUSTERS, KV_HEADS, GPUS))


def asked(name: str, **more: Any) -> Point:
    """The point of a method: one causal attention, forward and backward, 32 heads of 128 in bfloat16."""
    return point(**{"seqlen": SEQLEN, **METHODS[name], **more})


@dataclass(frozen=True)
class Step:
    """A simulated step with the interval of its record or, where nothing validates it, an assumed one."""

    name: str
    record: Record
    interval: Interval
    """The interval by which methods are told apart."""

    @property
    def ms(self) -> Number:
        """The step in ms."""
        return step_ms(self.record)

    @property
    def backed(self) -> bool:
        """Whether the interval is the record's own, from measurements of its kind on a cluster with its figures."""
        return interval(self.record).backed

    @property
    def low(self) -> float:
        """The lower end of the interval in ms."""
        assert self.interval.low_ms is not None
        return self.interval.low_ms

    @property
    def high(self) -> float:
        """The upper end of the interval in ms."""
        assert self.interval.high_ms is not None
        return self.interval.high_ms


def widest(links: str) -> float:
    """The largest error that two of three points are within, over all attentions of whole sequences that were measured
    over such links.

    Over all links where none of those was measured.
    """
    rows = [row for row in known() if row.kind[:2] == (Attention.name, WHOLE)]
    return max(row.two_of_three for row in ([row for row in rows if row.kind.links == links] or rows))


def assumed(record: Record) -> Interval:
    """The interval of a record; where nothing validates it, the study assumes the widest error over its links."""
    own = interval(record)
    if own.backed:
        return own
    error = widest((record.validation_kind or {})["links"])
    return Interval(own.step_ms / (1 + error), own.step_ms, own.step_ms / (1 - error))


def steps(records: Mapping[str, Record]) -> list[Step]:
    """The steps that can be served, the fastest first."""
    served = [Step(name, record, assumed(record)) for name, record in records.items() if record.status == "ok"]
    return sorted(served, key=lambda step: step.ms.known)


def tied(ranked: Iterable[Step]) -> list[Step]:
    """The fastest step, and those whose intervals overlap its own: too close to call."""
    first, *rest = ranked
    return [first, *(step for step in rest if step.interval.overlaps(first.interval))]


def _ranked(runs: Runs, places: Iterable[Any], keys: Callable[[Any], Mapping[str, Any]]) -> dict[Any, list[Step]]:
    """The steps of all methods at each place, whose keys of the command line are given."""
    by_place = runs.by_setting(lambda place, name: asked(name, **keys(place)), places, METHODS)
    return {place: steps(records) for place, records in by_place}


def grid(runs: Runs) -> dict[Key, list[Step]]:
    """The steps of all methods at all keys."""
    return _ranked(runs, KEYS, lambda key: dict(zip(("cluster", "kv_heads", "gpus"), key, strict=True)))


def by_nic(runs: Runs) -> dict[int, list[Step]]:
    """The steps by the bandwidth of a GPU's network card, in GB/s."""
    return _ranked(runs, NIC_GB_PER_S, lambda nic: {"cluster__inter__bytes_per_s": nic * 1e9, **NIC_AT})


def by_gpus(runs: Runs) -> dict[int, list[Step]]:
    """The steps by the number of GPUs."""
    return _ranked(runs, GPUS, lambda gpus: {"gpus": gpus, **SCALE_AT})
