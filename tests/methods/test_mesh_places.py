"""Nodes that are tiles themselves: proven, of the closed form, and what crosses nodes against the bound."""

from __future__ import annotations

import itertools
import math

import pytest

from sp_bench import account
from sp_bench.check import check
from sp_bench.errors import RequestError
from sp_bench.methods import build
from sp_bench.methods.mesh_variants import Mesh
from sp_bench.plan import DOWN, Grid, Group
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from tests.support.problems import small_problem, splittable_problem

NODES = [(16, (4, 4), (2, 2)), (24, (4, 6), (2, 2)), (32, (4, 8), (2, 4)), (64, (8, 8), (4, 2)), (18, (6, 3), (3, 1))]
OPTIONS = [
    {},
    {"lanes": "each"},
    {"schedule": "searched"},
    {"schedule": "rows"},
    {"schedule": "columns"},
    {"row_sums": True},
    {"form": "gather"},
    {"form": "gather", "slices": 2, "collectives": "messages"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("n", "tile", "node"), NODES)
def test_plans_are_proven_and_send_the_closed_form(n: int, tile: tuple, node: tuple, options: dict) -> None:
    layouts = list(LAYOUTS) if n < 32 else ["zigzag"]
    for layout, phase in itertools.product(layouts, PHASES):
        p = splittable_problem(n, layout)
        mesh = build("mesh", {"tile": tile, "placement": node, "layout": layout, **options})
        plan, assigned = mesh.plan(p, phase, COMPUTE_BOUND), mesh.assigned(p)
        check(plan, assigned)
        assert account.volume(plan, assigned).total_bytes == pytest.approx(mesh.bytes_sent(p, phase), rel=1e-12)


def test_with_heads_split_a_tile_is_of_groups_of_ranks() -> None:
    p = splittable_problem(32, "zigzag")
    for form, phase in itertools.product(("ring", "gather"), PHASES):
        mesh = Mesh(form=form, tile=(4, 4), placement=(2, 2), ulysses=2, layout="zigzag")
        plan, assigned = mesh.plan(p, phase, COMPUTE_BOUND), mesh.assigned(p)
        check(plan, assigned)
        assert account.volume(plan, assigned).total_bytes == pytest.approx(mesh.bytes_sent(p, phase), rel=1e-12)


@pytest.mark.parametrize(("n", "tile", "node"), NODES[:4])
def test_what_crosses_nodes_is_the_formula_and_at_least_the_bound(n: int, tile: tuple, node: tuple) -> None:
    """In bytes of a chunk of Q, O without its lse; as much for each GPU of a node."""
    (a, b), (p, q) = tile, node
    g, problem = p * q, splittable_problem(n)
    k = problem.kv_heads / problem.heads
    plan = Mesh(tile=tile, placement=node).plan(problem, "forward", COMPUTE_BOUND)
    sent = account.sent_across_nodes(plan, problem, lambda ranks: ranks // g)
    chunk = problem.queries.largest * problem.heads * problem.head_dim * 2
    lse = 4 * problem.queries.largest * problem.heads * (a // p - 1)
    wanted = 2 * (a // p - 1) + 2 * k * (b // q - 1)
    assert sent.min() == sent.max() == pytest.approx(chunk * wanted + lse)
    bound = 4 * math.sqrt(k * n * g) - (2 + 2 * k) * g
    assert g * wanted >= bound * (1 - 1e-12)
    assert (g * wanted == pytest.approx(bound)) == (a / p == k * b / q)


def test_a_grid_counts_its_own_inner_position_last_beyond_its_own_node() -> None:
    grid = Grid(Group(1, 3), Group(6, 2, DOWN), own_last=True)
    assert [grid.member(7, u) for u in range(6)] == [7, 8, 6, 2, 0, 1]
    assert [grid.as_group.member(0, u) for u in range(6)] == [0, 1, 2, 6, 7, 8]
    assert grid.as_group.span == 12 and grid.as_group.first(8) == 0


def test_node_stands_for_the_tiles_inside() -> None:
    p, shapes = small_problem(16), ((2, 2), (2, 4), (4, 2))
    found = Mesh(tile=(4, 4), placement="node").candidates(p)
    assert found == tuple(Mesh(tile=(4, 4), placement=shape) for shape in shapes)
    assert Mesh(tile=(4, 4), placement=(2, 2)).candidates(p) == found[:1]
    any_tile = Mesh(placement=(2, 4)).candidates(small_problem(16))
    assert [mesh.tile for mesh in any_tile] == [(2, 8), (4, 4)]


@pytest.mark.parametrize(
    ("options", "n", "message"),
    [
        ({"placement": (3, 2)}, 16, r"method.placement=\[3,2\]: must be \[p,q\] with p a divisor .* would work"),
        ({"tile": (4, 4), "placement": (8, 1)}, 16, r"\[p,q\] .* method.placement=\[2,2\] would work"),
        ({"placement": "node"}, 6, "method.placement=node: .* method.placement=q or kv would work"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(options: dict, n: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Mesh(**options).refuse(small_problem(n))
