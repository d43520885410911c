"""Keys that a point's mode doesn't read are said in its record: none changes nothing without a word."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import yaml

from sp_bench.advise.__main__ import main as advise
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.point import resolve
from sp_bench.point.simulations import simulation_of
from sp_bench.point.unread import READ_BY
from sp_bench.resources import CONF

POINT = ("mode=simulate", "gpus=2", "seqlen=1k", "heads=4", "kv_heads=4", "method=all_gather")
DECODING = ("mode=simulate", "gpus=4", "heads=4", "kv_heads=4", "method=pass_q", "workload=decode")
TRAINING = (*POINT, "model=tiny", "head_dim=128")
PREFILL = (*TRAINING, "workload=prefill")
OTHERWISE: dict[str, str] = {
    "gpus": "4", "seqlen": "2k", "kv_seqlen": "64k", "batch": "2", "heads": "8", "kv_heads": "2", "head_dim": "64",
    "v_head_dim": "32", "latent_dim": "32", "rope_dim": "16", "mask": "full",
    "causal": "false", "dtype": "float16", "wire_dtype": "float32", "phase": "forward", "train.recompute": "none",
    "train.offload": "true",
    "train.parameters": "sharded", "train.tensor_parallel": "2", "train.data_parallel": "2",
    "train.batch_tokens": "8k", "train.linears": "float8", "train.loss_chunk": "64",
    "train.learning_rate": "0.5", "train.task": "copy", "alone": "[1]", "device": "cpu", "nccl": "{P2P_DISABLE: 1}",
    "transport": "symmetric_memory", "registered_buffers": "true", "cta_policy": "efficiency", "cuda_graph": "true",
    "stragglers.ranks": "{1: 2}", "stragglers.links": "{port: {0: 0.5}}", "stragglers.jitter": "0.2", "iters": "3",
    "warmup": "1", "verify": "false", "parts": "false", "timeout_s": "5", "seed": "4", "window": "[9,0]", "chunk": "64",
    "mode": "alone", "workload": "train", "kernel.sm_margin": "8", "decode.tensor_parallel": "2",
    "decode.latent": "true", "decode.page_tokens": "16",
    "every_variant": "true", "sinks": "true",
    "prefill.chunk": "256", "prefill.cached": "512", "prefill.tensor_parallel": "2",
}  # fmt: skip
"""Another valid value of each key of conf/config.yaml, and of the one of conf/kernel."""
ABOUT_THE_OUTPUT = {"trace", "baseline", "reuse", "results_dir"}
OF_PEERS = {"impl"}
"""Read with method=peer alone: a sweep sets it for another point than this one."""


def keys() -> list[str]:
    """All keys of conf/config.yaml, of the sections those inside, and kernel.sm_margin."""
    content: dict[str, Any] = yaml.safe_load((CONF / "config.yaml").read_text())
    del content["defaults"]
    inside = [f"{key}.{name}" for key, value in content.items() if isinstance(value, dict) for name in value]
    return [key for key, value in content.items() if not isinstance(value, dict)] + inside + ["kernel.sm_margin"]


@cache
def record(*overrides: str) -> dict[str, Any]:
    """The record of a simulated point as a reader sees it, without the config itself."""
    with Composer() as composer:
        request = resolve(composer.compose(overrides))
    found = simulation_of(request).outcome(request).record.to_dict()
    return {name: value for name, value in found.items() if name not in ("config", "run_id", "provenance")}


@pytest.mark.parametrize("key", sorted({*keys()} - ABOUT_THE_OUTPUT - OF_PEERS))
def test_each_key_is_read_refused_or_said_to_be_unread(key: str) -> None:
    """By another value on a simulated point a figure or a description differs, or a note names it, or it is refused."""
    bases = {"train.": TRAINING, "prefill.": PREFILL, "decode.": DECODING}
    base = next((base for section, base in bases.items() if key.startswith(section)), POINT)
    base = tuple(word for word in base if word.partition("=")[0] != key)
    try:
        differs = record(*base, f"{key}={OTHERWISE[key]}")
    except RequestError:
        return
    notes, usual = " ".join(differs["notes"] or ()), record(*base)
    figures = {name for name in differs if name != "notes" and differs[name] != usual[name]}
    assert f"{key}=" in notes or figures


@pytest.mark.parametrize("key", [key for key in READ_BY if "." not in key])
def test_what_is_said_has_the_value(key: str) -> None:
    notes = record(*POINT, f"{key}={OTHERWISE[key]}")["notes"]
    assert f"a simulated point doesn't read {key}={OTHERWISE[key]}".replace(", ", ",") in notes[0].replace(", ", ",")


def test_several_keys_are_one_note_and_defaults_are_none() -> None:
    said = "a simulated point doesn't read nccl={P2P_DISABLE: 1}, iters=3"
    assert record(*POINT, "iters=3", "nccl={P2P_DISABLE: 1}")["notes"] == [said]
    assert not record(*POINT, "iters=10", "nccl=null", "device=auto")["notes"]


def test_advice_refuses_what_only_measured_points_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert advise(["gpus=2", "nccl={P2P_DISABLE: 1}"]) == 2
    assert "is read by measured points only, and advice simulates" in capsys.readouterr().err
