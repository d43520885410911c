"""Every peer against fp64, on real ranks: what is right, what is known to be wrong, and what it sends."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sp_bench.errors import RequestError
from sp_bench.measure.pool import RankError, RankPool
from sp_bench.methods import build
from sp_bench.peers.registry import PEERS
from sp_bench.plan.documents import Documents
from sp_bench.workload import TOLERANCE
from tests.peers import jobs
from tests.peers.jobs import NAMES, Case
from tests.support.attention_cases import inputs
from tests.support.bounds import too_far
from tests.support.marks import exhaustive

World = Callable[[int], RankPool]
OWN = "tests.peers.jobs:gathered"
FUSED = ("ring", "zigzag", "stripe")
"""Algorithms of two packages, which add block gradients up in what `.to(float32)` returns."""


def installed(impl: str) -> pytest.MarkDecorator:
    module = PEERS[impl].module.partition(".")[0]
    return pytest.mark.skipif(not importlib.util.find_spec(module), reason=f"{module} is not installed")


def cases_of(impl: str, n: int, dtype: str, algorithms: tuple[str, ...] = ()) -> list[Case]:
    """Every algorithm, mask and number of key heads that it takes."""
    found: list[Case] = []
    for algorithm, causal, kv_heads in itertools.product(algorithms or ("auto",), (True, False), (4, 2, 1)):
        batch = 1 if algorithm == "llama3" else 2
        case = Case(
            impl=impl, algorithm=algorithm, n=n, causal=causal, kv_heads=kv_heads, dtype=dtype, batch=batch, tokens=16
        )
        with contextlib.suppress(RequestError):
            assert case.problem.n == n
            found.append(case)
    return found


def wrong_in(case: Case, errors: Mapping[str, float]) -> dict[str, float]:
    """Those errors of a peer that are above the gate's, and that roundings can't make on the case's inputs."""
    given = inputs(case.problem.seqlen, case.kv_heads, case.dtype)
    return too_far(case.problem, [x[: case.batch] for x in given], errors, TOLERANCE)


def far_apart(case: Case, apart: Mapping[str, float]) -> dict[str, float]:
    """Those distances of two that are more than both may be off."""
    return wrong_in(case, {name: distance / 2 for name, distance in apart.items()})


def assert_right(world: World, n: int, cases: list[Case]) -> None:
    assert cases
    for case, found in world(n).run(jobs.run, cases)[0].items():
        assert not wrong_in(case, found.errors), f"{case}: {found.errors}"
        assert set(found.errors) == set(NAMES)


@pytest.mark.parametrize("n", [exhaustive(1), 2, exhaustive(4)])
@pytest.mark.parametrize("dtype", [exhaustive("float32"), "bfloat16"])
def test_torch(world: World, n: int, dtype: str) -> None:
    assert_right(world, n, cases_of("torch_context_parallel", n, dtype, PEERS["torch_context_parallel"].algorithms))


def test_torch_is_no_float64(world: World) -> None:
    """It accumulates in fp32."""
    case = Case(impl="torch_context_parallel", dtype="float64")
    errors = world(2).run(jobs.run, [case])[0][case].errors
    assert all(1e-9 < error < 1e-6 for error in errors.values()), errors


@pytest.mark.long
def test_transformer_engine_is_asked_for_what_it_takes(world: World) -> None:
    """In each of its forms, by a fake with its arguments; the ranks of a2a+p2p are where the package looks for them."""
    algorithms = PEERS["transformer_engine"].algorithms
    cases = [
        Case(impl="transformer_engine", algorithm=algorithm, n=4, causal=causal, kv_heads=4, tokens=8)
        for algorithm in algorithms for causal in (True, False)
    ]  # fmt: skip
    for case, found in world(4).run(jobs.on_the_gpus_path, cases)[0].items():
        assert all(error <= TOLERANCE["float32"] for error in found.errors.values()), f"{case}: {found.errors}"


@pytest.mark.parametrize("n", [1, 2, exhaustive(4)])
def test_own_function(world: World, n: int) -> None:
    cases = [Case(impl=OWN, n=n, causal=causal, kv_heads=2, dtype="float64") for causal in (True, False)]
    assert_right(world, n, cases)


