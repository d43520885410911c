"""Shapes of models against the modules they become, labels, and data."""

from __future__ import annotations

import pytest
import torch

from sp_bench.resources import conf_files
from sp_bench.workload import Train
from sp_bench.workload.losses import IGNORED, cross_entropy, next_tokens
from sp_bench.workload.model import NONE
from sp_bench.workload.tasks import tokens
from sp_bench.workload.transformer import Transformer
from tests.support.typed import of_kind, there
from tests.workload.requests import point

SIMULATED = ("gpus=2", "method=ring", "cluster=h100_ndr400", "dtype=bfloat16")
"""On GPUs, as models of billions of parameters may not fit this machine."""
MODELS = [name for name in conf_files("model") if name != NONE]


@pytest.mark.parametrize("name", ["tiny", "tiny_dit", "tiny_mla"])
def test_parameters_are_those_of_the_module(name: str) -> None:
    request = point(f"model={name}", "gpus=2", "method=ring")
    model = of_kind(Train, request.workload).model
    module = Transformer(model, request.problem, seed=0)
    assert sum(p.numel() for p in module.parameters()) == model.parameters(request.problem)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama_1b", 1.24),
        ("llama_3b", 3.43),
        ("llama_7b", 6.74),
        ("llama3_8b", 8.03),
        ("qwen3_8b", 8.19),
        ("llama3_70b", 70.6),
        ("dit_xl", 0.67),
        ("gemma3_27b", 28.4),
        ("gpt_oss_20b", 4.18),
        ("minicpm3_4b", 4.26),
        ("deepseek_v2_lite", 2.66),
        ("deepseek_v3_latents", 37.4),
    ],
)
def test_published_sizes(name: str, billions: float) -> None:
    """Llama 7B: 6.7B (table 2 of its paper). Llama 3 8B: 8.03B. DiT-XL: 675M (table 1 of its paper). Gemma 3 27B: 25.6B
    and an embedding of 1.4B, which is there twice. gpt-oss-20b: 3.6B active, which count one of both of 0.58B.
    MiniCPM3: 4.07B, and an embedding of 0.19B, which is there twice. DeepSeek-V3: 37B active. DeepSeek-V2-Lite: 2.4B
    active, which count one of both of 0.21B."""
    of_attention = name == "deepseek_v3_latents"  # by default
    request = point(f"model={name}", *SIMULATED, *["workload=train"] * of_attention)
    assert of_kind(Train, request.workload).model.parameters(request.problem) / 1e9 == pytest.approx(billions, rel=0.02)


def test_flops_are_six_times_parameters_and_tokens() -> None:
    """Those of the matrices; the attention's stand beside them."""
    request = point("model=llama_7b", *SIMULATED, "seqlen=1k", "mask=causal")
    problem, model = request.problem, of_kind(Train, request.workload).model
    matrices = model.parameters(problem) - there(model.vocab) * model.width - (2 * model.layers + 1) * model.width
    attention = 3.5 * 2 * 1024**2 * problem.heads * problem.head_dim * model.layers
    total = sum(request.workload.flops(phase, problem) for phase in request.phases)
    assert total == pytest.approx(6 * matrices * 1024 + attention)


def test_labels_are_the_next_tokens_of_each_document() -> None:
    ids = torch.arange(10)[None]
    assert next_tokens(ids)[0].tolist() == [*range(1, 10), IGNORED]
    assert next_tokens(ids, (4, 1, 5))[0].tolist() == [1, 2, 3, IGNORED, IGNORED, 6, 7, 8, 9, IGNORED]


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked_cross_entropy_is_torch_s(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[3, IGNORED, 0, 10, 3, 1, IGNORED]])
    ours = cross_entropy(hidden, weight, labels, 5, chunk)
    found = torch.autograd.grad(2 * ours, (hidden, weight))
    theirs = torch.nn.functional.cross_entropy((hidden @ weight.T)[0], labels[0])
    wanted = torch.autograd.grad(2 * theirs, (hidden, weight))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(found, wanted)


def test_tasks_have_structure() -> None:
    generator = torch.Generator().manual_seed(0)
    copied = tokens("copy", 64, 2, 64, generator)
    assert torch.equal(copied[:, 8:], copied[:, :-8])
    recalled = tokens("recall", 64, 2, 65, generator)
    for row in recalled.tolist():
        values: dict[int, set[int]] = {}
        for key, value in zip(row[::2], row[1::2], strict=False):
            values.setdefault(key, set()).add(value)
        assert all(len(v) == 1 for v in values.values()) and len(values) > 8
