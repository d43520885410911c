"""Denoising steps: patches and text that all ranks hold, against plain attention on one process."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import Joint
from sp_bench.plan.problem import Problem
from sp_bench.run.engine import Engine, Saved
from sp_bench.workload import Denoise, Dit
from tests.support.marks import exhaustive
from tests.support.ranks import Ranks
from tests.workload import jobs
from tests.workload.requests import METHODS, point, training

EXACT = 1e-13
"""Relative L2 error of patches in fp64. Text that is left out makes one of 1e-6 or more."""
REFUSED = ("group_cast", "hybrid_cp")
"""Methods that cast rows of whole packs, whose keys are those of queries."""
TAKEN = tuple(name for name in METHODS if name not in REFUSED)
JOINT = "model.text=joint model.text_tokens=6"


def assert_exact(ranks: Ranks, points: list[str]) -> None:
    asked = [training("model=tiny_dit", "phase=forward", *each.split()) for each in points]
    found = ranks.run(jobs.denoising_errors, asked)[0]
    assert len(found) == len(points)
    for named, (error, without) in zip(points, found, strict=True):
        assert error < EXACT, f"{named}: off by {error:.1e}"
        assert without is None or without > 1e4 * EXACT, f"{named}: text makes no difference"


@pytest.mark.parametrize("methods", [("ring", "ulysses", "usp", "mesh", "pass_q"), exhaustive(TAKEN)], ids=len)
def test_joint_text_with_every_method(ranks: Ranks, methods: tuple[str, ...]) -> None:
    assert_exact(ranks, [f"method={name} gpus=4 seqlen=64 {JOINT}" for name in methods])


OTHERS = (
    "method=ring gpus=3 seqlen=61",  # no text: any number of patches
    "method=mesh gpus=4 seqlen=64 model.text=cross model.text_tokens=5 batch=2",
    "method=ulysses gpus=4 seqlen=64 model.text=cross model.text_tokens=5 model.modulation=shared kv_heads=2",
    f"method=usp method.ulysses=2 gpus=4 seqlen=64 kv_heads=2 batch=2 {JOINT}",
    "method=zigzag gpus=4 seqlen=68 model.text_tokens=5",
    f"method=ulysses method.pad_heads=true gpus=3 seqlen=63 {JOINT}",
    f"method=upipe gpus=2 heads=8 seqlen=64 kv_heads=4 {JOINT}",
    f"method=mesh method.tile=[2,2] method.fuse=true gpus=4 seqlen=64 {JOINT}",
)
"""Other text, layouts, heads and forms, with one method each."""


def test_other_text_layouts_and_heads(ranks: Ranks) -> None:
    assert_exact(ranks, list(OTHERS))


@settings(max_examples=6)
@given(
    method=st.sampled_from(["ring", "usp", "mesh", "all_gather", "tokenring", "pass_q", "group_cast", "hybrid_cp"]),
    gpus=st.integers(1, 8),
    each=st.integers(1, 9),
    text=st.integers(1, 12),
    kv_heads=st.sampled_from([8, 4]),
)
def test_any_number_of_patches_and_text_tokens(
    ranks: Ranks, method: str, gpus: int, each: int, text: int, kv_heads: int
) -> None:
    assume(method != "usp" or gpus in (1, 2, 4, 8))
    shape = f"gpus={gpus} seqlen={gpus * each} heads=8 kv_heads={kv_heads} model.text_tokens={text}"
    assert_exact(ranks, [f"method={method} {shape}"])


def test_the_gate_sees_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes as it is, and not if an engine gets the text of other heads."""
    given = ("model=tiny_dit", "phase=forward", "gpus=1", "method=ring", "seqlen=64", "dtype=float32")
    spec, context = training(*given, *JOINT.split()), jobs.context_of(None, 0)
    assert spec.workload.gate(spec, context).wrong("float32") == ""
    forward = Engine.forward

    def of_other_heads(
        self: Engine, q: Tensor, k: Tensor, v: Tensor, *, held: tuple[Tensor, ...]
    ) -> tuple[Tensor, Saved]:
        return forward(self, q, k, v, held=tuple(x.roll(1, 2) for x in held))

    monkeypatch.setattr(Engine, "forward", of_other_heads)
    assert "out is off by" in spec.workload.gate(spec, context).wrong("float32")