def test_own_function_on_another_layout_is_wrong(world: World) -> None:
    """`gathered` takes striped tokens for granted where the mask is causal."""
    right, wrong = (Case(impl=OWN, layout=layout) for layout in ("striped", "zigzag"))
    found = world(2).run(jobs.run, [right, wrong])[0]
    assert found[right].errors["out"] < 1e-6
    assert found[wrong].errors["out"] > 0.1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("transposed", "returned (2, 4, 16, 16) in torch.float32; (2, 16, 4, 16) in torch.float32 would work"),
        ("detached", "autograd can't differentiate its output; phase=forward would work"),
        ("gatherd", "tests.peers.jobs has no function gatherd; did you mean gathered?"),
    ],
)
def test_own_function_that_is_none(world: World, function: str, says: str) -> None:
    with pytest.raises(RankError) as caught:
        world(2).run(jobs.run, [Case(impl=f"tests.peers.jobs:{function}")])
    assert isinstance(caught.value.cause, RequestError)
    assert f"impl=tests.peers.jobs:{function}: {says}" in str(caught.value.cause)


def test_forward_alone_needs_no_gradient(world: World) -> None:
    differentiable, plain = (
        world(2).run(jobs.run_phases, Case(impl=f"tests.peers.jobs:{name}"), ("forward",))
        for name in ("gathered", "detached")
    )
    for x, y in zip(differentiable, plain, strict=True):
        assert torch.equal(x, y)


@installed("ring_flash_attn")
@pytest.mark.parametrize("n", [2, exhaustive(4)])
def test_ring_flash_attn(world: World, n: int) -> None:
    assert_right(world, n, cases_of("ring_flash_attn", n, "bfloat16", PEERS["ring_flash_attn"].algorithms))
    assert_right(world, n, cases_of("ring_flash_attn", n, "float32", ("llama3",)))


def packed(algorithm: str, dtype: str, *packs: Documents, n: int) -> list[Case]:
    kv_heads = itertools.cycle((4, 2, 1))
    of_all = {"impl": "ring_flash_attn", "algorithm": algorithm, "n": n, "dtype": dtype, "batch": 1}
    return [Case(**of_all, pack=pack, causal=pack.causal, kv_heads=next(kv_heads)) for pack in packs]


@pytest.mark.long
@installed("ring_flash_attn")
@pytest.mark.parametrize("n", [2, exhaustive(4)])
def test_documents_of_ring_flash_attn(world: World, n: int) -> None:
    """Its variable-length forms are right, and agree with a method of ours on the same tokens."""
    lengths = (2 * n * x for x in (1, 5, 3, 1, 2))
    equal = Documents(tuple(lengths))
    ragged = Documents((13, 1, 2, 30, 5, 7, 22))
    full, ragged_full = (Documents(pack.lengths, causal=False) for pack in (equal, ragged))
    for algorithm, dtype, packs in (
        ("llama3", "float32", (ragged, equal, ragged_full, full, Documents((80,)))),
        ("zigzag", "bfloat16", (equal, Documents((8 * n,)))),
        ("ring", "bfloat16", (full, Documents((3 * n, n), causal=False))),
    ):
        cases = packed(algorithm, dtype, *packs, n=n)
        assert_right(world, n, cases)
        for case, apart in world(n).run(jobs.beside_ours, cases, "ring")[0].items():
            assert not far_apart(case, apart), f"{case}: {apart}"


@pytest.mark.long
@installed("ring_flash_attn")
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=7), causal=st.booleans())
def test_any_documents_of_llama3(world: World, lengths: list[int], causal: bool) -> None:
    lengths[-1] += sum(lengths) % 2  # the ranks own equally many tokens
    cases = packed("llama3", "float32", Documents(tuple(lengths), causal), n=2)
    assert_right(world, 2, cases)
    for case, apart in world(2).run(jobs.beside_ours, cases, "all_gather")[0].items():
        assert not far_apart(case, apart), f"{case}: {apart}"


@installed("yunchang")
@pytest.mark.parametrize("n", [2, exhaustive(4)])
def test_yunchang(world: World, n: int) -> None:
    assert_right(world, n, cases_of("yunchang", n, "bfloat16", PEERS["yunchang"].algorithms))
    assert_right(world, n, cases_of("yunchang", n, "float32", ("ulysses",)))


