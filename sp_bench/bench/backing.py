"""Which validation backs a simulated point: how far others' published measurements are from simulations like it.

backing.json, which `python -m sp_bench.validate published` writes, has a row for each kind of transfers (what plans
send) and of links (what they send it over).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sp_bench.cluster import Cluster
from sp_bench.cluster.topology import FullMesh, PcieTree
from sp_bench.plan.ops import AllToAll, Plan, Transfer

FILE = Path(__file__).with_name("backing.json")


class Backing(NamedTuple):
    """Errors of simulated times against published ones, of one kind of transfers over one kind of links."""

    transfers: str
    links: str
    median: float
    """Of |simulated / measured - 1|, without what was fitted to the source of the measurement."""
    two_of_three: float
    """What two of three errors are within."""
    points: int
    clusters: list[str]

    def __str__(self) -> str:
        where = ", ".join(self.clusters)
        return f"{self.transfers} x {self.links}: median {self.median:.1%}, n={self.points} ({where})"


def transfers_of(plans: Iterable[Plan]) -> str:
    """What plans send, in words: all-to-alls, KV from rank to rank, Q and outputs from rank to rank, or nothing."""
    found = set()
    for op in (op for plan in plans for op in plan.ops if isinstance(op, Transfer)):
        passed = "KV passed on" if op.carries.removesuffix("_h") in ("kv", "dkv") else "Q and outputs passed on"
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
    return "PCIe" if isinstance(intra, PcieTree) else "cables" if isinstance(intra, FullMesh) else "NVLink"


@cache
def known() -> dict[tuple[str, str], Backing]:
    """The rows of backing.json."""
    rows = [Backing(**row) for row in json.loads(FILE.read_text())] if FILE.exists() else []
    return {(row.transfers, row.links): row for row in rows}
