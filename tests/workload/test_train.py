"""Training with sequence-parallel attention: gradients and loss curves against one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sp_bench.errors import RequestError
from tests.support.marks import exhaustive
from tests.support.ranks import Ranks
from tests.support.typed import Known
from tests.workload import jobs
from tests.workload.requests import METHODS, point, training

EXACT = 1e-10
"""Relative L2 error of the gradient of every parameter in fp64."""
CURVE = 1e-5
"""Relative difference of the loss at each step in fp32."""
TWO_KINDS = (
    "method=ring mask=window window=[9,0] model.layers=3",
    "method=mesh mask=chunked chunk=20 train.recompute=full model.layers=4",
    "method=zigzag mask=document data=lengths data.lengths=[10,1,30,23] window=[6,0]",
    "method=all_gather mask=window window=[4,3] model=tiny_dit",
)
"""Windows and chunks beside layers that see all."""
OTHERS = (
    "method=ring train.recompute=none",
    "method=mesh train.recompute=full batch=2",
    "method=zigzag seqlen=67 train.loss_chunk=5",
    "method=ring mask=document data=lengths data.lengths=[10,1,30,23]",
    "method=mesh method.layout=contiguous mask=window window=[9,0]",
    "method=ring model=tiny_dit batch=2",
    "method=ulysses model=tiny_dit train.recompute=full",
    "method=mesh train.parameters=sharded",
    "method=zigzag train.parameters=sharded train.recompute=none model.ffn=70",
    "method=ring train.parameters=sharded train.recompute=full model=tiny_dit batch=2",
    *(f"{words} model.full_every=2" for words in TWO_KINDS),
)
"""Properties that are not the same for all methods, with one of them."""


def assert_exact(ranks: Ranks, points: list[str]) -> None:
    found = ranks.run(jobs.gradient_errors, [training("gpus=4", *p.split()) for p in points])[0]
    assert len(found) == len(points)
    for named, errors in zip(points, found, strict=True):
        assert len(errors) > 10
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < EXACT, f"{named}: {worst} is off by {errors[worst]:.1e}"


@pytest.mark.parametrize("methods", [("ring", "ulysses", "mesh"), exhaustive(METHODS)], ids=len)
def test_gradients_of_every_parameter_with_every_method(ranks: Ranks, methods: tuple[str, ...]) -> None:
    assert_exact(ranks, [f"method={name}" for name in methods])


@pytest.mark.parametrize("methods", [("usp", "group_cast"), exhaustive(METHODS)], ids=len)
def test_gradients_of_layers_of_two_kinds_with_every_method(ranks: Ranks, methods: tuple[str, ...]) -> None:
    words = "mask=window window=[9,0] model.full_every=2 model.layers=3"
    assert_exact(ranks, [f"method={name} {words}" for name in methods])


@pytest.mark.parametrize("methods", [("ring", "ulysses", "mesh", "group_cast"), exhaustive(METHODS)], ids=len)
def test_gradients_with_sinks_of_every_layer(ranks: Ranks, methods: tuple[str, ...]) -> None:
    """Ranks have all heads of their queries or all queries of their heads: the sum over them is the gradient."""
    more = {"mesh": "train.recompute=full", "ring": "mask=window window=[9,0] model.full_every=2"}
    points = [f"method={name} sinks=true {more.get(name, '')}" for name in methods]
    assert_exact(ranks, points)
    (errors,) = ranks.run(jobs.gradient_errors, [training("gpus=4", *points[0].split())])[0]
    assert {name for name in errors if "sinks" in name} == {f"gradient of layers.{i}.sinks" for i in range(2)}


LATENTS = {
    "ring": "train.recompute=none sinks=true",
    "ulysses": "train.recompute=full method.pad_heads=true heads=5",
    "mesh": "train.parameters=sharded",
    "usp": "mask=window window=[9,0] model.full_every=2 model.layers=3",
    "group_cast": "mask=document data=lengths data.lengths=[10,1,30,23] model.q_latent=null",
}
KEYS = "latent_dim=null rope_dim=null kv_heads=4"


@pytest.mark.parametrize("methods", [("ring", "ulysses", "group_cast"), exhaustive(METHODS)], ids=len)
def test_gradients_of_latents_and_of_what_makes_keys_of_them(ranks: Ranks, methods: tuple[str, ...]) -> None:
    """Every parameter's, those of the matrices that blocks apply among them, against a model that makes all keys."""
    points = [f"method={name} model=tiny_mla {LATENTS.get(name, '')}" for name in methods]
    assert_exact(ranks, [*points, f"method=ring model=tiny_mla {KEYS}"])
    (errors,) = ranks.run(jobs.gradient_errors, [training("gpus=4", *points[0].split())])[0]
    made = {
        f"gradient of layers.0.{name}.weight" for name in ("q_down", "q_norm", "kv_down", "kv_norm", "k_up", "v_up")
    }
    assert made < errors.keys()


