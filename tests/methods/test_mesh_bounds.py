"""The bound on Mesh's schedules: below every order, met where it can be, and in the simulator's own times."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.analysis.studies.mesh_schedules import rows
from sp_bench.methods import build
from sp_bench.methods.mesh_bounds import busy_s, least_s, time_of
from sp_bench.methods.mesh_search import place, search, steps_of
from sp_bench.methods.mesh_times import TileTimes
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.tensors import KV, O, Q
from sp_bench.simulate import simulate
from tests.support.clusters import cluster, problem
from tests.support.tile_times import FORWARD, greedy, in_turn, order_of, times

CLOSE = 1 + 1e-9


@given(times())
def test_no_schedule_is_faster_than_the_bound(t: TileTimes) -> None:
    one = order_of(greedy(t))
    order, placed = search(t, one)
    assert busy_s(t) <= least_s(t) * CLOSE
    assert least_s(t) <= min(placed.end_s, place(t, in_turn(t, one)).end_s) * CLOSE
    assert time_of(t, steps_of(order, placed)) == pytest.approx(placed.end_s, rel=1e-9)


@given(times(most=3, most_slices=1), st.randoms(use_true_random=False))
def test_no_order_of_blocks_and_hops_is_faster_than_the_bound(t: TileTimes, random) -> None:
    """Blocks in any order that the hops of a plan allow, and not only those that the search would choose."""
    hops = list(in_turn(t, order_of(greedy(t))))
    allowed = [order for order in set(permutations(hops)) if t.allowed(order)] if len(hops) <= 6 else [hops]
    order = random.choice(sorted(allowed, key=str))
    assert least_s(t) <= time_of(t, shuffled(t, order, random.choice)) * CLOSE


def shuffled(t: TileTimes, order, choice: Callable) -> list:
    """Each hop with some blocks, drawn from those that are there; all blocks of a row or column before it is sent."""
    names, steps = t.tensors, []
    left = {(u, v) for u in range(t.a) for v in range(t.b)}
    q = kv = 0
    sent = {names.o: 0, names.dkv: 0}

    def taken(wanted: list) -> tuple:
        found = []
        while wanted:
            found.append(wanted.pop(wanted.index(choice(wanted))))
        left.difference_update(found)
        return tuple((0, *block) for block in found)

    for hop in order:
        if hop.tensor in sent:
            sent[hop.tensor] += 1
            axis = 0 if hop.tensor == names.o else 1
            steps.append((None, taken([block for block in sorted(left) if block[axis] == sent[hop.tensor]])))
        there = [block for block in sorted(left) if block[0] <= q and block[1] <= kv]
        steps.append((hop, taken(there[: len(there) // 2])))
        q, kv = q + (hop.tensor == names.q), kv + (hop.tensor == names.kv)
    return [*steps, (None, taken(sorted(left)))]


@pytest.mark.parametrize(
    ("t", "bound", "found"),
    [
        (TileTimes(1, 3, FORWARD, 1.0, {Q: 9.0, KV: 0.5, O: 9.0}), 3.0, 3.0),  # hidden
        (TileTimes(1, 3, FORWARD, 1.0, {Q: 9.0, KV: 4.0, O: 9.0}), 9.0, 9.0),  # two hops, then a block
        (TileTimes(2, 2, FORWARD, 1.0, {Q: 3.0, KV: 2.0, O: 1.0}), 7.0, 7.0),  # Q, KV, block (1, 1), O
        # Idle until the first Q, then the own block last. The search computes what is there: the own block first.
        (TileTimes(3, 1, FORWARD, 1.0, {Q: 0.25, KV: 9.0, O: 0.5}), 3.25, 3.5),
    ],
)
def test_bounds_by_hand(t: TileTimes, bound: float, found: float) -> None:
    assert least_s(t) == pytest.approx(bound)
    assert search(t, order_of(greedy(t)))[1].end_s == pytest.approx(found)


@pytest.mark.parametrize("tile", [(2, 4), (4, 4), (3, 5)])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("bytes_per_s", [6e9, 2e10])
@pytest.mark.parametrize("options", [{}, {"schedule": "searched", "slices": 2}], ids=["paper", "searched"])
def test_the_scheduled_time_is_the_simulated_one(
    tile: tuple[int, int], phase: str, bytes_per_s: float, options: dict[str, object]
) -> None:
    """On one switch, where all ranks are alike and folds cost nothing."""
    p, network = problem(tile[0] * tile[1], tokens=2048), cluster(bytes_per_s=bytes_per_s)
    costs, method = network.profile(p), build("mesh", {"tile": tile, **options})
    time = method.schedule_time(p, phase, costs)
    assert time
    simulated = simulate(method.plan(p, phase, costs), method.assigned(p), network).makespan_s
    assert simulated == pytest.approx(time.scheduled_s, rel=1e-9)
    assert time.least_s <= time.scheduled_s * CLOSE


def test_without_costs_or_with_many_lanes_there_is_no_bound() -> None:
    p = problem(4, tokens=2048)
    assert build("mesh", {"tile": (2, 2)}).schedule_time(p, "forward", COMPUTE_BOUND) is None
    assert build("mesh", {"tile": (2, 2), "lanes": "each"}).schedule_time(p, "forward", cluster().profile(p)) is None
    assert build("ring", {}).schedule_time(p, "forward", cluster().profile(p)) is None


def test_the_page_has_a_row_for_each_tile_and_phase() -> None:
    found = list(rows(4))
    assert [row[:3] for row in found] == [
        ["4", tile, phase] for tile in ("1 x 4", "2 x 2", "4 x 1") for phase in PHASES
    ]
    assert all(float(row[-1].rstrip("%")) <= float(row[-2].rstrip("%")) for row in found)
