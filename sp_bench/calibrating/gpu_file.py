"""Make a conf/cluster file for a GPU: measured kernels and memory, and the links of another file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sp_bench.calibrating.cluster_file import device_rates, device_sources, rounded
from sp_bench.calibrating.setting import Costs, Gpu, Setting
from sp_bench.cluster.cluster import NETWORK_KEYS
from sp_bench.cluster.kernel_table import RATES
from sp_bench.errors import RequestError, unknown
from sp_bench.resources import conf_content

if TYPE_CHECKING:
    from sp_bench.calibrating.pairs import PairRate

MARK = "calibrated"
"""The source that marks a file of sp_bench.calibrate. Other files are not overwritten."""
TILE_TOKENS = 128
"""The assumed queries of a kernel's thread block: those of FlashAttention-3 at head_dim 128."""


def gpu_cluster_config(
    name: str,
    setting: Setting,
    costs: Costs,
    gpu: Gpu,
    base: Mapping[str, Any],
    provenance: Mapping[str, str],
    pairs: Sequence[PairRate] = (),
    hosts: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """The content of a conf/cluster file for many of this GPU, with the links of the cluster `base`.

    `pairs` were measured between the ranks of `hosts`; their rates take the place of the base's.
    """
    rates = device_rates(setting, costs)
    for table in rates["rates"].values():
        table |= {"heads": setting.heads, "tile_tokens": TILE_TOKENS}
    links, link_keys = measured_links(base, pairs, hosts or {})
    not_measured = [key for key in NETWORK_KEYS if key in base and key not in links]
    kept = {key: base["device"][key] for key in ("peak_tflops", "transfer_slowdown") if key in base["device"]}
    return {
        "name": name,
        **{key: base[key] for key in not_measured},
        **links,
        "launch_order": True,
        "device": {"name": gpu.name, "sms": gpu.sms, "memory_bytes": gpu.memory_bytes, **kept, **rates},
        "sources": {
            **provenance,
            "software": gpu.software,
            **device_sources(setting, costs, "between two CUDA events, launched ahead"),
            "sms, memory_bytes": "of this GPU, by the CUDA driver",
            "tile_tokens": "as FlashAttention-3 (an assumption)",
            **link_keys,
            ", ".join([*not_measured, *kept]): f"not measured: those of cluster={base['name']}",
        },
    }


def measured_links(
    base: Mapping[str, Any], pairs: Sequence[PairRate], hosts: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys of a cluster file that pairs of ranks have measured, intra and inter, and their sources.

    A pair on a full mesh has one of a GPU's cables. On a tree of PCIe switches pairs differ, and none is measured.
    """
    host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
    keys, sources = {}, {}
    for key, inside in (("intra", True), ("inter", False)):
        some = [pair for pair in pairs if (host_of[pair.a] == host_of[pair.b]) == inside]
        kind = base.get(key, {}).get("kind", "switch") if base.get(key) else None
        if not some or kind not in ("switch", "full_mesh"):
            continue
        cables = base["gpus_per_node"] - 1 if kind == "full_mesh" else 1
        rates = [pair.bytes_per_s for pair in some]
        latency_s = float(np.median([pair.latency_s for pair in some]))
        keys[key] = {
            **base[key], "bytes_per_s": rounded(cables * float(np.median(rates))), "latency_s": rounded(latency_s)
        }  # fmt: skip
        sources[key] = (
            f"medians of {len(some)} exchanges between two ranks {'of a node' if inside else 'of different nodes'} over"
            f" NCCL, one pair and one of {len({pair.lane for pair in some})} lanes at a time, from {min(rates):.3g} to"
            f" {max(rates):.3g} bytes/s each way{f'; times {cables} cables' if cables > 1 else ''}"
        )
    return keys, sources


def above_peak(device: Mapping[str, Any]) -> list[str]:
    """The rates above the device's peak. They are wrong: the launch cost taken off small blocks was too large."""
    too_high = []
    for name, table in device["rates"].items():
        peak = min(device.get("peak_tflops", {}).get(dtype, math.inf) for dtype in table["dtypes"])
        for case in RATES:
            too_high += [f"{name} {case} {size}" for size, rate in table[case].items() if rate > peak]
    return too_high


def base_cluster(gpu: str, asked: str | None, files: Mapping[str, Path]) -> dict[str, Any]:
    """The cluster among `files` whose links are used: the one asked for, or one with such GPUs.

    Raises RequestError if there is none, or it has no GPUs.
    """
    known = {name: conf_content(path, files) for name, path in files.items()}
    of_gpus = {name: config for name, config in known.items() if _has_links_of_gpus(config)}
    if asked is not None:
        if asked not in known:
            raise unknown("cluster", str(asked), of_gpus)
        if asked not in of_gpus:
            rule = "has no GPUs, whose links the file could take"
            raise RequestError(f"cluster={asked}", rule, f"cluster={next(iter(of_gpus))} would work")
        return of_gpus[asked]
    for config in of_gpus.values():
        if _model(config["device"]["name"]) == _model(gpu):
            return config
    rule = f"no cluster file has the links of {gpu}, and they are not measured"
    raise RequestError("cluster=null", rule, f"one of {', '.join(of_gpus)} would work")


def _has_links_of_gpus(config: Mapping[str, Any]) -> bool:
    """Whether a cluster file has links of GPUs. Those of this machine's ranks, or copied from another, don't count."""
    ours = config.get("this_machine") or MARK in config.get("sources", {})
    return not ours and bool(_model(config.get("device", {}).get("name", "")))


def _model(name: str) -> str:
    """The model in a GPU's name, such as H100 in NVIDIA H100 80GB HBM3; empty if there is none."""
    match = re.search(r"\b[A-Z]{1,2}\d{2,3}\b", name)
    return match[0] if match else ""