def test_sinks_that_are_left_out_show(ranks: Ranks) -> None:
    """As an attention that drops them would."""
    spec = training("gpus=2", "method=ring", "sinks=true")
    right, found = (ranks.run(jobs.gradient_errors, [spec], drops)[0][0] for drops in (False, True))
    assert right["gradient"] < EXACT
    assert found["gradient"] > 1e-3 and found["loss"] > 1e-6


def test_a_layer_of_the_wrong_kind_shows(ranks: Ranks) -> None:
    """With the attentions of the two kinds exchanged, no gradient but a few is right."""
    spec = training("gpus=2", "method=ring", *"mask=window window=[9,0] model.full_every=2".split())
    wrong = replace(spec, attentions=spec.attentions[::-1])
    right, found = ranks.run(jobs.gradient_errors, [spec, wrong])[0]
    assert right["gradient"] < EXACT
    assert found["gradient"] > 1e-3


@pytest.mark.long
def test_gradients_of_other_models_masks_lengths_and_recomputations(ranks: Ranks) -> None:
    assert_exact(ranks, list(OTHERS))


def assert_curves_alike(ranks: Ranks, steps: int, methods: tuple[str, ...], *overrides: str) -> None:
    """Losses on 4 ranks are those of one process."""
    asked = ("dtype=float32", *overrides)
    alone = training("gpus=1", "method=reference", *asked)
    one = np.array(ranks.run(jobs.losses, [alone], steps)[0][0])
    assert steps < 100 or one[-5:].mean() < one[:5].mean() - 0.5, "it learns"
    found = ranks.run(jobs.losses, [training("gpus=4", f"method={name}", *asked) for name in methods], steps)[0]
    for name, curve in zip(methods, found, strict=True):
        off = np.abs(np.array(curve) / one - 1).max()
        assert off < CURVE, f"{name}: the loss is off by {off:.1e}"


@pytest.mark.parametrize("methods", [("usp",), exhaustive(METHODS)], ids=len)
def test_loss_curves_of_every_method_begin_alike(ranks: Ranks, methods: tuple[str, ...]) -> None:
    assert_curves_alike(ranks, 5, methods)


@pytest.mark.long
def test_loss_curves_with_sharded_parameters_begin_alike(ranks: Ranks) -> None:
    assert_curves_alike(ranks, 5, ("mesh", "zigzag"), "train.parameters=sharded")


@pytest.mark.long
def test_loss_curves_over_200_steps(ranks: Ranks) -> None:
    """Those of all methods stand in docs/results/training.md."""
    assert_curves_alike(ranks, 200, ("mesh",), "seqlen=32", "batch=2")


def test_a_wrong_attention_shows_in_the_curve(ranks: Ranks) -> None:
    """One that hides keys from some queries."""
    right, wrong = (
        training("gpus=4", "method=ring", "dtype=float32", *o) for o in ((), ("mask=window", "window=[15,0]"))
    )
    first, second = ranks.run(jobs.losses, [right, wrong], 3)[0]
    assert abs(second[0] / first[0] - 1) > CURVE


