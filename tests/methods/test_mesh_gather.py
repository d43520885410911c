"""Mesh by gathers: one block of a tile, the closed form, which options go together, and what hides behind what."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from sp_bench import account
from sp_bench.check import check
from sp_bench.errors import RequestError
from sp_bench.methods import build
from sp_bench.methods.mesh import tiles
from sp_bench.methods.mesh_variants import Mesh
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import AllGather, AttendBackward, Fused, Pass, ReduceScatter
from sp_bench.plan.tensors import KV, O, Q
from sp_bench.plan.union import kernel_calls
from sp_bench.simulate import simulate
from tests.support.clusters import cluster, problem
from tests.support.problems import small_problem, splittable_problem

OPTIONS = [{}, {"collectives": "messages"}, {"placement": "kv"}, {"slices": 2}, {"row_sums": True, "slices": 2}]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_plans_are_proven_and_send_the_closed_form(layout: str, causal: bool, options: dict) -> None:
    for n in (1, 4, 6, 9):
        p = splittable_problem(n, layout, causal=causal)
        tiles_of = tiles(n) if p.kv_heads % options.get("slices", 1) == 0 else []
        for tile, phase in itertools.product(tiles_of, PHASES):
            mesh = build("mesh", {"form": "gather", "tile": tile, "layout": layout, **options})
            plan, assigned = mesh.plan(p, phase, COMPUTE_BOUND), mesh.assigned(p)
            check(plan, assigned)
            assert account.volume(plan, assigned).total_bytes == pytest.approx(mesh.bytes_sent(p, phase), rel=1e-12)


@pytest.mark.parametrize("phase", PHASES)
def test_a_tile_is_one_block_between_a_gather_and_a_reduction_of_each_side(phase: str) -> None:
    p = small_problem(12, "zigzag")
    plan = build("mesh", {"form": "gather", "tile": (3, 4)}).plan(p, phase, COMPUTE_BOUND)
    kinds = [type(op) for op in plan.ops]
    reduced = 1 if phase == "forward" else 2
    assert kinds[:2] == [AllGather, AllGather] and isinstance(plan.ops[2], Fused)
    assert kinds.count(ReduceScatter) == reduced and Pass not in kinds
    assert len(plan.ops[2].blocks) == 12


def test_kernel_calls_by_mask() -> None:
    """A full mask leaves one call; a causal one in zigzag order few; stripes as many as blocks."""
    full, causal = small_problem(16, "contiguous", causal=False), small_problem(16, "zigzag")
    for p, most in ((full, 1), (causal, 5)):
        plan = build("mesh", {"form": "gather", "tile": (4, 4)}).plan(p, "forward", COMPUTE_BOUND)
        (op,) = [op for op in plan.ops if isinstance(op, Fused)]
        assert max(len(kernel_calls(op, p, rank)) for rank in range(16)) == most
    striped = small_problem(16)
    plan = build("mesh", {"form": "gather", "tile": (4, 4)}).plan(striped, "backward", COMPUTE_BOUND)
    assert sum(isinstance(op, AttendBackward) for op in plan.ops) == 16


def test_auto_stands_for_both_forms() -> None:
    p = small_problem(6)
    assert Mesh(form="auto").candidates(p) == (*Mesh().candidates(p), *Mesh(form="gather").candidates(p))
    for asked, form in ((Mesh(form="auto", slices=2), "gather"), (Mesh(form="auto", schedule="searched"), "ring")):
        assert asked.candidates(p) == replace(asked, form=form).candidates(p)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "rings"}, "method.form=rings: must be ring, gather or auto; method.form=ring would work"),
        ({"form": "gather", "schedule": "searched"}, "method.schedule=searched: form=gather has one block"),
        ({"form": "gather", "schedule": "rows"}, "method.schedule=rows: .* with method.form=ring it would work"),
        ({"collectives": "library"}, "method.collectives=library: form=ring sends messages .* it would work"),
        ({"slices": 2}, "method.slices=2: schedule=paper goes through the tile once"),
        ({"form": "gather", "ulysses": 2, "slices": 2}, "method.slices=2: heads are split among ranks already"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build("mesh", options)


def test_leaner_forms_are_rings() -> None:
    leaner = Mesh(form="gather", slices=2, collectives="library").leaner()
    assert leaner == (Mesh(schedule="rows"), Mesh(schedule="columns"))


def test_the_time_of_a_tile_in_slices_by_hand() -> None:
    """On links that are slower than blocks, all blocks of two slices hide behind transfers; those of one don't."""
    p, network = problem(4, tokens=2048), cluster(bytes_per_s=6e9)
    sent_s = sum(p.chunk_bytes(tensor, wire=True) for tensor in (Q, KV, O)) / 6e9
    block_s = 4 * 4096**2 * p.heads * p.head_dim / 200e12
    for slices, hops, exposed_s in ((1, 3, block_s), (2, 6, 0.0)):
        mesh = build("mesh", {"form": "gather", "tile": (2, 2), "slices": slices, "collectives": "messages"})
        run = simulate(mesh.plan(p, "forward", network.profile(p)), mesh.assigned(p), network)
        assert run.makespan_s == pytest.approx(sent_s + hops * 1e-5 + exposed_s, rel=1e-9)
