"""Simulated denoising steps: all layers of a model, with text that all ranks hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sp_bench import account
from sp_bench.plan.ops import Attend
from sp_bench.plan.tensors import O
from sp_bench.point import run_points
from sp_bench.point.choose import DeviceMemoryError, choose
from sp_bench.point.prefill import least_compute_s, phases_ms, simulate_prefill
from sp_bench.point.simulated import simulate_point
from sp_bench.point.training import simulate_training
from sp_bench.records.checking import problems_of
from sp_bench.workload import Train
from tests.support.points import point
from tests.support.typed import Known, of_kind

FLUX = ("cluster=h100_ndr400", "model=flux_like", "phase=forward")
WAN = ("cluster=h100_ndr400", "model=wan_like")


def step(*overrides: str) -> Known:
    return Known(simulate_prefill(point(*overrides)))


@pytest.mark.parametrize("method", ["ring", "ulysses", "mesh"])
def test_without_text_it_is_the_forward_of_all_layers(method: str) -> None:
    """Attentions are attention points; matrices take as long as in a training step, but for modulations and loss."""
    asked = (f"method={method}", "gpus=8", "seqlen=64k", "model.text_tokens=0")
    record, one = step(*FLUX, *asked), step(*FLUX, *asked, "model.layers=1")
    attention = Known(simulate_point(point(*FLUX, "workload=attention", f"method={method}", "gpus=8", "seqlen=64k"))[0])
    raw = record.record
    assert (raw.status, raw.model, raw.text, raw.text_tokens) == ("ok", "flux_like", None, None)
    assert (raw.chunks, raw.ttft_s, raw.losses, raw.gradients_bytes) == (None,) * 4
    assert record.attention_ms == pytest.approx(57 * attention.step_ms_median) == pytest.approx(57 * one.attention_ms)
    assert record.step_ms_median == record.forward_ms_median
    assert record.step_ms_median == pytest.approx(record.attention_ms + record.dense_ms)
    assert record.comm_bytes_per_gpu == record.comm_bytes_expected == 57 * attention.comm_bytes_per_gpu
    assert record.bound_ms <= record.step_ms_median and record.tokens_per_s == pytest.approx(
        2**16 / record.step_ms_median * 1e3
    )
    trained = point(*FLUX[:2], *asked)
    costs = of_kind(Train, trained.workload).costs(trained.problem, trained.cluster.device)
    layers_ms = 1e3 * 57 * costs.layer_s("forward")
    assert layers_ms < record.dense_ms < 1.05 * layers_ms


def test_memory_is_weights_and_one_layer() -> None:
    record = step(*FLUX, "method=ring", "gpus=4", "seqlen=16k")
    assert record.parameters_bytes == 2 * record.parameters
    tokens = 2**14 // 4 + 512
    assert record.activations_bytes == 2 * tokens * 2 * (3072 + 12288)
    residual, text = 2 * tokens * 3072, 2 * 2 * 512 * 3072
    peak = max(record.activations_bytes, record.attention_bytes + residual + text)
    assert record.peak_mem_bytes_max == record.parameters_bytes + peak


@pytest.mark.parametrize("method", ["ring", "ulysses", "mesh", "pass_q", "usp"])
@pytest.mark.parametrize("n", [1, 8])
def test_joint_text_is_further_queries_and_one_block_more(method: str, n: int) -> None:
    """Each rank has all text as queries. Text keys are never sent, and all queries see them once."""
    request = point(*FLUX, f"method={method}", f"gpus={n}", "seqlen=8k", "mode=simulate")
    choice = choose(request)
    problem, plan = choice.problem, choice.plans["forward"]
    queries = 8192 + n * 512
    assert (problem.seqlen, problem.keys.seqlen, problem.mask.held) == (queries, 8192, 512)
    assert account.pairs(plan, problem).sum() == 24 * queries * (8192 + 512)
    assert account.volume(plan, problem).total_bytes == choice.method.bytes_sent(problem, "forward")
    same = ("workload=attention", f"method={method}", f"gpus={n}", f"seqlen={queries}", "kv_seqlen=8k")
    without = choose(point(*FLUX, *same))
    sent = (account.volume(each.plans["forward"], each.problem).sent_bytes for each in (choice, without))
    assert next(sent) == next(sent)
    device, tensor = request.cluster.device, O.by_heads if problem.layout.head_parallel > 1 else O
    kinds = range(problem.blocks.classes)
    kernel_s = max(device.regions_s(problem, "forward", problem.blocks.held_of(kind)) for kind in kinds)
    more_s = kernel_s + device.fold_s(problem, tensor)
    if sum(isinstance(op, Attend) for op in plan.ops) == 1:  # its output becomes a sum: written as one, and cast
        more_s += device.fold_s(problem, tensor, first=True) + device.cast_s(problem, tensor, wire=False)
    busy_s, before_s = (each.runs["forward"].busy_s.max() for each in (choice, without))
    assert busy_s - before_s == pytest.approx(more_s, rel=0.05)


def test_cross_attention_is_local() -> None:
    """It adds matrices and blocks on each rank, and sends nothing."""
    asked = (*WAN, "method=ulysses", "gpus=8", "seqlen=75600")
    with_text, without = step(*asked), step(*asked, "model.text_tokens=0")
    assert (with_text.text, with_text.text_tokens, without.record.text) == ("cross", 512, None)
    assert with_text.comm_bytes_per_gpu == without.comm_bytes_per_gpu
    assert with_text.attention_ms == pytest.approx(without.attention_ms)
    assert with_text.parameters - without.parameters == 40 * 4 * 5120**2
    more_ms = with_text.dense_ms - without.dense_ms
    products = 40 * (2 * 2 * 75600 / 8 * 5120**2 + 2 * 2 * 512 * 5120**2)
    block = 40 * 4 * 75600 / 8 * 512 * 5120
    rate = point(*asked).cluster.device.matmul_flops_per_s("bfloat16")
    assert 1e3 * (products + block) / rate < more_ms < 2e3 * (products + block) / rate


def test_held_text_costs_more_than_assigned_text() -> None:
    """On 8 GPUs: whole on each of them, its queries are computed 8 times; assigned among the patches, once."""
    held = step(*FLUX, "method=ulysses", "gpus=8", "seqlen=4k")
    assigned = step(*FLUX, "method=ulysses", "gpus=8", "seqlen=4608", "model.text_tokens=0")
    assert held.step_ms_median > 1.3 * assigned.step_ms_median
    assert held.tflops_per_gpu < assigned.tflops_per_gpu


def test_what_does_not_fit_says_so() -> None:
    with pytest.raises(DeviceMemoryError, match="more GPUs, or a smaller seqlen or batch, would work"):
        step(*FLUX, "method=ring", "gpus=2", "seqlen=16M")


def test_phases_and_bounds_of_other_readers() -> None:
    request = point(*FLUX, "method=ring", "gpus=8", "seqlen=32k")
    record = Known(simulate_prefill(request))
    assert phases_ms(request, request.cluster) == {"forward": pytest.approx(record.step_ms_median)}
    assert 0 < least_compute_s(request) <= record.step_ms_median / 1e3


def test_the_training_step_has_no_text() -> None:
    asked = ("cluster=h100_ndr400", "model=flux_like", "method=ring", "gpus=8", "seqlen=32k")
    record, without = (simulate_training(point(*asked, *more)) for more in ((), ("model.text_tokens=0",)))
    assert record.text_tokens is None and record.step_ms_median == without.step_ms_median


@pytest.mark.parametrize("text", ["model.text_tokens=0", "model.text_tokens=8", "model.text=cross model.text_tokens=8"])
def test_simulated_records_hold_together(tmp_path: Path, text: str) -> None:
    """FLOPs are found anew from a record's fields."""
    request = point("model=tiny_dit", "phase=forward", "method=mesh", "gpus=8", "seqlen=4k", "cluster=h100_ndr400",
                    "head_dim=64", *text.split())  # fmt: skip
    (outcome,) = run_points([request], folder=tmp_path, reuse=False)
    assert outcome.record.status == "ok"
    (path,) = (path for path in tmp_path.glob("*.json") if path.name.count(".") == 1)
    assert problems_of(path) == []