def test_another_seed_is_another_curve(ranks: Ranks) -> None:
    workload = training("gpus=2", "method=ring")
    first, again, other = ranks.run(jobs.losses, [workload, workload, replace(workload, seed=1)], 2)[0]
    assert first == again
    assert first[0] != other[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("model=none workload=train", "workload=train: needs a model; model=tiny would work"),
        ("model=tiny_dit workload=train", "model=tiny_dit: is a dit, .* workload=dit would work"),
        ("model=tiny phase=forward", "phase=forward: there is no such phase"),
        ("train.recompute=some", "train.recompute=some: there is no such recompute; .*known: attention, full, none"),
        ("train.task=chess", "train.task=chess: there is no such task; recall or copy would work"),
        ("model.layers=0", "model.layers=0: must be a whole number of at least 1"),
        ("gpus=3 method=ulysses", "heads=4"),
        ("head_dim=15", "head_dim=15: RoPE turns pairs of elements"),
        ("mode=alone device=cpu", "mode=alone: executes attention, not workload=train"),
    ],
)
def test_bad_input(overrides: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        point("gpus=4", *overrides.split()) if "gpus" not in overrides else point(*overrides.split())


@pytest.mark.long
def test_measured_point_has_the_parts_of_a_step(tmp_path) -> None:
    from sp_bench.point import run_points

    request = point("gpus=2", "method=ring", "dtype=float32", "iters=2", "warmup=1", "seqlen=128")
    (outcome,) = run_points([request], folder=tmp_path, reuse=False)
    record = Known(outcome.record)
    assert (record.status, record.workload, record.model) == ("ok", "train", "tiny")
    assert record.comm_bytes_per_gpu == record.comm_bytes_expected
    synced = 2 * (1 / 2) * 4 * (record.parameters + 1)
    assert record.comm_bytes_by_lane["update/gradients/all_reduce/sum"] == synced
    times = ("forward", "backward", "update")
    assert record.step_ms_median == pytest.approx(sum(getattr(record, f"{t}_ms_median") for t in times), rel=0.5)
    for name in ("attention_ms", "dense_ms", "loss_ms", "gradient_sync_ms", "optimizer_ms"):
        assert 0 < getattr(record, name) < 2 * record.step_ms_median
    held = ("parameters", "gradients", "optimizer", "activations", "attention")
    assert record.peak_mem_bytes_max == sum(getattr(record, f"{name}_bytes") for name in held)
    assert record.parameters_bytes == 4 * record.parameters
    wanted = request.workload.held_bytes(request.cluster.device, request.problem)
    assert record.activations_bytes == pytest.approx(wanted["activations"], rel=0.05)
    for kind in ("parameters", "gradients", "optimizer"):
        assert getattr(record, f"{kind}_bytes") == pytest.approx(wanted[kind], rel=0.01)
    assert len(record.losses) == 3 + 1, "the first step, which measures memory, and three iterations"
    assert record.err_loss < 1e-6
    assert record.err_gradient < 1e-6
    assert record.err_seqlen == record.err_timed_seqlen == 128
    timed = [record.err_timed_out, record.err_timed_dq, record.err_timed_dk, record.err_timed_dv]
    assert 1e-9 < min(timed) < max(timed) < 2e-6


@pytest.mark.long
@pytest.mark.parametrize("form", ["", KEYS])
def test_a_measured_point_of_layers_with_latents(form: str, tmp_path) -> None:
    from sp_bench.point import run_points

    base = ("model=tiny_mla", "gpus=2", "method=ring", "dtype=float32", "iters=1", "warmup=1", "seqlen=128")
    request = point(*base, *form.split())
    record = Known(run_points([request], folder=tmp_path, reuse=False)[0].record)
    assert (record.status, record.model) == ("ok", "tiny_mla"), record.error
    assert record.comm_bytes_per_gpu == record.comm_bytes_expected
    wanted = request.workload.held_bytes(request.cluster.device, request.problem)
    assert record.activations_bytes == pytest.approx(wanted["activations"], rel=0.05)
    assert max(record.err_gradient, record.err_timed_out, record.err_timed_dq, record.err_timed_dk) < 2e-6


@pytest.mark.long
def test_sharded_points_count_what_fsdp_sends_and_hold(tmp_path) -> None:
    from sp_bench.point import run_points

    common = ("gpus=4", "method=ring", "dtype=float32", "iters=1", "warmup=0", "seqlen=128", "model.ffn=70")
    points = [point(*common, f"train.parameters={kind}") for kind in ("sharded", "replicated")]
    sharded, whole = (Known(run_points([p], folder=tmp_path, reuse=False)[0].record) for p in points)
    assert (sharded.status, sharded.sharded, whole.sharded) == ("ok", True, False), sharded.record.error
    assert sharded.comm_bytes_per_gpu == sharded.comm_bytes_expected
    np.testing.assert_allclose(sharded.losses, whole.losses, rtol=CURVE)
    wanted = points[0].workload.held_bytes(points[0].cluster.device, points[0].problem)
    for kind in ("parameters", "gradients", "optimizer", "gathered"):
        assert getattr(sharded, f"{kind}_bytes") == pytest.approx(wanted[kind], rel=0.02), kind
    assert sharded.activations_bytes == pytest.approx(whole.activations_bytes, rel=0.02)
    assert 0 < sharded.gradient_sync_ms < sharded.step_ms_median
