"""How a GPU's SMs are shared between block kernels and transfers, and who is told."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.kernels import KERNELS
from sp_bench.kernels.pieces import Pieces
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.region_table import table_of
from sp_bench.plan.regions import Region, RegionKind
from sp_bench.point import Request, resolve
from sp_bench.run import sms
from sp_bench.run.communicators import Part
from sp_bench.run.engine import Engine
from sp_bench.run.sms import SmShares, most_ctas, share, shares
from sp_bench.workload import attention_step
from sp_bench.workload.attention import Attention
from sp_bench.workload.base import RankContext, Spec
from tests.kernels import fakes
from tests.support.dense import block_of
from tests.support.problems import all_methods, splittable_problem

PERSISTENT, OTHER = KERNELS["flash_attn_3"], KERNELS["cudnn"]
PROBLEM = splittable_problem(4)


def plans_of(method: str, **options: Any) -> dict[str, Any]:
    return {phase: build(method, options).plan(PROBLEM, phase, COMPUTE_BOUND) for phase in PHASES}


ONE_LANE, TWO_LANES = plans_of("mesh", tile=(2, 2)), plans_of("ring")


@pytest.mark.parametrize(
    ("number", "lanes", "ctas"), [(132, 1, 32), (132, 4, 32), (148, 2, 32), (108, 3, 16), (132, 16, 8), (20, 4, 4)]
)
def test_the_kernels_of_all_lanes_fit_on_the_gpu(number: int, lanes: int, ctas: int) -> None:
    assert most_ctas(number, lanes) == ctas
    assert lanes * ctas <= number - sms.FREE_SMS


GPUS = {"A10": 72, "H20": 78, "A100": 108, "H100 PCIe": 114, "H100": 132, "B200": 148}
"""The SMs of GPUs."""


def taken(lane_ctas: int, *, beyond_nodes: bool) -> int:
    """The CTAs of one lane's kernels at once. NCCL makes a power of two of what messages are told to take."""
    parts = [Part.NEAR, Part.FAR] if beyond_nodes and lane_ctas > 1 else [Part.WHOLE]
    return sum(1 << (part.ctas(lane_ctas) - 1).bit_length() for part in parts)


def test_what_nccl_makes_of_all_lanes_fits_beside_the_kernel() -> None:
    """For every method's lanes, on GPUs of all sizes, inside nodes and beyond: no more than the margin, or the GPU."""
    lanes = {
        len(method.plan(method.assigned(problem), phase, COMPUTE_BOUND).lanes)
        for problem in map(splittable_problem, (4, 9, 16))
        for method in all_methods(problem)
        for phase in PHASES
    }
    assert len(lanes) > 2
    for count in lanes:
        plans: Any = {"forward": SimpleNamespace(lanes=range(count))}
        for number in GPUS.values():
            for kernel, margin in ((PERSISTENT, None), (PERSISTENT, 24), (PERSISTENT, count), (OTHER, None)):
                found = shares(kernel(), plans, number, margin, environment={})
                most = number if found.margin is None else found.margin
                for beyond_nodes in (False, True):
                    assert count * taken(found.lane_ctas, beyond_nodes=beyond_nodes) <= most < number + 1, found