def test_measured_records_hold_together(tmp_path: Path) -> None:
    request = point("model=tiny_dit", "phase=forward", "method=ring", "gpus=2", "seqlen=128", "model.text_tokens=8",
                    "cluster=local", "iters=2", "warmup=1")  # fmt: skip
    (outcome,) = run_points([request], folder=tmp_path, reuse=False)
    record = Known(outcome.record)
    assert (record.status, record.mode, record.text_tokens, outcome.record.losses) == ("ok", "measure", 8, None)
    assert 0 < record.err_out < 1e-5 and 0 < record.err_timed_out < 1e-5
    assert record.comm_bytes_per_gpu == record.comm_bytes_expected > 0
    assert record.attention_ms > 0 and record.dense_ms > 0 and outcome.record.loss_ms is None
    tokens, element = 128 // 2 + 8, 4
    assert record.parameters_bytes == element * record.parameters
    assert record.activations_bytes == element * tokens * 2 * (64 + 256)
    assert record.parameters_bytes < record.peak_mem_bytes_max < record.parameters_bytes + record.activations_bytes * 2
    (path,) = (path for path in tmp_path.glob("*.json") if path.name.count(".") == 1)
    assert problems_of(path) == []


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "dit.md"
ROWS = re.findall(r"^\| (FLUX.1|HunyuanVideo) \| (.+?) \| ([\d.]+) \| ([\d.]+) \| (-?\d+)% \|$", PAGE.read_text(), re.M)
SHAPES = {
    "FLUX.1": (28, ("seqlen=4608", "model.text_tokens=0")),
    "HunyuanVideo": (50, ("seqlen=118800", "model.layers=60", "model.text_tokens=256")),
}
"""Denoising steps of an image or video, and their shape."""
FORMS = {"1": ("reference", 1), "ulysses 2 x ring 2": ("usp", 4)}


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_the_page_has_what_is_simulated(row: tuple[str, ...]) -> None:
    """The published times stand there as xDiT prints them."""
    model, form, published, printed, error = row
    steps, shape = SHAPES[model]
    method, gpus = FORMS.get(form) or (form.split()[0], int(form.split()[1]))
    degree = ("method.ulysses=2",) if method == "usp" else ()
    record = step(*FLUX, "kernel=flash_attn", f"method={method}", f"gpus={gpus}", *degree, *shape)
    seconds = steps * record.step_ms_median / 1e3
    assert float(printed) == pytest.approx(seconds, rel=0.005)
    assert int(error) == round(100 * (seconds / float(published) - 1))


def test_the_page_has_all_rows() -> None:
    assert len(ROWS) == 10
