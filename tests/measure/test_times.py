"""From when the times of a step count."""

from __future__ import annotations

import time

import pytest

from methods import build
from sp_bench.measure.job import measure
from sp_bench.measure.spec import TIMES, Measured, Spec, from_first_start
from sp_bench.plan import COMPUTE_BOUND, PHASES, Problem, layout_named
from tests.ranks import WORLD, Ranks


def test_times_count_from_the_first_start_on_the_same_machine() -> None:
    """Whose clock another machine's has nothing to do with; the phases that a time adds up each for itself."""

    def rank(machine: str, began: list[float], phases: list[tuple[float, float]]) -> Measured:
        return Measured(
            machine=machine,
            forward_s=[1.0, 2.0],
            compute_only_s=[5.0, 6.0],
            began_s={"forward_s": [(at,) for at in began], "compute_only_s": list(phases)},
        )

    ranks = [
        rank("a", [10.0, 20.5], [(30.0, 40.25), (50.0, 60.0)]),
        rank("b", [7.0, 8.0], [(1.0, 2.0), (3.0, 4.0)]),
        rank("a", [10.5, 20.0], [(30.5, 40.0), (50.0, 60.5)]),
    ]
    from_first_start(ranks)
    assert [one.forward_s for one in ranks] == [[1.0, 2.5], [1.0, 2.0], [1.5, 2.0]]
    assert [one.compute_only_s for one in ranks] == [[5.25, 6.0], [5.0, 6.0], [5.5, 6.5]]


def test_a_gpu_has_its_own_clock() -> None:
    ranks = [Measured(machine="a", forward_s=[seconds]) for seconds in (1.0, 2.0)]
    from_first_start(ranks)
    assert [one.forward_s for one in ranks] == [[1.0], [2.0]]


def test_ranks_begin_by_one_clock(ranks: Ranks) -> None:
    """That of all processes of the machine; each iteration once, and each phase of what was timed without the rest."""
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
        assert {name: [len(began) for began in rank.began_s[name]] for name in TIMES} == {
            "forward_s": [1, 1], "backward_s": [1, 1], "compute_only_s": [2, 2], "communication_only_s": [2, 2]
        }  # fmt: skip
        assert all(before < at < after for began in rank.began_s.values() for phases in began for at in phases)
    own = [list(rank.forward_s) for rank in found]
    from_first_start(found)
    for iteration in range(2):
        first = min(rank.began_s["forward_s"][iteration][0] for rank in found)
        for rank, seconds in zip(found, own, strict=True):
            end = rank.began_s["forward_s"][iteration][0] + seconds[iteration]
            assert rank.forward_s[iteration] == pytest.approx(end - first)