def test_a_persistent_kernel_leaves_what_the_lanes_take() -> None:
    lanes = [max(len(plan.lanes) for plan in plans.values()) for plans in (ONE_LANE, TWO_LANES)]
    for plans, count in zip((ONE_LANE, TWO_LANES), lanes, strict=True):
        found = shares(PERSISTENT(), plans, 132, environment={})
        assert found == SmShares(16 // count, 16 // count * count)
        found = shares(PERSISTENT(), plans, 132, environment={"NCCL_MAX_CTAS": "6"})
        assert found == SmShares(8, 8 * count), "as many as NCCL takes when it is told so"
        found = shares(PERSISTENT(), plans, 132, margin=40, environment={})
        assert found == SmShares(32 // count, 40), "or lanes take what is left"
        assert shares(PERSISTENT(), plans, 132, margin=0, environment={}) == SmShares(32, 0)
        assert shares(OTHER(), plans, 132, environment={}) == SmShares(32, None), "others leave waves, not SMs"
    assert lanes == [1, 2]
    assert shares(PERSISTENT(), {}, 132, environment={}).margin == 0, "a rank alone sends nothing"
    assert shares(PERSISTENT(), TWO_LANES, 20, environment={"NCCL_MAX_CTAS": "8"}).margin == 16


def test_what_can_t_be_left_is_refused() -> None:
    with pytest.raises(RequestError, match=r"kernel.sm_margin=8: cudnn has no such setting; kernel.sm_margin=auto"):
        shares(OTHER(), ONE_LANE, 132, margin=8)
    with pytest.raises(RequestError, match=r"kernel.sm_margin=132: the GPU has 132 SMs, .* at most 131 would work"):
        shares(PERSISTENT(), ONE_LANE, 132, margin=132)
    for kernel in (PERSISTENT, OTHER):
        with pytest.raises(RequestError, match=r"NCCL_MAX_CTAS=66: 2 lanes would take 256 of .* 132 SMs.* at most 64"):
            shares(kernel(), TWO_LANES, 132, environment={"NCCL_MAX_CTAS": "66"})
        assert shares(kernel(), ONE_LANE, 132, environment={"NCCL_MAX_CTAS": "33"}).lane_ctas == 64
    with pytest.raises(RequestError, match=r"kernel.sm_margin=1: the transfers of 2 lanes take an SM each; at least 2"):
        shares(PERSISTENT(), TWO_LANES, 132, margin=1)
    with pytest.raises(RequestError, match=r"kernel.sm_margin=8: a CPU has no SMs"):
        share(KERNELS["aten_cpu"](), ONE_LANE, torch.device("cpu"), margin=8)
    assert share(KERNELS["aten_cpu"](), ONE_LANE, torch.device("cpu")) is None


def test_flash_attn_3_is_told_in_every_call() -> None:
    """By the schemas of its operators, forward and backward, whole blocks and pieces."""
    with fakes.installed("flash_attn_3"):
        kernel, block = PERSISTENT(), block_of(8, 8, 2, torch.bfloat16)
        kernel.sm_margin = 16
        out, lse = kernel.forward(block.q, block.k, block.v, RegionKind.FULL)
        kernel.backward(block.dout, block.q, block.k, block.v, out, lse, RegionKind.FULL)
        regions = tuple(Region(RegionKind.CAUSAL, piece, piece) for piece in (range(4), range(4, 8)))
        pieces = Pieces(table_of(regions), torch.device("cpu"))
        out, lse = kernel.forward(block.q, block.k, block.v, pieces)
        kernel.gradients(block.dout, block.q, block.k, block.v, out, lse, pieces)
        assert vars(sys.modules["flash_attn_interface"])["margins"] == [16] * 4


def test_engine_transport_and_kernel_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that isn't there, up to where it would be used."""
    kernel, told = PERSISTENT(), []
    monkeypatch.setattr(attention_step, "kernel_for", lambda *_: kernel)
    properties = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    gpu = torch.device("cuda", 0)
    context = RankContext(0, gpu, lambda plans, ctas: told.append(ctas), alive=lambda: None)  # pyright: ignore
    for margin, wanted in ((None, SmShares(8, 16)), (24, SmShares(8, 24))):
        about = {"problem": PROBLEM, "plans": TWO_LANES, "kernel": "flash_attn_3", "sm_margin": margin}
        engine = attention_step.make_engine(Spec(workload=Attention(phases=PHASES), **about), PROBLEM, context)
        assert (engine.shares, kernel.sm_margin, told[-1]) == (wanted, wanted.margin, wanted.lane_ctas)


@pytest.mark.parametrize(
    ("name", "major", "said"),
    [("flash_attn_4", 10, True), ("flash_attn_4", 9, False), ("flash_attn_3", 9, False), ("cudnn", 10, False)],
)
def test_a_persistent_kernel_without_a_margin_is_said(
    monkeypatch: pytest.MonkeyPatch, name: str, major: int, said: bool
) -> None:
    """By kernel and compute capability; it is a note of the engine, and so of the record."""
    properties = SimpleNamespace(multi_processor_count=148, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    kernel, gpu = KERNELS[name](), torch.device("cuda", 0)
    found = share(kernel, TWO_LANES, gpu)
    engine = Engine(TWO_LANES, PROBLEM, kernel, torch.device("cpu"), shares=found)
    assert any(f"{name} holds all SMs" in note for note in engine.notes) == said


def point(*overrides: str) -> Request:
    with Composer() as composer:
        return resolve(composer.compose(["gpus=4", "mode=simulate", *overrides]))


def test_the_margin_is_a_key_of_the_kernel() -> None:
    assert point().sm_margin is None
    assert point("kernel=flash_attn_3", "kernel.sm_margin=24").sm_margin == 24
    with pytest.raises(RequestError, match=r"kernel.sm_margin=-1"):
        point("kernel.sm_margin=-1")
