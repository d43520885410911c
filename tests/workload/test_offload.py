"""Activations on the host between forward and backward: the same gradients, and the time and memory of copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.point.training import simulate_training
from sp_bench.workload.offload import Offload
from sp_bench.workload.train_gate import ExactAttention
from sp_bench.workload.trainer import Trainer
from tests.support.typed import Known
from tests.workload.jobs import trainer_of
from tests.workload.requests import point, training

CPU = torch.device("cpu")
QWEN = ("model=qwen3_8b", "method=zigzag", "gpus=8", "seqlen=1M", "cluster=h100_ndr400", "dtype=bfloat16")
QWEN += ("kernel=cudnn", "train.recompute=full", "train.parameters=sharded")


def trained(trainer: Trainer) -> list[Tensor]:
    """The gradients of the first batch."""
    batch, attention = trainer.batch(0), ExactAttention(trainer.problem.mask)
    trainer.loss(trainer.hidden(batch, attention), batch).backward()
    return [gradient.clone() for gradient in trainer.states.gradients()]


@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
def test_gradients_are_those_without_it_and_parameters_stay(recompute: str) -> None:
    spec = training("gpus=1", "method=reference", f"train.recompute={recompute}")
    plain, moved = trainer_of(spec, 0), trainer_of(spec, 0)
    moved.offload = Offload(CPU, least_bytes=1)  # as Trainer makes it, for small tensors
    wanted, found = trained(plain), trained(moved)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    kept = 2 * 64 * 64 * 8  # the inputs of two layers, in fp64
    weights = sum(p.nbytes for p in moved.network.layers.parameters())
    assert moved.offload.copied_bytes >= kept
    if recompute == "full":
        assert moved.offload.copied_bytes < kept + weights, "no layer's parameters are copied"


def test_small_tensors_and_parameters_are_saved_as_they_are() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    offload = Offload(CPU, least_bytes=100)
    x, small = torch.randn(8, 8, requires_grad=True), torch.randn(4, requires_grad=True)
    with offload.hooks([weight]):
        loss = (x @ weight).square().sum() + (small * small).sum()
    assert offload.copied_bytes == 2 * 8 * 8 * 4, "x, and the product that is squared"
    x_before = x.detach().clone()
    with torch.no_grad():
        x.zero_()  # its copy is what the backward sees
    loss.backward()
    torch.testing.assert_close(weight.grad, x_before.T @ (2 * (x_before @ weight.detach())))


def simulated(*overrides: str) -> Known:
    return Known(simulate_training(point(*QWEN, *overrides)))


def test_a_step_fits_that_did_not_and_pays_for_the_copies() -> None:
    """Qwen3-8B with 1M tokens on 8 H100, which TRL trains in 56.2 GB."""
    with pytest.raises(RequestError, match=r"GB are missing.*or train.offload=true would work"):
        simulated()
    here = simulated("train.offload=true")
    one = 2 * 2**17 * 4096
    assert here.peak_mem_bytes_max < 56.2e9 and here.host_bytes == 36 * one
    held = simulated("cluster.device.memory_bytes=1e12")
    assert held.host_bytes == 0 and held.offload_ms == 0
    assert held.activations_bytes - here.activations_bytes == 34 * one, "those of two layers are on the device"
    # Out beside the next layer, which takes longer; back before each layer's backward.
    assert here.offload_ms == pytest.approx(36 * 1e3 * (one / 5e10 + 5e-6))
    assert here.step_ms_median == pytest.approx(held.step_ms_median + here.offload_ms)


def test_copies_out_are_hidden_only_as_long_as_a_layer_takes() -> None:
    slow = ("train.offload=true", "cluster.device.host_bytes_per_s=1e9")
    here, held = simulated(*slow), simulated("cluster.device.memory_bytes=1e12")
    copy_ms = 1e3 * (2 * 2**17 * 4096 / 1e9 + 5e-6)
    layer_ms = (held.forward_ms_median - held.loss_ms) / 36
    assert copy_ms < layer_ms, "hidden"
    slower = simulated("train.offload=true", "cluster.device.host_bytes_per_s=2e8")
    out_ms = 5 * copy_ms - layer_ms
    assert slower.offload_ms == pytest.approx(36 * (out_ms + 5 * copy_ms), rel=1e-3)
    assert here.offload_ms == pytest.approx(36 * copy_ms)


def test_it_is_refused_where_it_makes_no_sense_or_is_not_known() -> None:
    with pytest.raises(RequestError, match="train.offload=true: the way from NVIDIA B200 .* is not known"):
        simulate_training(point(*QWEN[:4], *QWEN[5:6], "cluster=b200", "train.offload=true"))
    with pytest.raises(RequestError, match="train.offload=true: ranks on CPUs keep activations in the host's memory"):
        point("gpus=2", "method=ring", "train.offload=true", "dtype=float32", "mode=measure", "cluster=local")
