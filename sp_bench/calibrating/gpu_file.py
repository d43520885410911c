"""A conf/cluster file for a GPU: its kernels and memory as measured, its links as another file has them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sp_bench.calibrating.cluster_file import device_rates, device_sources
from sp_bench.calibrating.setting import Costs, Gpu, Setting
from sp_bench.cluster.cluster import NETWORK_KEYS
from sp_bench.cluster.kernel_table import RATES
from sp_bench.errors import RequestError, unknown

MARK = "calibrated"
"""The source that tells a file of sp_bench.calibrate from others, which it doesn't overwrite."""
TILE_TOKENS = 128
"""What a thread block of a kernel is taken to take: FlashAttention-3's at head_dim 128."""


def gpu_cluster_config(
    name: str, setting: Setting, costs: Costs, gpu: Gpu, base: Mapping[str, Any], provenance: Mapping[str, str]
) -> dict[str, Any]:
    """The content of a conf/cluster file for many of this GPU, joined as those of the cluster `base` are."""
    rates = device_rates(setting, costs)
    for table in rates["rates"].values():
        table |= {"heads": setting.heads, "tile_tokens": TILE_TOKENS}
    not_measured = [key for key in NETWORK_KEYS if key in base]
    kept = {key: base["device"][key] for key in ("peak_tflops", "transfer_slowdown") if key in base["device"]}
    return {
        "name": name,
        **{key: base[key] for key in not_measured},
        "device": {"name": gpu.name, "sms": gpu.sms, "memory_bytes": gpu.memory_bytes, **kept, **rates},
        "sources": {
            **provenance,
            "software": gpu.software,
            **device_sources(setting, costs, "between two CUDA events, launched ahead"),
            "sms, memory_bytes": "of this GPU, by the CUDA driver",
            "tile_tokens": "as FlashAttention-3 (an assumption)",
            ", ".join([*not_measured, *kept]): f"not measured: those of cluster={base['name']}",
        },
    }


def above_peak(device: Mapping[str, Any]) -> list[str]:
    """The rates of a device that lie above its peak, which none can: its launch cost was too much for small blocks."""
    found = []
    for name, table in device["rates"].items():
        peak = min(device.get("peak_tflops", {}).get(dtype, math.inf) for dtype in table["dtypes"])
        for case in RATES:
            found += [f"{name} {case} {size}" for size, rate in table[case].items() if rate > peak]
    return found


def base_cluster(gpu: str, asked: str | None, files: Mapping[str, Path]) -> dict[str, Any]:
    """The cluster among `files` whose links are taken: the one asked for, or one of such GPUs.

    Raises RequestError for one that there is not, or that has no GPUs.
    """
    known = {name: yaml.safe_load(path.read_text()) for name, path in files.items()}
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
    """Not so where a file is for the ranks of this machine, or has another's links itself."""
    ours = config.get("this_machine") or MARK in config.get("sources", {})
    return not ours and bool(_model(config.get("device", {}).get("name", "")))


def _model(name: str) -> str:
    """H100 of NVIDIA H100 80GB HBM3; empty where there is none."""
    found = re.search(r"\b[A-Z]{1,2}\d{2,3}\b", name)
    return found[0] if found else ""
