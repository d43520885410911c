"""SequenceParallelAttention on real ranks against torch's attention in fp64 on the whole sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from methods import REGISTRY
from methods.mesh import tiles
from sp_bench import SequenceParallelAttention
from sp_bench.errors import RequestError
from sp_bench.plan import LAYOUTS, CostProfile
from tests.problems import divisors
from tests.ranks import SIZES, WORLD, Ranks
from tests.run import jobs
from tests.run.jobs import HEADS, Case

BOUNDS = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 1e-2}
"""Relative L2 error of out, dq, dk and dv."""

UNEVEN = CostProfile(
    forward_block_s=1.0,
    backward_block_s=1.0,
    node_size=3,
    intra_latency_s=0.5,
    intra_bytes_per_s=4e3,
    inter_latency_s=2.5,
    inter_bytes_per_s=2e3,
)
"""Costs of which no two are alike, for schedules that are less regular."""


def variants(n: int) -> list[Case]:
    """Ring, and every tile of mesh."""
    return [Case(n=n, method="ring"), *(Case(n=n, method="mesh", tile=tile) for tile in tiles(n))]


def others(n: int) -> list[Case]:
    """Every method but ring and mesh, in every variant."""
    cases = [Case(n=n, method="striped"), Case(n=n, method="zigzag", layout="zigzag"), Case(n=n, method="pass_q")]
    cases += [Case(n=n, method="tokenring", options=(("nodes", nodes),)) for nodes in divisors(n)]
    cases += [Case(n=n, method="double_ring", options=(("inner", inner),)) for inner in divisors(n)]
    return cases + [Case(n=n, method="reference")] * (n == 1)


def test_others_are_all_the_others() -> None:
    assert {case.method for case in others(1) + variants(1)} == set(REGISTRY)


def measure(ranks: Ranks, cases: Iterable[Case]) -> dict[Case, dict[str, float]]:
    """The relative L2 errors of out, dq, dk and dv over all ranks."""
    answers = ranks.run(jobs.find_differences, list(cases))
    errors = {}
    for case in answers[0]:
        by_tensor = zip(*(answer[case] for answer in answers[: case.n]), strict=True)
        errors[case] = dict(zip(("out", "dq", "dk", "dv"), map(relative, by_tensor), strict=True))
    return errors


def relative(shares: Iterable[jobs.Difference]) -> float:
    """The error in relation to the reference's norm, or to unit elements where the reference is rounding noise."""
    error2, norm2, elements = (sum(column) for column in zip(*shares, strict=True))
    return math.sqrt(error2 / (norm2 if norm2 > 1e-20 * elements else elements))


def assert_exact(ranks: Ranks, cases: Iterable[Case]) -> None:
    wanted = list(cases)
    errors = measure(ranks, wanted)
    assert list(errors) == wanted
    wrong = [
        f"{case}: {tensor} is off by {error:.1e}"
        for case, by_tensor in errors.items()
        for tensor, error in by_tensor.items()
        if not error <= BOUNDS[case.dtype]
    ]
    assert not wrong, f"{len(wrong)} results are wrong:\n" + "\n".join(wrong)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("n", SIZES)
def test_every_tile_layout_and_dtype(ranks: Ranks, n: int, causal: bool, kv_heads: int) -> None:
    """From n = 8, where a case takes longest, the narrow dtypes run on one layout only."""
    assert_exact(
        ranks,
        (
            replace(variant, causal=causal, kv_heads=kv_heads, layout=layout, dtype=dtype)
            for variant in variants(n)
            for layout in LAYOUTS
            for dtype in BOUNDS
            if n < 8 or layout == "striped" or dtype == "float64"
        ),
    )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("n", SIZES)
