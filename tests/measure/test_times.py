"""From when the times of a step count."""

from __future__ import annotations

import time

import pytest

from sp_bench.measure.job import measure
from sp_bench.measure.spec import TIMES, Measured, Spec, from_first_start
from sp_bench.methods import build
from sp_bench.plan import COMPUTE_BOUND, PHASES, Problem, layout_named
from tests.support.ranks import WORLD, Ranks


def test_times_count_from_the_first_start_on_the_same_machine() -> None:
    """Whose clock another machine's has nothing to do with; each phase and part of the step for itself."""

    def rank(machine: str, began: list[float], alone: list[float]) -> Measured:
        return Measured(
            machine=machine,
            forward_s=[1.0, 2.0],
            compute_only_backward_s=[5.0, 6.0],
            began_s={"forward_s": began, "compute_only_backward_s": alone},
        )

    ranks = [
        rank("a", [10.0, 20.5], [30.25, 50.0]),
        rank("b", [7.0, 8.0], [1.0, 2.0]),
        rank("a", [10.5, 20.0], [30.0, 50.5]),
    ]
    from_first_start(ranks)
    assert [one.forward_s for one in ranks] == [[1.0, 2.5], [1.0, 2.0], [1.5, 2.0]]
    assert [one.compute_only_backward_s for one in ranks] == [[5.25, 6.0], [5.0, 6.0], [5.0, 6.5]]


def test_a_gpu_has_its_own_clock() -> None:
    ranks = [Measured(machine="a", forward_s=[seconds]) for seconds in (1.0, 2.0)]
    from_first_start(ranks)
    assert [one.forward_s for one in ranks] == [[1.0], [2.0]]


def test_ranks_begin_by_one_clock(ranks: Ranks) -> None:
    """That of all processes of the machine, in each iteration once for each phase, and for each part of the step."""
    layout = layout_named("contiguous", causal=False)
    shape = {"seqlen": WORLD * 32, "heads": 1, "kv_heads": 1, "head_dim": 16, "dtype": "float32"}
    problem = Problem(n=WORLD, layout=layout, **shape)
    plans = {phase: build("ring", {}).plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    spec = Spec(phases=PHASES, plans=plans, peer=None, problem=problem, kernel="auto", verify=False, parts=True, seed=0)
    before = time.perf_counter()
    found = [rank[0] for rank in ranks.run(measure, [spec], 2, 1)]
    after = time.perf_counter()
    assert len({rank.machine for rank in found}) == 1
    for rank in found:
        assert {name: len(began) for name, began in rank.began_s.items()} == dict.fromkeys(TIMES, 2)
        assert len(TIMES) == 6
        assert all(before < at < after for began in rank.began_s.values() for at in began)
    own = [list(rank.forward_s) for rank in found]
    from_first_start(found)
    for iteration in range(2):
        first = min(rank.began_s["forward_s"][iteration] for rank in found)
        for rank, seconds in zip(found, own, strict=True):
            end = rank.began_s["forward_s"][iteration] + seconds[iteration]
            assert rank.forward_s[iteration] == pytest.approx(end - first)
