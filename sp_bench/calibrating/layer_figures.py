"""The figures of a cluster file for what a layer computes beside its attention, from a calibration's samples.

Matrix products have a rate. The rest of a layer has a bandwidth, as if all between two matrix products went once
through memory, and a launch: the two fit the times of forwards and backwards of several numbers of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from sp_bench.calibrating.setting import Costs, Setting
from sp_bench.cluster.device import DeviceCosts
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import FULL
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import Problem
from sp_bench.workload import Train
from sp_bench.workload.model import Model
from sp_bench.workload.training import Training

FFN_OF_WIDTH = 2.75
"""The feed-forward network of a decoder over its width: 2.7 of Llama 7B, 3.5 of Llama 3 8B, 2.75 of conf/model/tiny."""
RECOMPUTE: Literal["attention"] = "attention"
"""The layer is timed as a step computes it by default: the backward computes all but the attention again."""
FREE = 1e30
"""A rate at which something takes no time."""


def layer_of(setting: Setting, tokens: int, dtype: str) -> tuple[Train, Problem]:
    """A layer as wide as the heads of the setting, and its attention on one rank with so many tokens."""
    width = setting.heads * setting.head_dim
    problem = Problem(
        n=1, seqlen=tokens, batch=1, heads=setting.heads, kv_heads=setting.kv_heads, head_dim=setting.head_dim,
        mask=FULL, dtype=dtype, layout=LAYOUTS["contiguous"],
    )  # fmt: skip
    model = Model(name="layer", kind="decoder", layers=1, width=width, ffn=round(FFN_OF_WIDTH * width), vocab=width)
    training = Training(
        recompute=RECOMPUTE, parameters="replicated", loss_chunk=tokens, learning_rate=1e-3, task="recall"
    )
    return Train(phases=PHASES, model=model, training=training), problem


def layer_rates(setting: Setting, costs: Costs, device: DeviceCosts) -> dict[str, Any]:
    """matmul_tflops, elementwise_bytes_per_s and layer_launch_s, on a `device` whose other figures are known."""
    rows, inputs, outputs = costs.product_shape
    matmul = {
        dtype: 2 * rows * inputs * outputs / float(np.median(times)) / 1e12 for dtype, times in costs.products_s.items()
    }
    known = replace(device, matmul_tflops=matmul)
    products = replace(known, elementwise_bytes_per_s=FREE, layer_launch_s=0.0)
    nothing = replace(products, matmul_tflops=dict.fromkeys(matmul, FREE), memory_bytes_per_s=FREE)
    launches, moved = replace(nothing, layer_launch_s=1.0), replace(nothing, elementwise_bytes_per_s=1.0)
    counts, rest_s = [], []
    for (phase, tokens), times in costs.layers_s.items():
        train, problem = layer_of(setting, tokens, setting.dtypes[0])

        def taken_s(on: DeviceCosts, train: Train = train, problem: Problem = problem, phase: str = phase) -> float:
            return train.costs(problem, on).layer_s(phase)

        measured_s = float(np.median(times))
        # Each case counts alike, however many tokens it has.
        counts.append(np.array([taken_s(launches), taken_s(moved)]) / measured_s)
        rest_s.append(max(measured_s - taken_s(products), 0.0) / measured_s)
    launch_s, byte_s = _not_negative(np.array(counts), np.array(rest_s))
    return {"matmul_tflops": matmul, "elementwise_bytes_per_s": 1 / byte_s, "layer_launch_s": launch_s}


def _not_negative(counts: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """The least-squares (launch, seconds of a byte); without a launch if that would be below 0, or the byte's."""
    launch_s, byte_s = np.linalg.lstsq(counts, wanted, rcond=None)[0]
    alone = counts.T @ wanted / np.square(counts).sum(axis=0)
    if launch_s < 0:
        launch_s, byte_s = 0.0, alone[1]
    if byte_s <= 0:
        launch_s, byte_s = alone[0], 1 / FREE
    return float(launch_s), float(byte_s)
