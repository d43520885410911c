"""Make a conf/cluster file for a GPU: measured kernels and memory, and the links of another file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sp_bench.calibrating.cluster_file import device_rates, device_sources
from sp_bench.calibrating.setting import Costs, Gpu, Setting
from sp_bench.cluster.cluster import NETWORK_KEYS
from sp_bench.cluster.kernel_table import RATES
from sp_bench.errors import RequestError, unknown
from sp_bench.resources import conf_content

MARK = "calibrated"
"""The source that marks a file of sp_bench.calibrate. Other files are not overwritten."""
TILE_TOKENS = 128
"""The assumed queries of a kernel's thread block: those of FlashAttention-3 at head_dim 128."""


def gpu_cluster_config(
    name: str, setting: Setting, costs: Costs, gpu: Gpu, base: Mapping[str, Any], provenance: Mapping[str, str]
) -> dict[str, Any]:
    """The content of a conf/cluster file for many of this GPU, with the links of the cluster `base`."""
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
    """The rates above the device's peak. They are wrong: the launch cost taken off small blocks was too large."""
    found = []
    for name, table in device["rates"].items():
        peak = min(device.get("peak_tflops", {}).get(dtype, math.inf) for dtype in table["dtypes"])
        for case in RATES:
            found += [f"{name} {case} {size}" for size, rate in table[case].items() if rate > peak]
    return found


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
    found = re.search(r"\b[A-Z]{1,2}\d{2,3}\b", name)
    return found[0] if found else ""