@installed("yunchang")
@pytest.mark.parametrize("algorithm", FUSED)
def test_yunchang_without_ulysses(world: World, algorithm: str) -> None:
    assert_right(world, 4, [Case(impl="yunchang", algorithm=algorithm, ulysses=1, n=4, dtype="bfloat16")])


@installed("deepspeed_ulysses")
@pytest.mark.parametrize("n", [1, 2, exhaustive(4)])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_deepspeed_ulysses(world: World, n: int, dtype: str) -> None:
    assert_right(world, n, cases_of("deepspeed_ulysses", n, dtype))


@pytest.mark.parametrize(
    "impl", [pytest.param(impl, marks=installed(impl)) for impl in ("ring_flash_attn", "yunchang")]
)
def test_float32_gradients_of_the_rings_are_wrong(world: World, impl: str) -> None:
    """In float32 `.to(float32)` is the buffer itself, which the next block overwrites. The gate must see it."""
    cases = [Case(impl=impl, algorithm=algorithm, n=4, ulysses="auto") for algorithm in FUSED]
    for case, found in world(4).run(jobs.run, cases)[0].items():
        assert found.errors["out"] <= TOLERANCE["float32"], f"{case}: {found.errors}"
        assert found.errors["dq"] > 0.1, f"{case}: {found.errors}"


@pytest.mark.parametrize(
    "impl",
    [
        pytest.param("yunchang", marks=installed("yunchang")),
        pytest.param("deepspeed_ulysses", marks=installed("deepspeed_ulysses")),
    ],
)
def test_ulysses_sends_what_our_closed_form_says(world: World, impl: str) -> None:
    case = Case(impl=impl, algorithm="ulysses", n=4)
    sent = world(4).run(jobs.run, [case])[0][case].sent_bytes
    ours = build("ulysses", {})
    assert {phase: sum(ops.values()) for phase, ops in sent.items()} == {
        phase: ours.bytes_sent(case.problem, phase) for phase in sent
    }


def test_torch_sends_a_ring_and_its_gradients_in_fp32(world: World) -> None:
    """Forward 2 (n - 1) chunks however they travel; backward again, and 2 n of fp32 gradients around the ring."""
    n = 4
    cases = [
        Case(impl="torch_context_parallel", algorithm=a, n=n, dtype="bfloat16") for a in ("all_gather", "all_to_all")
    ]
    found = world(n).run(jobs.run, cases)[0]
    forward = build("ring", {"layout": "zigzag"}).bytes_sent(cases[0].problem, "forward")
    gradients = 2 * n * forward / (n - 1)
    gathered, passed = (found[case].sent_bytes for case in cases)
    assert gathered["forward"] == {"allgather": forward} or gathered["forward"] == {"all_gather_into_tensor": forward}
    assert passed["forward"] == {"all_to_all_single": forward}
    assert sum(gathered["backward"].values()) == sum(passed["backward"].values()) == forward + gradients


@installed("ring_flash_attn")
def test_ring_flash_attn_sends_gradients_in_fp32(world: World) -> None:
    n = 4
    case = Case(impl="ring_flash_attn", n=n, dtype="bfloat16")
    sent = world(n).run(jobs.run, [case])[0][case].sent_bytes
    forward = build("zigzag", {}).bytes_sent(case.problem, "forward")
    assert sent == {"forward": {"send": forward}, "backward": {"send": forward + 2 * n * forward / (n - 1)}}


def test_traffic_counts_each_operation_as_plans_do(world: World) -> None:
    n, elements = 4, 12
    size = 4 * elements
    counted = world(n).run(jobs.count, elements)
    for rank, found in enumerate(counted):
        assert found == {
            "ring": (size, []),
            "all_gather": ((n - 1) * size, []),
            "reduce_scatter": ((n - 1) * size, []),
            "all_to_all_single": ((n - 1) * size, []),
            "all to rank 0": (0 if rank == 0 else size, []),
            "all_reduce": (2 * (n - 1) * size, []),
            "barrier": (0, []),
            "broadcast from 0": ((n - 1) * size if rank == 0 else 0, []),
            "scatter from 0": ((n - 1) * size if rank == 0 else 0, []),
            "gather to 0": (0 if rank == 0 else size, []),
            "reduce to 0": (0 if rank == 0 else size, []),
        }
