"""The correctness gate: what it says is the same on all ranks, and no head of any tensor escapes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sp_bench.measure.pool import RankPool
from sp_bench.methods import build
from sp_bench.plan import Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL, FULL
from sp_bench.plan.method import PHASES
from sp_bench.workload import Attention, Spec
from sp_bench.workload.exactness import NAMES
from sp_bench.workload.sampled_rows import KEYS, ROWS
from tests.workload.requests import training

RANKS, HEADS = 3, 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of three ranks."""
    with RankPool(RANKS) as ranks:
        yield ranks


def spec(kv_heads: int, phases: tuple[str, ...] = PHASES, seqlen: int = 300, method: str = "ring") -> Spec:
    """A causal point of Ring, or of another method."""
    problem = Problem(
        n=RANKS, seqlen=seqlen, heads=HEADS, kv_heads=kv_heads, head_dim=16, mask=CAUSAL, dtype="float32",
        layout=LAYOUTS["striped"],
    )  # fmt: skip
    built = build(method, {}).candidates(problem)[0]
    plans = {phase: built.plan(problem, phase, COMPUTE_BOUND) for phase in Attention.executed(phases)}
    return Spec(workload=Attention(phases=phases), plans=plans, problem=built.assigned(problem), kernel="aten_cpu")


def one_rank(seqlen: int) -> Spec:
    """The same on one rank."""
    problem = Problem(
        n=1, seqlen=seqlen, heads=HEADS, kv_heads=2, head_dim=16, mask=FULL, dtype="float32",
        layout=LAYOUTS["contiguous"],
    )  # fmt: skip
    plans = {phase: build("ring", {}).plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    return Spec(workload=Attention(phases=PHASES), plans=plans, problem=problem, kernel="aten_cpu", parts=True)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_right_plans_pass(pool: RankPool, kv_heads: int) -> None:
    """With more key heads than ranks, and with fewer."""
    first, *others = pool.run("tests.measure.jobs:gated", spec(kv_heads))
    assert tuple(first.overall) == tuple(first.worst_head) == NAMES
    for name in NAMES:
        assert 1e-8 < first.overall[name] <= first.worst_head[name] < 1e-6
    assert all((x.overall, x.worst_head) == (first.overall, first.worst_head) for x in others)


def test_a_backward_by_itself_is_held_against_what_its_forward_makes_too(pool: RankPool) -> None:
    found = pool.run("tests.measure.jobs:gated", spec(2, ("backward",)))[0]
    assert tuple(found.overall) == NAMES and all(1e-8 < error < 1e-6 for error in found.overall.values())


def test_forward_alone(pool: RankPool) -> None:
    found = pool.run("tests.measure.jobs:gated", spec(2, ("forward",)))[0]
    assert list(found.overall) == ["out"] and 1e-8 < found.overall["out"] < 1e-6


@pytest.mark.parametrize("head", range(HEADS))
def test_no_head_of_the_output_escapes(pool: RankPool, head: int) -> None:
    """Whichever rank holds it against the exact result: one of four heads is nothing but zeros."""
    for found in pool.run("tests.measure.jobs:gated", spec(HEADS), ("out", head)):
        assert found.worst_head["out"] == pytest.approx(1.0)
        assert found.overall["out"] == pytest.approx(0.5, abs=0.1)
        assert "out" in (found.wrong("float32") or "")


@pytest.mark.parametrize(("kv_heads", "name", "head"), [(4, "dk", 3), (2, "dq", 1), (2, "dk", 1), (1, "dv", 0)])
def test_nor_does_one_of_a_gradient(pool: RankPool, kv_heads: int, name: str, head: int) -> None:
    """With GQA, too."""
    heads = HEADS if name == "dq" else kv_heads
    for found in pool.run("tests.measure.jobs:gated", spec(kv_heads), (name, head)):
        assert found.worst_head[name] == pytest.approx(1.0)
        assert found.overall[name] == pytest.approx(heads**-0.5, abs=0.2)
        assert all(found.overall[other] < 1e-6 for other in NAMES if other != name)


def test_what_is_not_finite_is_infinitely_wrong(pool: RankPool) -> None:
    found = pool.run("tests.measure.jobs:gated", spec(2), ("out", 1), float("nan"))[1]
    assert found.overall["out"] == found.worst_head["out"] == float("inf")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_wrong_from_512_tokens_on_is_found_in_what_was_timed(pool: RankPool, name: str) -> None:
    """A rank that the gate doesn't have: its rows from there on, sampled from what was timed."""
    point = spec(2, seqlen=RANKS * 700)
    for gate, timed, rows in pool.run("tests.measure.jobs:measured_with_a_kernel_wrong_from", point, 512, name):
        assert gate == "", "it has 256 tokens of a rank"
        assert f"{name} is off by " in timed and timed.endswith(f"at {RANKS * 700} tokens")
        assert rows == (ROWS * RANKS * HEADS, KEYS // RANKS * RANKS)
    for gate, timed, rows in pool.run("tests.measure.jobs:measured_with_a_kernel_wrong_from", point, 700, name):
        assert gate == timed == "" and rows


@pytest.mark.parametrize("workload", ["attention", "train"])
def test_times_are_kept_where_no_memory_is_left_to_compare_rows(pool: RankPool, workload: str) -> None:
    """All ranks say the same, and none waits for the one without memory."""
    point = spec(2)
    if workload == "train":
        asked = ("method=ring", "dtype=float32", f"seqlen={RANKS * 100}", "kernel=aten_cpu", "parts=false")
        point = training(f"gpus={RANKS}", *asked)
    for timed, samples in pool.run("tests.measure.jobs:measured_where_memory_runs_out", point):
        assert timed.uncompared == f"memory ran out on 1 of {RANKS} ranks" and not timed.overall
        assert samples > 0


@pytest.mark.parametrize("name", ["out", "dk"])
def test_what_is_wrong_from_512_tokens_of_all_ranks_on_is_found_by_the_gate(name: str) -> None:
    """One function of the whole sequence."""
    with RankPool(1) as one:
        point = one_rank(2048)
        ((gate, _, _),) = one.run("tests.measure.jobs:measured_with_a_kernel_wrong_from", point, 200, name)
        assert f"{name} is off by" in gate and gate.endswith("at 256 tokens")
        ((gate, timed, _),) = one.run("tests.measure.jobs:measured_with_a_kernel_wrong_from", point, 512, name)
        assert gate == "" and f"{name} is off by" in timed


@pytest.mark.parametrize("name", ["out", "dv"])
def test_a_training_step_that_is_wrong_from_512_tokens_on_is_found(pool: RankPool, name: str) -> None:
    """In the attention of its last layer; its gate, of loss and gradients, has some hundred tokens of a rank too."""
    asked = ("method=ring", "dtype=float32", f"seqlen={RANKS * 700}", "kernel=aten_cpu", "parts=false")
    point = training(f"gpus={RANKS}", *asked)
    for gate, timed, rows in pool.run("tests.measure.jobs:measured_with_a_kernel_wrong_from", point, 512, name):
        assert gate == "" and f"{name} is off by" in timed and rows is not None
    for gate, _, _ in pool.run("tests.measure.jobs:measured_with_a_kernel_wrong_from", point, 150, name):
        assert "is off by" in gate and gate.endswith(f"at {RANKS * 256} tokens")


def sunk(phases: tuple[str, ...] = PHASES) -> Spec:
    """A point with sinks."""
    point = spec(2, phases)
    return replace(point, workload=Attention(phases=phases, sinks=True))


def test_sinks_and_their_gradient_pass(pool: RankPool) -> None:
    for found in pool.run("tests.measure.jobs:gated", sunk()):
        assert tuple(found.overall) == (*NAMES, "dsinks") and found.wrong("float32") == ""
        assert 1e-9 < found.overall["dsinks"] < 1e-6
    assert tuple(pool.run("tests.measure.jobs:gated", sunk(PHASES[:1]))[0].overall) == ("out",)


@pytest.mark.parametrize(("wrong", "name"), [("left out", "out"), ("not summed", "dsinks"), ("off", "dsinks")])
def test_sinks_that_are_wrong_are_found(pool: RankPool, wrong: str, name: str) -> None:
    """Left out of the softmax; a gradient of one rank alone; a gradient that is off by 1%."""
    for said in pool.run("tests.measure.jobs:gated_with_wrong_sinks", sunk(), wrong):
        assert f"{name} is off by" in said


def test_what_is_shown_as_steps_is_what_was_asked_for(pool: RankPool) -> None:
    """The gate, warm-up and iterations, each once: what a bar's total is made of (point.work_of)."""
    told: list[int] = []
    pool.run("sp_bench.measure.job:measure", [spec(4), spec(2)], 3, 1, progress=told.append)
    assert sorted(told) == [0] * 5 + [1] * 5


def test_the_groups_of_a_point_end_with_it(pool: RankPool) -> None:
    """Those that another one uses too stay for that; in the end there are as many as before, as often as one likes."""
    points = [spec(2, method="all_gather"), spec(4, method="all_gather"), spec(4)]
    for _ in range(2):
        for before, first, twin, ring, after in pool.run("tests.measure.jobs:groups_of_points", points):
            assert before == ring == after < twin == first
