"""Figures of a layer: known ones come back from the times that they explain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from sp_bench.calibrating import kernels
from sp_bench.calibrating.clock import cpu_seconds
from sp_bench.calibrating.cluster_file import scaled_device
from sp_bench.calibrating.layer_figures import layer_of, layer_rates
from sp_bench.calibrating.setting import Costs
from sp_bench.cluster.device import DeviceCosts
from sp_bench.plan.method import PHASES
from tests.support.calibration import SETTING
from tests.support.clusters import cluster

MATMUL, BYTES_PER_S, LAUNCH_S = 0.04, 3e9, 2e-5


def device(**figures: float) -> DeviceCosts:
    known = replace(cluster().device, matmul_tflops={"float32": MATMUL}, memory_bytes_per_s=1e10)
    return replace(known, elementwise_bytes_per_s=BYTES_PER_S, layer_launch_s=LAUNCH_S, **figures)


def seen(on: DeviceCosts) -> Costs:
    """The samples that a calibration would have seen on a device."""
    costs, shape = Costs(), (128, 32, 88)
    costs.product_shape, costs.products_s = shape, {"float32": [2 * 128 * 32 * 88 / MATMUL / 1e12] * 3}
    for phase in PHASES:
        for tokens in (64, 128, 512):
            train, problem = layer_of(SETTING, tokens, "float32")
            costs.layers_s[phase, tokens] = [train.costs(problem, on).layer_s(phase)] * 3
    return costs


def test_known_figures_come_back() -> None:
    found = layer_rates(SETTING, seen(device()), device())
    assert found["matmul_tflops"]["float32"] == pytest.approx(MATMUL)
    assert found["elementwise_bytes_per_s"] == pytest.approx(BYTES_PER_S, rel=1e-6)
    assert found["layer_launch_s"] == pytest.approx(LAUNCH_S, rel=1e-6)


@pytest.mark.parametrize("sign", [-1, 1])
def test_whatever_was_seen_no_figure_is_negative(sign: int) -> None:
    """Times that fall with the tokens, and times that grow by more than the tokens."""
    costs = seen(device())
    costs.layers_s = {key: [seconds[0] * key[1] ** (2 * sign)] * 3 for key, seconds in costs.layers_s.items()}
    found = layer_rates(SETTING, costs, device())
    assert found["layer_launch_s"] >= 0
    assert found["elementwise_bytes_per_s"] > 0


def test_a_faster_device_has_all_figures_of_layers_faster() -> None:
    section = {"rates": {}, "matmul_tflops": {"float32": 0.5}, "elementwise_bytes_per_s": 4e9, "layer_launch_s": 1e-5}
    assert scaled_device(section, 2.0) == {
        "rates": {}, "matmul_tflops": {"float32": 1.0}, "elementwise_bytes_per_s": 8e9, "layer_launch_s": 5e-6,
    }  # fmt: skip


@pytest.mark.long
def test_layers_can_be_timed_by_a_clock_that_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of GPUs does, where a call took longer to launch than it had allowed for."""

    def again(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        call(*arguments)
        return cpu_seconds(call, *arguments)

    monkeypatch.setattr(kernels, "CLOCKS", {"cpu": again})
    monkeypatch.setattr(kernels, "report", lambda step: None)
    costs = Costs()
    kernels.measure_layers(SETTING, costs)
    assert set(costs.layers_s) == set(product(PHASES, SETTING.sizes))
    assert min(map(min, costs.layers_s.values())) > 0
