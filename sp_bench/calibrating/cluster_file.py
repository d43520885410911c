"""Make a conf/cluster file from a calibration's samples: medians, rates and their sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sp_bench.calibrating.layer_figures import layer_rates
from sp_bench.calibrating.setting import Costs, Links, Samples, Setting
from sp_bench.cluster.device import DeviceCosts
from sp_bench.cluster.device_section import DeviceSection
from sp_bench.cluster.kernel_table import RATES
from sp_bench.plan.problem import flops_per_pair
from sp_bench.reading import read

DIGITS = 4
LEAST_WORK = 0.1
"""The share of a sample that always counts as work, however large the launch cost."""


def cluster_config(
    name: str, setting: Setting, costs: Costs, links: Sequence[Links], provenance: Mapping[str, str]
) -> dict[str, Any]:
    """The content of a conf/cluster file for this machine, from rank 0's `costs` and all ranks' `links`."""
    latency_s, large_s = _slowest_s(links, "ring_tiny_s"), _slowest_s(links, "ring_large_s")
    pair_s = _median(links[0].pair_large_s)
    device = {
        "name": "CPU",
        "peak_tflops": {},
        **device_rates(setting, costs),
        "transfer_slowdown": rounded(_slowdown(links)),
    }
    return {
        "name": name,
        "this_machine": True,
        "gpus_per_node": None,
        "cores": "auto",
        "intra": {
            "bytes_per_s": rounded(setting.message_bytes / _work_s(large_s, latency_s)),
            "latency_s": rounded(latency_s),
        },
        "device": device,
        "sources": {
            **provenance,
            **device_sources(setting, costs, "on one thread"),
            "intra": f"{len(links)} ranks, each to the next over gloo at once: 4 bytes for the latency, "
            f"{setting.message_bytes} for the rate, medians of {len(links[0].ring_tiny_s)} of the slowest rank, spread "
            f"{max(_spreads(x for link in links for x in (link.ring_tiny_s, link.ring_large_s))):.1%}. One pair alone: "
            f"{setting.message_bytes / pair_s:.3g} bytes/s, {_median(links[0].pair_tiny_s):.3g} s",
            "transfer_slowdown": "blocks on all ranks while all of them send, over blocks without transfers",
        },
    }


def device_rates(setting: Setting, costs: Costs) -> dict[str, Any]:
    """The keys of a cluster file for the device's kernels and memory."""
    launch_s = _median(costs.launch_s)
    keys = {
        "rates": {f"{costs.kernel}_{dtype}": _table(dtype, setting, costs, launch_s) for dtype in setting.dtypes},
        "memory_bytes_per_s": rounded(costs.copy_bytes / _work_s(_median(costs.copy_s), launch_s)),
        "fold_bytes_per_s": rounded(costs.fold_bytes / _work_s(_median(costs.fold_s), launch_s)),
        "sum_bytes_per_s": rounded(costs.sum_bytes / _work_s(_median(costs.sum_s), 2 * launch_s)),
        "launch_s": rounded(launch_s),
    }
    section = read(DeviceSection, {"name": "", "peak_tflops": {}, **keys}, "cluster.device")
    layers = layer_rates(setting, costs, DeviceCosts.of(section))
    matmul = {dtype: rounded(rate) for dtype, rate in layers.pop("matmul_tflops").items()}
    return keys | {"matmul_tflops": matmul} | {name: rounded(figure) for name, figure in layers.items()}


