"""The current speed of this machine's cores relative to its cluster file. Other load on the machine changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sp_bench.calibrating.cluster_file import scaled_device
from sp_bench.cluster import Cluster
from sp_bench.cluster.emulation import hosts_of
from sp_bench.point.request import Request
from sp_bench.point.simulations import simulation_of
from sp_bench.records import Record


def speed_of(request: Request, record: Record) -> float:
    """The time that a point computes by the cluster's figures, over its measured time without transfers.

    `record` is that of the point, measured with parts=true. The speed also includes how well the figures fit blocks of
    this size on so many ranks, and cores that idle when few ranks have work left.
    """
    assert record.compute_only_ms_median, "its parts were timed"
    return 1e3 * simulation_of(request).least_compute_s(request) / record.compute_only_ms_median


def cluster_at(request: Request, speed: float, **hosts: float) -> Cluster:
    """The cluster of a request with cores `speed` times as fast, and the given figures of its hosts, for its seed."""
    config = at_speed(request.config["cluster"], speed)
    if hosts:
        config["hosts"] = {**config["hosts"], **hosts}
    return replace(Cluster.build(config), stragglers=request.cluster.stragglers)


def at_speed(cluster: Mapping[str, Any], speed: float) -> dict[str, Any]:
    """The config of a cluster with cores `speed` times as fast, to 4 digits. Its links are unchanged."""
    device, hosts = scaled_device(cluster["device"], speed), hosts_of(cluster)
    for rate in ("memory_bytes_per_s", "fold_bytes_per_s", "sum_bytes_per_s"):
        if device.get(rate):
            device[rate] *= speed
    device["launch_s"] /= speed
    config = {**cluster, "device": device}
    if hosts:
        section = cluster["hosts"]
        config["hosts"] = {**section, **{key: section[key] / speed for key in hosts.core_figures if section.get(key)}}
    return config