def test_every_other_method(ranks: Ranks, n: int, causal: bool) -> None:
    """MHA and GQA, fp32 and bf16, on every layout that the method has."""
    assert_exact(
        ranks,
        (
            replace(case, causal=causal, kv_heads=kv_heads, layout=layout, dtype=dtype)
            for case in others(n)
            for layout in REGISTRY[case.method].layouts
            for kv_heads, dtype in ((HEADS, "float32"), (2, "bfloat16"), (1, "float64"))
            if n < 8 or layout != "contiguous"
        ),
    )


@pytest.mark.parametrize("n", SIZES)
def test_odd_chunks(ranks: Ranks, n: int) -> None:
    """One token each, five, and for zigzag pieces of one token and of three."""
    tokens = {"striped": (1, 5), "contiguous": (1, 5), "zigzag": (2, 6)}
    assert_exact(
        ranks,
        (
            replace(variant, layout=layout, tokens=count, causal=causal, kv_heads=2)
            for variant in variants(n)
            for layout, counts in tokens.items()
            for count in counts
            for causal in (True, False)
            if causal or layout == "contiguous"
        ),
    )


@pytest.mark.parametrize("lanes", ["one", "each"])
@pytest.mark.parametrize("n", [6, 9])
def test_lanes_and_uneven_costs(ranks: Ranks, n: int, lanes: str) -> None:
    cases = [replace(variant, lanes=lanes, costs=UNEVEN, kv_heads=1) for variant in variants(n) if variant.tile]
    assert_exact(ranks, [replace(case, layout=layout) for case in cases for layout in LAYOUTS])


def test_lanes_each(ranks: Ranks) -> None:
    assert_exact(ranks, (replace(v, lanes="each", dtype="float32") for n in SIZES for v in variants(n) if v.tile))


@pytest.mark.parametrize("kernel", ["reference", "aten_cpu"])
def test_kernels(ranks: Ranks, kernel: str) -> None:
    variant = Case(n=4, method="mesh", tile=(2, 2), kernel=kernel, kv_heads=2)
    assert_exact(ranks, (replace(variant, layout=layout, dtype=dtype) for layout in LAYOUTS for dtype in BOUNDS))


def test_auto_tile_and_layout(ranks: Ranks) -> None:
    assert_exact(
        ranks, (Case(n=n, method="mesh", layout="auto", causal=causal) for n in SIZES for causal in (True, False))
    )


