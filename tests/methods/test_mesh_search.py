"""Mesh's searched schedules: whole, allowed, never behind the greedy ones, and timed as the simulator times them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.check import check
from sp_bench.errors import RequestError
from sp_bench.methods import build
from sp_bench.methods.mesh import tiles
from sp_bench.methods.mesh_schedule import backward_schedule, forward_schedule
from sp_bench.methods.mesh_search import place, search, steps_of
from sp_bench.methods.mesh_times import TileTimes
from sp_bench.methods.mesh_variants import Mesh
from sp_bench.plan import CostProfile, Problem
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.simulate import simulate
from tests.support.clusters import cluster, problem
from tests.support.problems import cost_profiles, small_problem
from tests.support.tile_times import BACKWARD, FORWARD, greedy, in_turn, order_of, times
from tests.support.typed import of_kind


@given(times())
def test_it_is_whole_and_never_behind_the_greedy_order(t: TileTimes) -> None:
    one = order_of(greedy(t))
    before, (order, placed) = in_turn(t, one), search(t, one)
    assert t.allowed(before) and t.allowed(order)
    assert Counter(order) == Counter(before)
    assert placed.end_s <= place(t, before).end_s + 1e-9
    steps = list(steps_of(order, placed))
    assert [hop for hop, _ in steps if hop] == order
    every = [(i, u, v) for i in range(t.slices) for u in range(t.a) for v in range(t.b)]
    assert sorted(block for _, blocks in steps for block in blocks) == every


@given(times(most=2, most_slices=1))
def test_on_small_tiles_no_order_is_better(t: TileTimes) -> None:
    """Against all orders there are."""
    order, placed = search(t, order_of(greedy(t)))
    every = {other for other in permutations(order) if t.allowed(other)}
    assert placed.end_s == pytest.approx(min(place(t, other).end_s for other in every))


@given(times())
def test_no_better_than_what_must_be_done(t: TileTimes) -> None:
    order = in_turn(t, order_of(greedy(t)))
    placed = place(t, order)
    blocks_s, hops_s = t.slices * t.a * t.b * t.block_s, sum(t.hop_s[hop.tensor] for hop in order)
    assert placed.end_s >= max(blocks_s, hops_s) - 1e-9
    ends = [at for at, _ in placed.blocks]
    assert all(later - at >= t.block_s - 1e-9 for at, later in pairwise([0.0, *ends]))


@given(st.integers(1, 12), st.sampled_from(sorted(LAYOUTS)), st.booleans(), cost_profiles(), st.sampled_from(PHASES))
def test_plans_are_proven(n: int, layout: str, causal: bool, costs: CostProfile, phase: str) -> None:
    p = small_problem(n, layout, causal=causal)
    candidates = build("mesh", {"schedule": "searched", "slices": "auto" if n <= 9 else 1}).candidates(p)
    assert {method.tile_shape(n) for method in candidates} == set(tiles(n))
    for method in candidates:
        check(method.plan(p, phase, costs), method.assigned(p))


@pytest.mark.parametrize("tile", [(2, 2), (2, 4), (4, 2), (4, 4), (3, 5)])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("bytes_per_s", [2e9, 2e10, 6e10])
@pytest.mark.parametrize("slices", [1, 2])
def test_the_simulator_agrees(tile: tuple[int, int], phase: str, bytes_per_s: float, slices: int) -> None:
    """On one switch, where all ranks are alike and folds cost nothing, to rounding; and it isn't behind the paper's."""
    p: Problem = problem(tile[0] * tile[1], tokens=2048)
    network = cluster(bytes_per_s=bytes_per_s)
    costs = network.profile(p)
    paper, searched = (
        build("mesh", {"tile": tile}),
        build("mesh", {"tile": tile, "schedule": "searched", "slices": slices}),
    )
    makespan_s = simulate(searched.plan(p, phase, costs), assigned := searched.assigned(p), network).makespan_s
    if slices == 1:
        assert makespan_s <= simulate(paper.plan(p, phase, costs), p, network).makespan_s * (1 + 1e-9)
    tensors = FORWARD if phase == "forward" else BACKWARD
    names = [name for name in (tensors.q, tensors.kv, tensors.o, tensors.dkv) if name]
    hop_s = {name: 1e-5 + assigned.chunk_bytes(name, wire=True) / bytes_per_s for name in names}
    t = TileTimes(*tile, tensors, costs.of_a_slice(assigned).block_s(phase), hop_s, slices)
    c = {name: -int(-s // t.block_s) for name, s in hop_s.items()}
    schedule = (forward_schedule if phase == "forward" else backward_schedule)(*tile, c)
    assert makespan_s == pytest.approx(search(t, order_of(schedule))[1].end_s, rel=1e-9)


@pytest.mark.parametrize(
    ("tokens", "bytes_per_s", "options"),
    [(2048, 2.4e10, {"schedule": "searched"}), (8192, 6e9, {"schedule": "searched", "slices": 2})],
)
def test_gains_where_blocks_and_transfers_take_equally_long(
    tokens: int, bytes_per_s: float, options: dict[str, object]
) -> None:
    p, network = problem(16, tokens=tokens), cluster(bytes_per_s=bytes_per_s)
    costs, found = network.profile(p), []
    for method in (build("mesh", {"tile": (4, 4), **each}) for each in ({}, options)):
        found.append(simulate(method.plan(p, "backward", costs), method.assigned(p), network).makespan_s)
    paper, ours = found
    assert ours < 0.95 * paper


def test_refuses_other_schedules() -> None:
    with pytest.raises(RequestError, match=r"method.schedule=best.*must be paper, searched, rows, columns or auto"):
        build("mesh", {"schedule": "best"})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"slices": 2}, "method.slices=2: schedule=paper goes through the tile once.*schedule=searched it would"),
        ({"slices": 0}, "method.slices=0: must be auto or an integer of at least 1"),
        ({"slices": "two"}, "method.slices=two: must be auto"),
        ({"slices": 3, "schedule": "searched"}, "method.slices=3: must divide kv_heads=2; one of 1, 2 would work"),
    ],
)
def test_refuses_other_slices(options: dict[str, object], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        build("mesh", options).candidates(small_problem(4))


def test_slices_that_auto_stands_for() -> None:
    p = small_problem(4)
    mesh = of_kind(Mesh, build("mesh", {"tile": (2, 2), "schedule": "auto", "slices": "auto"}))
    assert [(m.schedule, m.slices) for m in mesh.candidates(p)] == [
        ("paper", 1),
        ("searched", 1),
        ("searched", 2),
    ]
