"""Which validation backs a simulated point: how far others' published measurements are from simulations like it.

backing.json, which `python -m sp_bench.validate published` writes, has a row for each kind of transfers (what plans
send) and of links (what they send it over).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sp_bench.cluster import Cluster
from sp_bench.cluster.topology import FullMesh, PcieTree, Torus
from sp_bench.plan.ops import AllToAll, Plan, Transfer
from sp_bench.records import Record

FILE = Path(__file__).with_name("backing.json")
OVER = " x "
"""Between transfers and links in a record's validation."""


class Backing(NamedTuple):
    """Errors of simulated times against published ones, of one kind of transfers over one kind of links."""

    transfers: str
    links: str
    median: float
    """The median of |simulated / measured - 1|, without what was fitted to the source of the measurement."""
    two_of_three: float
    """What two of three errors are within."""
    points: int
    clusters: list[str]

    def __str__(self) -> str:
        where = ", ".join(self.clusters)
        return f"{self.transfers}{OVER}{self.links}: median {self.median:.1%}, n={self.points} ({where})"


@dataclass(frozen=True)
class Interval:
    """A simulated step with what would be measured in two of three cases, in ms."""

    low_ms: float
    step_ms: float
    high_ms: float
    backed: bool
    """Whether measurements of its own kind say so; else the widest error over such links is taken (`widest`)."""

    def overlaps(self, other: Interval) -> bool:
        """Whether the two could be in either order."""
        return self.low_ms <= other.high_ms and other.low_ms <= self.high_ms


def transfers_of(plans: Iterable[Plan]) -> str:
    """What plans send, in words: all-to-alls, KV from rank to rank, Q and outputs from rank to rank, or nothing."""
    found = set()
    for op in (op for plan in plans for op in plan.ops if isinstance(op, Transfer)):
        passed = "KV passed on" if op.tensor.of_keys else "Q and outputs passed on"
        found.add("all-to-alls" if isinstance(op, AllToAll) else passed)
    return " and ".join(sorted(found)) or "no transfers"


def links_of(cluster: Cluster, gpus: int) -> str:
    """What a cluster's transfers cross, in words."""
    intra = cluster.topology.intra
    if cluster.hosts:
        return "emulated hosts"
    if cluster.cores is not None:
        return "cores of a CPU"
    if cluster.nodes(gpus) > 1:
        return "several nodes"
    return "PCIe" if isinstance(intra, PcieTree) else "cables" if isinstance(intra, FullMesh | Torus) else "NVLink"


@cache
def known() -> dict[tuple[str, str], Backing]:
    """The rows of backing.json."""
    rows = [Backing(**row) for row in json.loads(FILE.read_text())] if FILE.exists() else []
    return {(row.transfers, row.links): row for row in rows}


def kinds_of(plans: Iterable[Plan], cluster: Cluster) -> tuple[str, str]:
    """The key of `known` that plans on a cluster have: (transfers, links)."""
    plans = list(plans)
    return transfers_of(plans), links_of(cluster, plans[0].n)


def described(transfers: str, links: str) -> str:
    """What a record says of its validation (field `validation`)."""
    backing = known().get((transfers, links))
    return str(backing) if backing else f"{transfers}{OVER}{links}: none"


def widest(links: str) -> float:
    """The largest error that two of three points are within, over all kinds of transfers over such links.

    Over all links where none of those was measured. These are errors of attention alone, and training steps borrow
    them too: no published step is among the measurements (docs/results/training_tables.md has those there are).
    """
    rows = known().values()
    return max(row.two_of_three for row in ([row for row in rows if row.links == links] or rows))


def interval(record: Record) -> Interval:
    """The interval of a simulated record: of its validation, or the widest over its links where nothing backs it."""
    assert not record.measured and record.step_ms_median is not None
    links = (record.validation or "").partition(OVER)[2].partition(":")[0]
    return _around(record.step_ms_median, record.validation_error, links)


def interval_of(step_ms: float, transfers: str, links: str) -> Interval:
    """The interval of a simulated step that has no record, by what it sends and over what (kinds_of)."""
    backing = known().get((transfers, links))
    return _around(step_ms, backing.two_of_three if backing else None, links)


def _around(step_ms: float, error: float | None, links: str) -> Interval:
    backed = error is not None
    if error is None:
        error = widest(links)
    return Interval(step_ms / (1 + error), step_ms, step_ms / (1 - error) if error < 1 else math.inf, backed)
