"""Steps of models whose layers are of two kinds: some see all, the others what a window or chunks leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench.errors import RequestError
from sp_bench.point import run_points
from sp_bench.point.choose import choose_attentions
from sp_bench.point.training import least_compute_s, simulate_training
from sp_bench.records import Record
from sp_bench.records.work import step_flops
from tests.support.typed import Known
from tests.workload.requests import point

SIMULATED = ("cluster=h100_ndr400", "dtype=bfloat16", "mode=simulate")
EIGHT = ("model=llama3_8b", "gpus=8", "seqlen=64k")
WINDOW, BOTH = ("mask=window", "window=[1023,0]"), "model.full_every=4"


def step(*overrides: str) -> Record:
    return simulate_training(point(*SIMULATED, *overrides))


@pytest.mark.parametrize(
    "words",
    [
        "method=ring method.layout=zigzag train.recompute=full",
        "method=ulysses train.tensor_parallel=2",
        "method=all_gather method.layout=contiguous train.data_parallel=2 train.batch_tokens=256k",
    ],
)
def test_a_step_is_the_sum_of_its_layers(words: str) -> None:
    """A quarter of them as where all see all, and three as where none does."""
    given = (*EIGHT, *words.split())
    steps = [step(*given), step(*given, *WINDOW), step(*given, *WINDOW, BOTH)]
    assert [one.full_layers for one in steps] == [None, None, 8]
    full, windowed, both = map(Known, steps)
    assert both.full_attention_ms == pytest.approx(full.attention_ms / 4)
    names = ("forward_ms_median", "backward_ms_median", "update_ms_median", "attention_ms", "attention_exposed_ms")
    names += ("dense_ms", "tensor_sum_ms", "compute_ms", "comm_bytes_per_gpu", "gradient_sync_ms")
    for name in names:
        wanted = getattr(full, name) / 4 + 3 * getattr(windowed, name) / 4
        assert getattr(both, name) == pytest.approx(wanted, rel=1e-9), name
    for name in ("parameters", "gradients", "optimizer", "activations"):
        assert getattr(both, f"{name}_bytes") == getattr(full, f"{name}_bytes")
    assert both.attention_bytes == max(full.attention_bytes, windowed.attention_bytes)
    assert both.bound_ms <= both.step_ms_median
    flops = full.tflops_per_gpu * full.step_ms_median / 4 + 3 * windowed.tflops_per_gpu * windowed.step_ms_median / 4
    assert both.tflops_per_gpu * both.step_ms_median == pytest.approx(flops)


@pytest.mark.parametrize(("model", "chosen"), [("gemma3_27b", "contiguous"), ("gpt_oss_20b", "zigzag")])
def test_one_layout_is_chosen_by_the_step_of_both_kinds(model: str, chosen: str) -> None:
    """Layers with a wide window decide where most have one, and the others where half have a narrow one."""
    given = (f"model={model}", "method=ring", "gpus=16", "seqlen=64k", "train.parameters=sharded")
    each = {layout: Known(step(*given, f"method.layout={layout}")) for layout in ("contiguous", "striped", "zigzag")}
    fastest = min(each, key=lambda layout: each[layout].attention_ms)
    found = Known(step(*given))
    assert found.layout == fastest == chosen
    assert found.step_ms_median == each[fastest].step_ms_median
    assert found.validation.startswith("not validated") and "whole sequences and mask=window" in found.validation


def test_each_kind_has_the_variant_that_is_its_fastest() -> None:
    """With a narrow window that is another tile than with none."""
    given = ("model=llama3_8b", "gpus=16", "seqlen=128k", "mask=window", "window=[127,0]", BOTH, "model.layers=4")
    request = point(*SIMULATED, *given, "method=mesh", "method.layout=contiguous")
    full, windowed = choose_attentions(request).attentions
    assert full.variant != windowed.variant
    assert full.problem.layout == windowed.problem.layout
    for one in (full, windowed):
        timed = [row["step_ms"] for row in one.candidates or () if row["step_ms"] is not None]
        assert 1e3 * one.total_s == pytest.approx(min(timed))
    record = Known(simulate_training(request))
    assert record.variant == f"{full.variant}; {windowed.variant}"
    assert least_compute_s(request) < record.step_ms_median / 1e3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("model.full_every=2", "model.full_every=2: .*under mask=causal all see the same; mask=window window=.* work"),
        ("model.full_every=33 mask=window window=[7,0]", "model.full_every=33: .*; 2 to 32, or null, would work"),
        ("model.full_every=1 mask=window window=[7,0]", "model.full_every=1: leaves all of 32 layers alike"),
        ("model.full_every=2 mask=chunked chunk=8k method.layout=blocks", "method.layout=blocks: assigns documents"),
        ("model=tiny_dit phase=forward model.full_every=2 mask=window window=[7,7]", "model.full_every=2: .*one kind"),
        (
            "workload=prefill phase=forward model.full_every=2",
            "model.full_every=2: .*under mask=causal all see the same",
        ),
    ],
)
def test_bad_input(overrides: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        point(*SIMULATED, *EIGHT, "method=ring", *overrides.split())


def test_measured_layers_of_two_kinds_are_exact(tmp_path: Path) -> None:
    """By the gate, whose model has a layer of each kind, and in the last layer's attention as it was timed."""
    own = (
        "method=ring",
        "gpus=2",
        "mask=window",
        "window=[40,0]",
        "model.full_every=2",
        "model.layers=3",
        "parts=false",
    )
    request = point(*own, "dtype=float64", "iters=1", "warmup=0", "seqlen=128")
    record = Known(run_points([request], folder=tmp_path, reuse=False)[0].record)
    assert (record.status, record.full_layers, record.window) == ("ok", 1, [40, 0])
    assert max(record.err_loss, record.err_gradient, record.err_timed_out, record.err_timed_dk) < 1e-12
    assert 0 < record.full_attention_ms < record.attention_ms


@pytest.mark.parametrize(
    "mask",
    [
        "mask=window window=[1023,0]",
        "mask=window window=[1023,20]",
        "mask=chunked chunk=8k",
        "mask=document data=lengths data.lengths=[40k,24k] window=[500,0]",
    ],
)
def test_a_records_flops_are_those_of_layers_of_both_kinds(mask: str) -> None:
    """As its checks find them, from its fields alone."""
    record = Known(step(*EIGHT, "method=all_gather", BOTH, *mask.split()))
    flops = record.tflops_per_gpu * record.gpus * record.step_ms_median * 1e9
    assert step_flops(record.record) == pytest.approx(flops)
