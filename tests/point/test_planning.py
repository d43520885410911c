"""Planning a pack: what is worked out, and that the time of it is in the record."""

from __future__ import annotations

import cProfile
import pstats
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from sp_bench.kernels.pieces import Pieces, calls
from sp_bench.lower import NCCL
from sp_bench.lower.lowering import _lowered, lower
from sp_bench.lower.transports import GLOO, SYMMETRIC
from sp_bench.methods import REGISTRY, build
from sp_bench.packing import lengths_of
from sp_bench.plan import cast_rows, demand
from sp_bench.plan.costs import COMPUTE_BOUND, CostProfile
from sp_bench.plan.documents import Documents
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Gathered
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from sp_bench.point import planning
from sp_bench.point.choose import choose
from sp_bench.point.planning import plan_pack, planning_ms
from sp_bench.point.simulated import simulate_point
from sp_bench.resources import conf_content, conf_files
from tests.support.points import point

ASKED = ("gpus=4", "seqlen=8k", "mask=document", "data=short", "heads=4", "cluster=h100_ndr400", "mode=simulate")


CACHES_OR_ONE_RANK = (*(name for name in REGISTRY if REGISTRY[name].takes_caches), "reference")


def a_pack(n: int, seed: int = 0) -> Documents:
    files = conf_files("data")
    return Documents(lengths_of(conf_content(files["magi_attention"], files), 8192 * n, seed))


def problem_of(mask: Documents, n: int) -> Problem:
    layout = mask.layout("contiguous")
    return Problem(
        n=n, seqlen=mask.seqlen, heads=64, kv_heads=8, head_dim=128, mask=mask, dtype="bfloat16", layout=layout
    )