def device_sources(setting: Setting, costs: Costs, how: str) -> dict[str, str]:
    """The sources of the figures of `device_rates`. `how` says how they were timed."""
    heads = (
        f"{setting.heads} heads" if setting.kv_heads == setting.heads else f"{setting.heads}/{setting.kv_heads} heads"
    )
    tokens, (rows, inputs, outputs) = setting.launch_tokens, costs.product_shape
    before = f", after {setting.sustained_s:g} s of the same block" if setting.sustained_s else ""
    return {
        "spread": "half of the interquartile range over the median",
        "rates": f"medians of {setting.repetitions} blocks of {heads} {how}{before}, less launch_s; "
        f"spread {blocks_spread(costs):.1%}, of the worst block {max(_spreads(costs.blocks_s.values())):.1%}",
        "launch_s": f"a block of {'one token' if tokens == 1 else f'{tokens} tokens'}, median of {len(costs.launch_s)}",
        "memory_bytes_per_s, fold_bytes_per_s, sum_bytes_per_s": f"medians of {setting.repetitions} copies of "
        f"{costs.copy_bytes // 2} bytes in fp32, of folds of as many elements in {setting.dtypes[0]} into them, and of "
        f"a sum and a cast of these, spread {max(_spreads([costs.copy_s, costs.fold_s, costs.sum_s])):.1%}",
        "matmul_tflops": f"medians of {setting.repetitions} products of {rows} rows, {inputs} inputs and {outputs} "
        f"outputs, spread {max(_spreads(costs.products_s.values())):.1%}",
        "elementwise_bytes_per_s, layer_launch_s": "fitted to forward, and backward with recomputation, of a decoder's "
        f"layer {inputs} wide without its attention, of {', '.join(map(str, setting.sizes))} tokens in "
        f"{setting.dtypes[0]}, less its matrix products; spread {max(_spreads(costs.layers_s.values())):.1%}",
    }


def scaled(table: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """A table of kernel rates, all multiplied by `factor`."""
    rated = [name for name in RATES if name in table]
    return {**table} | {name: {size: rounded(x * factor) for size, x in table[name].items()} for name in rated}


def scaled_device(device: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """A section `device` whose kernels and matrix products are `factor` times as fast. Its memory is unchanged."""
    section = {**device, "rates": {name: scaled(table, factor) for name, table in device["rates"].items()}}
    if device.get("matmul_tflops"):
        section["matmul_tflops"] = {dtype: rounded(rate * factor) for dtype, rate in device["matmul_tflops"].items()}
    if device.get("elementwise_bytes_per_s"):
        section["elementwise_bytes_per_s"] = rounded(device["elementwise_bytes_per_s"] * factor)
    if device.get("layer_launch_s"):
        section["layer_launch_s"] = rounded(device["layer_launch_s"] / factor)
    return section


def blocks_spread(costs: Costs) -> float:
    """The typical spread of block times around their medians. It is large on a busy machine."""
    return float(np.median(_spreads(costs.blocks_s.values())))


def block_flops(name: str, q_tokens: int, kv_tokens: int, setting: Setting) -> float:
    """The FLOPs of a block. `name` is its phase and mask, such as forward_full."""
    phase, _, mask = name.partition("_")
    pairs = q_tokens * kv_tokens if mask == "full" else q_tokens * (q_tokens + 1) // 2
    return flops_per_pair(phase, setting.head_dim, setting.head_dim) * pairs * setting.heads


def _table(dtype: str, setting: Setting, costs: Costs, launch_s: float) -> dict[str, Any]:
    """The rates of one dtype in TFLOP/s."""
    table: dict[str, Any] = {
        "kernel": costs.kernel, "figures": "measured", "head_dim": setting.head_dim, "dtypes": {dtype: 1.0},
    }  # fmt: skip
    for name in RATES:
        table[name] = {}
        for (of, case, q, kv), samples in costs.blocks_s.items():
            if (of, case) == (dtype, name):
                rate = block_flops(name, q, kv, setting) / _work_s(_median(samples), launch_s) / 1e12
                table[name][f"{q}x{kv}" if "full" in name else q] = rounded(rate)
    return table


def _work_s(total_s: float, overhead_s: float) -> float:
    return max(total_s - overhead_s, LEAST_WORK * total_s)


def _slowdown(links: Sequence[Links]) -> float:
    alone = np.median([x for link in links for x in link.alone_s])
    beside = [x for link in links for x in link.beside_s]
    return max(float(np.median(beside) / alone) - 1, 0.0) if beside else 0.0


def _slowest_s(links: Sequence[Links], name: str) -> float:
    """The median over repetitions of the slowest rank's time."""
    return float(np.median(np.max([getattr(link, name) for link in links], axis=0)))


def _spreads(series: Iterable[Samples]) -> list[float]:
    """Half the interquartile range, divided by the median, of each series."""
    quartiles = (np.percentile(samples, [25, 50, 75]) for samples in series)
    return [float((high - low) / 2 / middle) for low, middle, high in quartiles]


def _median(samples: Samples) -> float:
    return float(np.median(samples))


def rounded(value: float) -> float:
    """The value with as many digits as a cluster file has."""
    return float(f"{value:.{DIGITS}g}")
