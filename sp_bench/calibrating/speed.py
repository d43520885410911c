"""How fast this machine's cores are just now, over what its cluster file says: others that share it come and go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sp_bench.bench.choose import choose
from sp_bench.bench.request import Request
from sp_bench.calibrating.cluster_file import scaled
from sp_bench.cluster import Cluster
from sp_bench.cluster.emulation import hosts_of
from sp_bench.records import Record


def speed_of(request: Request, record: Record) -> float:
    """What a point's blocks and folds take at least by the cluster's figures, over what they took without transfers.

    `record` is that of the point, measured with parts=true. How well the figures meet blocks of this size, and so many
    ranks on the cores, is in it too, and so are cores that are idle once few ranks have any work left.
    """
    assert record.compute_only_ms_median, "its parts were timed"
    cluster = request.cluster
    least_s = sum(cluster.least_compute_s(run.work_s) for run in choose(request).runs.values())
    return 1e3 * least_s / record.compute_only_ms_median


def cluster_at(request: Request, speed: float, **hosts: float) -> Cluster:
    """The cluster of a request with cores so many times as fast and these figures of its hosts, drawn by its seed."""
    config = at_speed(request.config["cluster"], speed)
    if hosts:
        config["hosts"] = {**config["hosts"], **hosts}
    return replace(Cluster.build(config), stragglers=request.cluster.stragglers)


def at_speed(cluster: Mapping[str, Any], speed: float) -> dict[str, Any]:
    """The config of a cluster whose cores are so many times as fast, to 4 digits; its links stay as they are."""
    device, hosts = dict(cluster["device"]), hosts_of(cluster)
    device["rates"] = {name: scaled(table, speed) for name, table in device["rates"].items()}
    for rate in ("memory_bytes_per_s", "fold_bytes_per_s"):
        if device.get(rate):
            device[rate] *= speed
    device["launch_s"] /= speed
    config = {**cluster, "device": device}
    if hosts:
        section = cluster["hosts"]
        config["hosts"] = {**section, **{key: section[key] / speed for key in hosts.core_figures if section.get(key)}}
    return config
