"""Samples in long form, and from when the times of a step count."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from sp_bench import account
from sp_bench.measure.job import measure
from sp_bench.measure.result import RankResult
from sp_bench.measure.samples import COMMUNICATION_ONLY, COMPUTE_ONLY, CORE_WINDOW, CORES, INSIDE, STEP, Row, Samples
from sp_bench.measure.stats import rank_medians_ms, slowest_ms
from sp_bench.methods import build
from sp_bench.plan import Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.workload import Attention, Spec
from tests.support.marks import exhaustive
from tests.support.ranks import WORLD, Ranks


def samples(part: str, phase: str, seconds: list[list[float]], began_s: list[list[float]] | None = None) -> Samples:
    """The samples of a part of one phase, by rank and iteration."""
    began_s = began_s or [[float("nan")] * len(of_rank) for of_rank in seconds]
    return Samples.of(
        [
            Row(rank, iteration, phase, part, seconds[rank][iteration], began_s[rank][iteration])
            for rank in range(len(seconds))
            for iteration in range(len(seconds[rank]))
        ]
    )


def test_parts_are_found_by_rank_and_iteration_in_whatever_order_they_were_kept() -> None:
    forward, backward = samples(STEP, "forward", [[1, 2, 3], [4, 5, 6]]), samples(STEP, "backward", [[1, 1, 1]] * 2)
    both = Samples.joined([backward, samples("folds", "forward", [[9, 9, 9]] * 2), forward])
    np.testing.assert_array_equal(both.by_rank(STEP, "forward"), [[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(both.by_rank(STEP), [[2, 3, 4], [5, 6, 7]])
    assert both.by_rank(STEP, "sideways").shape == both.by_rank("waits").shape == (0, 0)
    np.testing.assert_array_equal(slowest_ms(both, STEP, "forward"), [4e3, 5e3, 6e3])
    np.testing.assert_array_equal(rank_medians_ms(both, STEP), [3e3, 6e3])


def test_columns_are_json_and_of_one_length() -> None:
    found = json.loads(json.dumps(samples(STEP, "forward", [[1.5], [2.5]]).columns()))
    assert found == {
        "rank": [0, 1],
        "iteration": [0, 0],
        "phase": ["forward"] * 2,
        "part": [STEP] * 2,
        "seconds": [1.5, 2.5],
    }


def test_a_thousand_ranks_are_no_trouble() -> None:
    generator = np.random.default_rng(0)
    ranks, iterations = 1000, 10
    taken, began = generator.random((2, ranks, iterations))
    many = Samples.joined(
        samples(part, phase, taken.tolist(), began.tolist())
        for part in (STEP, COMPUTE_ONLY, COMMUNICATION_ONLY)
        for phase in PHASES
    )
    start = time.perf_counter()
    counted = many.from_first_start({rank: str(rank % 125) for rank in range(ranks)})
    slowest = slowest_ms(counted, STEP, "backward")
    assert time.perf_counter() - start < 5
    later = began - began.reshape(8, 125, iterations).min(axis=0)[np.arange(ranks) % 125]
    np.testing.assert_allclose(slowest, 1e3 * (taken + later).max(axis=0))


def test_times_count_from_the_first_start_on_the_same_machine() -> None:
    """Another machine's clock has nothing to do with this one's; each phase and part of the step counts for itself."""
    forward = samples(STEP, "forward", [[1.0, 2.0]] * 3, [[10.0, 20.5], [7.0, 8.0], [10.5, 20.0]])
    alone = samples(COMPUTE_ONLY, "backward", [[5.0, 6.0]] * 3, [[30.25, 50.0], [1.0, 2.0], [30.0, 50.5]])
    found = Samples.joined([forward, alone]).from_first_start({0: "a", 1: "b", 2: "a"})
    assert found.by_rank(STEP, "forward").tolist() == [[1.0, 2.5], [1.0, 2.0], [1.5, 2.0]]
    assert found.by_rank(COMPUTE_ONLY, "backward").tolist() == [[5.25, 6.0], [5.0, 6.0], [5.0, 6.5]]


def test_a_gpu_has_its_own_clock() -> None:
    found = samples(STEP, "forward", [[1.0], [2.0]]).from_first_start({0: "a", 1: "a"})
    assert found.by_rank(STEP).tolist() == [[1.0], [2.0]]


def spec(method: str, phases: tuple[str, ...], n: int = WORLD) -> Spec:
    """A small full attention with as many heads as ranks."""
    layout = LAYOUTS["contiguous"]
    problem = Problem(n=n, layout=layout, seqlen=n * 32, heads=n, kv_heads=n, head_dim=16, dtype="float32")
    built = build(method, {}).candidates(problem)[0]
    plans = {phase: built.plan(problem, phase, COMPUTE_BOUND) for phase in Attention.executed(phases)}
    return Spec(workload=Attention(phases=phases), plans=plans, problem=built.assigned(problem), parts=True)


def test_ranks_begin_by_one_clock(ranks: Ranks) -> None:
    """That of all processes of the machine, in each iteration once for each phase, and for each part of the step."""
    before = time.perf_counter()
    found: list[RankResult] = [rank[0] for rank in ranks.run(measure, [spec("ring", PHASES)], 2, 1)]
    after = time.perf_counter()
    assert len({rank.machine for rank in found}) == 1
    for number, rank in enumerate(found):
        assert set(rank.samples.rank) == {number} and set(rank.samples.iteration) == {0, 1}
        for part in (STEP, COMPUTE_ONLY, COMMUNICATION_ONLY):
            for phase in PHASES:
                assert rank.samples.by_rank(part, phase).shape == (1, 2)
        timed = ~np.isnan(rank.samples.began_s)
        assert set(rank.samples.part[timed]) == {STEP, COMPUTE_ONLY, COMMUNICATION_ONLY}
        assert set(rank.samples.part[~timed]) == {*INSIDE, *CORES.values(), CORE_WINDOW}
        assert timed.sum() == 3 * len(PHASES) * 2
        assert all(before < at < after for at in rank.samples.began_s[timed])
    together = Samples.joined(rank.samples for rank in found)
    counted = together.from_first_start({number: rank.machine for number, rank in enumerate(found)})
    forward = (together.part == STEP) & (together.phase == "forward")
    for iteration in range(2):
        here = forward & (together.iteration == iteration)
        ends = together.began_s[here] + together.seconds[here]
        assert counted.seconds[here] == pytest.approx(ends - together.began_s[here].min())


@pytest.mark.long
@pytest.mark.parametrize("method", ["ulysses", exhaustive("ring"), exhaustive("mesh")])
def test_a_backward_by_itself_is_that_of_both(ranks: Ranks, method: str) -> None:
    """Its times, bytes and memory; the forward, which ulysses keeps tensors of, only gives it its inputs."""
    asked = [spec(method, ("backward",)), spec(method, PHASES)]
    for only, both in ranks.run(measure, asked, 2, 1):
        assert not only.wrong("float32") and not both.wrong("float32")
        assert set(only.samples.phase) == {"backward", "all"} and set(both.samples.phase) == {*PHASES, "all"}
        assert only.sent_bytes == {"backward": both.sent_bytes["backward"]} and only.sent_bytes["backward"]
        assert 0 < only.memory.live_bytes <= account.peak_bytes([asked[0].plans["backward"]], asked[0].problem)
        for part in (STEP, COMPUTE_ONLY, COMMUNICATION_ONLY, "kernels"):
            assert only.samples.by_rank(part).shape == (1, 2)
        assert (only.samples.by_rank("kernels") > 0).all()