@pytest.mark.parametrize(
    ("overrides", "named", "works"),
    [
        (["seqlen=62", JOINT], "seqlen=62", "seqlen=60"),
        (["mask=causal", JOINT], "mask=causal", "mask=full"),
        (["kv_seqlen=32", JOINT], "kv_seqlen=32", "null"),
        (["train.recompute=none"], "train.recompute=none", "train.recompute=attention"),
        (["train.tensor_parallel=2"], "train.tensor_parallel=2", "train.tensor_parallel=1"),
        (["train.data_parallel=2"], "train.data_parallel=2", "train.data_parallel=1"),
        (["train.data_parallel=auto"], "train.data_parallel=auto", "would work"),
        (["method=peer", "impl=torch_context_parallel"], "impl=torch_context_parallel", "method=ring"),
        (["mode=alone device=cpu"], "mode=alone", "mode=measure"),
        (["head_dim=15"], "head_dim=15", "head_dim=16"),
        (["model=tiny"], "model=tiny", "workload=train"),
        (["model=none"], "workload=dit", "model=tiny_dit"),
        (["model.text=null", "model.text_tokens=4"], "text_tokens=4", "text=joint"),
        (["model.text=sideways"], "model.text=sideways", "joint"),
        (["phase=backward"], "phase=backward", "forward"),
        (["phase=forward_backward", "model.text=cross", "model.text_tokens=4"], "model=tiny_dit", "phase=forward"),
    ],
)  # fmt: skip
def test_what_is_refused(overrides: list[str], named: str, works: str) -> None:
    usual = ["workload=dit", "phase=forward", "gpus=4", "method=ring"]
    if not any(word.startswith("model=") for word in overrides):
        usual.append("model=tiny_dit")
    given = {word.partition("=")[0] for each in overrides for word in each.split()}
    asked = [word for word in usual if word.partition("=")[0] not in given]
    with pytest.raises(RequestError) as refused:
        point(*asked, *(word for each in overrides for word in each.split()))
    assert named in str(refused.value) and works in str(refused.value)


def test_phases_of_one_workload() -> None:
    """The forward alone is a denoising step; both phases are the training step, of all tokens of seqlen."""
    one, trained = (
        point("model=tiny_dit", "gpus=4", "method=ring", f"phase={p}") for p in ("forward", "forward_backward")
    )
    assert (type(one.workload), type(trained.workload)) == (Denoise, Dit)
    assert one.phases == ("forward",) and trained.phases == ("forward", "backward", "update")


@given(n=st.integers(1, 8), each=st.integers(1, 9), text=st.integers(1, 9), layout=st.sampled_from(sorted(LAYOUTS)))
def test_each_query_meets_the_text_at_its_own_keys(n: int, each: int, text: int, layout: str) -> None:
    patches = n * (each + 1)
    problem = Problem(
        n=n, seqlen=patches + n * text, kv_seqlen=patches, heads=2, kv_heads=2, head_dim=8, mask=Joint(text),
        layout=LAYOUTS[layout],
    )  # fmt: skip
    blocks, queries = problem.blocks, each + 1 + text
    for q in range(n):
        of = [blocks.of(q, kv) for kv in range(n)]
        assert [len(blocks.held_of(kind)) for kind in of] == [int(q == kv) for kv in range(n)]
        assert sum(blocks.pairs[kind] for kind in of) == queries * (patches + text)
    assert all(problem.queries.tokens(rank) == queries for rank in range(n))


def test_flops_and_parameters_of_published_models() -> None:
    """Wan2.1 14B, and FLUX.1 with text once whatever ranks compute again."""
    wan = point("model=wan_like", "gpus=8", "method=ring", "cluster=h100_ndr400", "seqlen=75600", "dtype=bfloat16")
    problem, workload = wan.problem, wan.workload
    assert isinstance(workload, Denoise)
    assert workload.model.parameters(problem) == pytest.approx(14.3e9, rel=0.01)
    width, layers, tokens, text = 5120, 40, 75600, 512
    matrices = tokens * (6 * width**2 + 2 * width * 13824) + text * 2 * width**2
    flops = 2 * layers * matrices + 4 * layers * width * tokens * (tokens + text) + 2 * 2 * 64 * width * tokens
    assert workload.flops("forward", problem) == pytest.approx(flops)
    flux = [
        point(
            "model=flux_like",
            "phase=forward",
            f"gpus={n}",
            "method=ring",
            "cluster=h100_ndr400",
            "seqlen=4096",
            "dtype=bfloat16",
        )
        for n in (1, 8)
    ]
    one, eight = (each.workload.flops("forward", each.problem) for each in flux)
    assert one == eight
    tokens = 4096 + 512
    matrices = 2 * 57 * tokens * (4 * 3072**2 + 2 * 3072 * 12288) + 2 * 2 * 64 * 3072 * 4096
    assert one == pytest.approx(matrices + 4 * 57 * 3072 * tokens**2)