def test_wider_wire_is_no_less_exact(ranks: Ranks) -> None:
    """At n=9 the partials of bf16 travel in bf16 or in fp32."""
    narrow = [replace(variant, dtype="bfloat16", kv_heads=2) for variant in variants(9)]
    wide = [replace(case, wire_dtype="float32") for case in narrow]
    errors = measure(ranks, [*narrow, *wide])
    for narrow_case, wide_case in zip(narrow, wide, strict=True):
        for tensor, error in errors[wide_case].items():
            assert error <= errors[narrow_case][tensor], f"{wide_case}: {tensor}"
            assert errors[narrow_case][tensor] <= BOUNDS["bfloat16"], f"{narrow_case}: {tensor}"
    # Where partials do travel, the wire's rounding must show, or the option has done nothing.
    square = Case(n=9, method="mesh", tile=(3, 3), dtype="bfloat16", kv_heads=2)
    assert sum(errors[replace(square, wire_dtype="float32")].values()) < sum(errors[square].values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard_unshard_and_positions(ranks: Ranks, layout: str) -> None:
    cases = [Case(n=n, method="ring", layout=layout, tokens=tokens) for n in SIZES for tokens in (2, 6)]
    answers = ranks.run(jobs.round_trip, cases)
    for case in cases:
        positions, takes_them, comes_back = zip(*(answer[case] for answer in answers[: case.n]), strict=True)
        assert sorted(sum(positions, [])) == list(range(case.n * case.tokens)), case
        assert [len(own) for own in positions] == [case.tokens] * case.n, case
        assert all(takes_them), f"{case}: shard takes other tokens than positions says"
        assert all(comes_back), f"{case}: unshard doesn't undo shard"


REUSED = [
    Case(n=9, method="ring", dtype="bfloat16", kv_heads=2),
    Case(n=9, method="mesh", tile=(3, 3), dtype="bfloat16", kv_heads=2),
    Case(n=6, method="mesh", tile=(3, 2), lanes="each", dtype="float32"),
    Case(n=8, method="mesh", tile=(8, 1), layout="zigzag", dtype="float32"),
    Case(n=2, method="mesh", tile=(1, 2), layout="contiguous", causal=False, kv_heads=1),
    Case(n=6, method="tokenring", options=(("nodes", 2),), kv_heads=2, dtype="float32"),
]


@pytest.mark.parametrize("case", REUSED, ids=str)
def test_repeated_calls_are_bitwise_equal(ranks: Ranks, case: Case) -> None:
    """Also with a second and a third shape in the same module, which each reuse their buffers."""
    seqlens = [case.n * tokens for tokens in (case.tokens, 2, 14)]
    assert sum(ranks.run(jobs.differ_when_repeated, case, seqlens), []) == []


@pytest.mark.parametrize("case", REUSED, ids=str)
def test_two_forwards_before_their_backwards(ranks: Ranks, case: Case) -> None:
    assert sum(ranks.run(jobs.differ_when_interleaved, case), []) == []


@pytest.mark.parametrize("case", REUSED, ids=str)
def test_strided_inputs_and_gradients(ranks: Ranks, case: Case) -> None:
    assert sum(ranks.run(jobs.differ_when_strided, case), []) == []
    assert sum(ranks.run(jobs.differ_with_broadcast_gradient, case), []) == []


def test_refusals_name_value_rule_and_remedy(ranks: Ranks) -> None:
    mesh = Case(n=6, method="mesh", tile=(2, 2))
    assert (
        ranks.run(jobs.refusal, mesh, (1, 4, 2, 8), (1, 4, 2, 8))[:6]
        == ["RequestError: method.tile=[2,2]: a * b must be gpus=6; one of [1,6], [2,3], [3,2], [6,1] would work"] * 6
    )
    ring = Case(n=2, method="ring")
    for q_shape, k_shape, value in (
        ((1, 4, 2, 8), (1, 4, 2, 16), "k (1, 4, 2, 16)"),
        ((1, 4, 2, 8), (1, 6, 2, 8), "k (1, 6, 2, 8)"),
        ((1, 4, 3, 8), (1, 4, 2, 8), "kv_heads=2"),
    ):
        for answer in ranks.run(jobs.refusal, ring, q_shape, k_shape)[:2]:
            assert answer.startswith("RequestError") and value in answer and "would work" in answer
    zigzag = Case(n=3, method="ring", layout="zigzag")
    assert "seqlen=15: the zigzag layout" in ranks.run(jobs.refusal, zigzag, (1, 5, 2, 8), (1, 5, 2, 8))[0]


def test_one_process_needs_no_group() -> None:
    """A plain program that never started torch.distributed is a group of one."""
    assert not torch.distributed.is_initialized()
    for method in ("ring", "mesh"):
        attention = SequenceParallelAttention(method, causal=True)
        full = jobs.inputs(11, 2, "float64")
        got, wanted = jobs.attend(attention, full), jobs.reference(11, 2, "float64", True)
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
        assert attention.positions(11).tolist() == list(range(11))
        assert torch.equal(attention.unshard(attention.shard(full.q_BSHD)), full.q_BSHD)
        assert not attention.sent_bytes


def test_unknown_names_are_refused() -> None:
    with pytest.raises(RequestError, match="method=rong.*did you mean ring"):
        SequenceParallelAttention("rong")
    with pytest.raises(
        RequestError, match="method.tiles.*did you mean method.tile.*known: method.lanes, method.layout"
    ):
        SequenceParallelAttention("mesh", tiles=(1, 1))
    with pytest.raises(RequestError, match="layout=stripes.*did you mean striped"):
        SequenceParallelAttention("ring", layout="stripes")


def test_the_pool_has_room_for_every_size() -> None:
    assert max(SIZES) <= WORLD