@pytest.mark.parametrize("method", ["group_cast", "hybrid_cp", "usp", "ring", "ulysses"])
def test_a_record_of_documents_has_the_time_of_planning(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(planning, "time", SimpleNamespace(thread_time=iter([0, 0.5, 1, 1.002, 2, 2.001]).__next__))
    record, _ = simulate_point(point(*ASKED, f"method={method}"))
    assert record.planning_ms == pytest.approx(2)  # the median


def test_a_whole_sequence_is_planned_once() -> None:
    record, _ = simulate_point(point("gpus=4", "seqlen=8k", "method=ring", "mode=simulate"))
    assert record.planning_ms is None


@pytest.mark.parametrize("method", ["group_cast", "hybrid_cp", "usp", "ring", "mesh", "all_gather"])
def test_planning_finds_the_plans_that_run_and_what_the_first_rank_asks_of_the_mask(method: str) -> None:
    """An execution after it finds nothing more: neither demand, nor keys, nor regions."""
    choice = choose(point(*ASKED, f"method={method}", "method.layout=auto"))
    chosen = replace(choice.method, layout=choice.problem.layout.name)
    mask = a_pack(4, seed=3)
    problem = replace(choice.problem, mask=mask, seqlen=mask.seqlen)
    plans = plan_pack(chosen, problem, COMPUTE_BOUND, NCCL)
    assigned = chosen.assigned(replace(problem, layout=chosen.layout_of(mask, 4)))
    assert isinstance(assigned.blocks, PackBlocks)
    known, keys = dict(assigned.blocks.found), cast_rows._keys.cache_info().misses
    for phase, plan in plans.items():
        assert plan.is_program_of(chosen.plan(assigned, phase, COMPUTE_BOUND))
        assert assigned in demand._CACHE[plan]
        for op in plan.ops:
            if isinstance(op, Gathered):
                cast_rows.keys_of(op, assigned, 0)
    assert cast_rows._keys.cache_info().misses == keys and assigned.blocks.found == known


def test_each_pack_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache knows a timed pack, though it has the documents of one that was planned."""
    problem, seen = problem_of(a_pack(4), 4), []
    plan = planning.plan_pack
    monkeypatch.setattr(planning, "plan_pack", lambda m, p, c, t: seen.append(p.mask) or plan(m, p, c, t))
    planning_ms(build("usp", {"ulysses": 2, "layout": "blocks"}), problem, COMPUTE_BOUND, NCCL)
    assert len(seen) == planning.TIMES
    assert all(mask.lengths == problem.mask.lengths for mask in seen)  # pyright: ignore[reportAttributeAccessIssue]
    assert all(mask != other for i, mask in enumerate(seen) for other in [problem.mask, *seen[:i]])


@pytest.mark.parametrize("method", [name for name in REGISTRY if name not in CACHES_OR_ONE_RANK])
def test_packs_share_the_plans_that_would_be_made_of_each(method: str) -> None:
    """Those with other largest chunks too, but where a schedule depends on how long these take to send."""
    one, other = a_pack(8, seed=1), a_pack(8, seed=2)
    slow = CostProfile(
        forward_block_s=1e-3, backward_block_s=2e-3, node_size=4, intra_bytes_per_s=1e10, inter_bytes_per_s=2e9
    )
    shared = 0
    for layout in REGISTRY[method].all_layouts():
        chosen = build(method, {"layout": layout})
        first, second = (replace(problem_of(mask, 8), layout=chosen.layout_of(mask, 8)) for mask in (one, other))
        for variant in chosen.candidates(first):
            for phase, costs in product(PHASES, (COMPUTE_BOUND, slow)):
                plan = variant.plan(first, phase, costs)
                again = variant.plan(second, phase, costs)
                assert again.is_program_of(variant._made(variant.assigned(second), phase, costs))
                shared += plan is again
    assert shared


@pytest.mark.parametrize("method", [name for name in REGISTRY if name not in CACHES_OR_ONE_RANK])
def test_packs_share_what_each_would_be_lowered_to(method: str) -> None:
    one, other = a_pack(8, seed=1), a_pack(8, seed=2)
    for layout in REGISTRY[method].all_layouts():
        chosen = build(method, {"layout": layout})
        first, second = (replace(problem_of(mask, 8), layout=chosen.layout_of(mask, 8)) for mask in (one, other))
        for variant in chosen.candidates(first):
            for phase, transport in product(PHASES, (NCCL, GLOO, SYMMETRIC)):
                plan = variant.plan(first, phase, COMPUTE_BOUND)
                lower(plan, variant.assigned(first), transport)
                again = variant.assigned(second)
                assert lower(plan, again, transport) == _lowered(plan, again, transport)


def test_kernel_calls_of_a_rank_take_no_python_for_each_region() -> None:
    """A rank's thousands of regions become one or two calls a block, with the rows that they read."""
    chosen, mask = build("ring", {"layout": "zigzag_documents"}), a_pack(64)
    problem = chosen.assigned(replace(problem_of(mask, 64), layout=chosen.layout_of(mask, 64)))
    problem.blocks.find(range(64))
    regions = [problem.blocks.regions_of(kind) for kind in range(64)]
    with cProfile.Profile() as profile:
        found = [calls(each, torch.device("cpu"), varlen=True) for each in regions]
        pieces = [call for each in found for call in each if isinstance(call, Pieces)]
        rows = sum(len(call.queries) + call.ends(1).q.numel() for call in pieces)
    assert sum(map(len, found)) < 80 < 10_000 < sum(map(len, regions)) and rows > 100_000
    assert pstats.Stats(profile).total_calls < 15_000  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("method", "options", "most"),
    [
        ("group_cast", {"ulysses": 8, "stages": 2, "layout": "balanced"}, 10_000),
        ("group_cast", {"ulysses": 1, "stages": 2, "layout": "balanced", "qo_comm": True}, 45_000),
        ("usp", {"ulysses": 8, "layout": "blocks"}, 8_000),
        ("hybrid_cp", {"layout": "hybrid"}, 55_000),
        ("ring", {"layout": "zigzag_documents"}, 33_000),
        ("striped", {"layout": "striped"}, 20_000),
        ("burst_attention", {"inner": 8, "layout": "blocks"}, 24_000),
        ("burst_attention", {"inner": 1, "layout": "zigzag_documents"}, 46_000),
        ("tasp", {"inner": 16, "rings": 8, "layout": "contiguous"}, 85_000),
    ],
)
def test_planning_is_short_on_64_gpus(method: str, options: dict[str, object], most: int) -> None:
    """512k tokens: by the calls of functions, as times differ from machine to machine."""
    chosen, mask = build(method, options), a_pack(64)
    before = plan_pack(chosen, problem_of(a_pack(64, seed=1), 64), COMPUTE_BOUND, NCCL)
    with cProfile.Profile() as profile:
        plans = plan_pack(chosen, problem_of(mask, 64), COMPUTE_BOUND, NCCL)
    assert all((plan is before[phase]) == plan.is_program_of(before[phase]) for phase, plan in plans.items())
    assert plans == before or method in ("group_cast", "hybrid_cp")  # whose plans are of the pack
    assert pstats.Stats(profile).total_calls < most  # pyright: ignore[reportAttributeAccessIssue]
