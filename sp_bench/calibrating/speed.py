"""How fast this machine's cores are just now, over what its cluster file says: others that share it come and go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sp_bench.bench.request import Request
from sp_bench.calibrating.cluster_file import scaled
from sp_bench.calibrating.setting import Setting
from sp_bench.hosts.shaped import hosts_for
from sp_bench.measure.ranks import open_ranks
from sp_bench.plan import layout_named

COUNTED_S = 5.0
"""For how long blocks are counted."""


def machine_speed(request: Request, seconds: float = COUNTED_S) -> float:
    """What all ranks of a point get done of its full forward blocks without any transfer, over what the cluster says.

    Ranks are placed as the point's, and compute at once. How well the cluster's figures meet blocks of this size, and
    so many ranks on the cores, is in it too. Raises RankFailure where a rank fails, as where a kernel refuses.
    """
    problem, cluster = request.problem, request.cluster
    layout = layout_named("contiguous", causal=False)
    one = replace(problem, n=1, batch=1, seqlen=problem.local_seqlen, causal=False, layout=layout)
    setting = Setting(
        device="cpu",
        kernel=request.kernel,
        dtypes=(problem.dtype,),
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        sizes=(one.seqlen,),
        launch_tokens=1,
        memory_tokens=1,
        repetitions=1,
        message_bytes=0,
        exchange_bytes=(),
        crowd_s=seconds,
    )
    with open_ranks(problem.n, request.timeout_s + seconds, None, hosts_for(cluster, problem.n)) as pool:
        blocks_per_s = sum(pool.run("sp_bench.calibrating.exchanges:count_blocks", setting))
    at_once = min(problem.n, cluster.cores or problem.n)
    return blocks_per_s * float(cluster.device.block_s(one, "forward").max()) / at_once


def at_speed(cluster: Mapping[str, Any], speed: float) -> dict[str, Any]:
    """The config of a cluster whose cores are so many times as fast, to 4 digits; its links stay as they are."""
    device, hosts = dict(cluster["device"]), cluster.get("hosts")
    device["rates"] = {name: scaled(table, speed) for name, table in device["rates"].items()}
    for rate in ("memory_bytes_per_s", "fold_bytes_per_s"):
        if device.get(rate):
            device[rate] *= speed
    device["launch_s"] /= speed
    if hosts:
        hosts = {**hosts} | {key: hosts[key] / speed for key in ("byte_core_s", "link_cores") if hosts.get(key)}
    return {**cluster, "device": device} | ({"hosts": hosts} if hosts else {})
