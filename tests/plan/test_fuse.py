"""Fused blocks: what is computed, waited for and sent is as before, in fewer operations and kernel calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import account, draw
from sp_bench.check import check
from sp_bench.errors import RequestError
from sp_bench.lower import GLOO, NCCL, SHARED, lower
from sp_bench.methods import build
from sp_bench.plan import Attend, Chunk, Group, Problem
from sp_bench.plan.costs import CostProfile
from sp_bench.plan.fuse import fuse, fusible
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Block, Fused, Plan, PlanError, Transfer
from sp_bench.plan.regions import Region, RegionKind, Regions
from sp_bench.plan.schedule import Segment, schedule, segments
from sp_bench.plan.union import Calls, kernel_calls, union
from tests.support.problems import Planned, plans, small_problem


def pairs_of(region: Region) -> np.ndarray:
    """The keys that each query of a region sees: (queries, keys)."""
    ones = np.ones((len(region.q), len(region.kv)), int)
    triangles = {
        RegionKind.FULL: ones,
        RegionKind.CAUSAL: np.tril(ones),
        RegionKind.STRICT: np.tril(ones, -1),
        RegionKind.UPPER: np.triu(ones),
    }
    return triangles[region.kind]


def counted(calls: Calls, rows: int, columns: int, size: int) -> np.ndarray:
    """How often calls compute each (query, key) pair of chunks of `size` tokens, end to end."""
    found = np.zeros((rows * size, columns * size), int)
    for call in calls:
        q, kv = ([piece.chunk * size + i for piece in side for i in piece.rows] for side in (call.q, call.kv))
        found[np.ix_(q, kv)] += pairs_of(call.region)
    return found


def in_blocks(regions: list[list[Regions]], size: int) -> np.ndarray:
    found = np.zeros((len(regions) * size, len(regions[0]) * size), int)
    for (i, row), j in product(enumerate(regions), range(len(regions[0]))):
        for region in row[j]:
            block = found[i * size : (i + 1) * size, j * size : (j + 1) * size]
            block[region.q.start : region.q.stop, region.kv.start : region.kv.stop] += pairs_of(region)
    return found


@given(st.data())
def test_a_union_is_each_pair_of_its_blocks_once(data: st.DataObject) -> None:
    """Groups of chunks are random, on every layout."""
    n = data.draw(st.integers(2, 6))
    mask, layout = data.draw(st.sampled_from([CAUSAL, FULL])), LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))]
    blocks = replace(small_problem(n), mask=mask, layout=layout, seqlen=8 * n).blocks
    queries, keys = (data.draw(st.lists(st.integers(0, n - 1), min_size=1, unique=True)) for _ in range(2))
    regions = [[blocks.regions_of(blocks.of(q, kv)) for kv in keys] for q in queries]
    calls = union(regions)
    assert (counted(calls, len(queries), len(keys), 8) == in_blocks(regions, 8)).all()
    assert len(calls) <= sum(len(of_block) for row in regions for of_block in row)


def test_calls_of_neighbours_are_one() -> None:
    """On zigzag the keys before a query chunk are one call, those after it another, its own a third."""
    blocks = replace(small_problem(8, "zigzag"), seqlen=64).blocks
    row = [[blocks.regions_of(blocks.of(4, kv)) for kv in range(8)]]
    kinds = [(call.kind, len(call.region.q), len(call.region.kv)) for call in union(row)]
    assert kinds == [(RegionKind.FULL, 8, 16), (RegionKind.FULL, 4, 24), (RegionKind.CAUSAL, 8, 8)]
    full = replace(small_problem(8, "contiguous", causal=False), seqlen=64).blocks
    (call,) = union([[full.regions_of(full.of(q, kv)) for kv in range(3)] for q in range(2)])
    assert call.region == Region(RegionKind.FULL, range(16), range(24))


def waited_for(plan: Plan) -> list[dict[str, int]]:
    """For each segment, how many transfers of each lane must have ended."""
    numbers: dict[int, int] = {}
    for index, op in plan:
        if isinstance(op, Transfer):
            numbers[index] = sum(isinstance(o, Transfer) and o.lane == op.lane for o in plan.ops[:index])
    found: list[Segment] = [*segments(plan, schedule(plan).waits).values()]
    return [{lane: numbers[last] for lane, last in segment.waits.items()} for segment in found]


@given(plans(max_n=12))
def test_a_fused_plan_computes_sends_and_waits_as_before(planned: Planned) -> None:
    plan, problem = planned
    fused = fuse(plan, problem)
    check(fused, problem)
    assert [op for op in fused.ops if isinstance(op, Transfer)] == [op for op in plan.ops if isinstance(op, Transfer)]
    assert waited_for(fused) == waited_for(plan)
    assert (draw.assignment(fused, problem) == draw.assignment(plan, problem)).all()
    assert (account.pairs(fused, problem) == account.pairs(plan, problem)).all()
    before, after = (sum(isinstance(op, Block) for op in p.ops) for p in (plan, fused))
    assert after <= before and (fused is plan) == (after == before)
    for index, op in fused:
        if isinstance(op, Fused):
            assert {op_.heads for op_ in op.queries} == {op.queries[0].heads}
            whole = sum(
                len(problem.blocks.regions_of(problem.blocks.of(b.q.owner(0), b.kv.owner(0)))) for b in op.blocks
            )
            assert len(kernel_calls(op, problem, 0)) <= whole, index


SLOW = CostProfile(forward_block_s=1.0, backward_block_s=1.0, intra_latency_s=3.5, inter_latency_s=3.5)
"""Costs at which four blocks hide a hop."""


def of_mesh(layout: str, mask: Mask = CAUSAL, n: int = 16, **changes) -> tuple[dict[str, Plan], Problem]:
    problem = replace(small_problem(n, layout), **{"seqlen": 4 * n, "mask": mask, **changes})
    method = build("mesh", {"tile": (4, n // 4), "layout": layout, "fuse": True})
    return {phase: method.plan(problem, phase, SLOW) for phase in PHASES}, problem


@pytest.mark.parametrize(("layout", "mask"), [("contiguous", FULL), ("striped", FULL), ("zigzag", CAUSAL)])
def test_mesh_has_something_to_fuse(layout: str, mask: Mask) -> None:
    plans_, problem = of_mesh(layout, mask)
    for plan in plans_.values():
        check(plan, problem)
        assert any(isinstance(op, Fused) for op in plan.ops)


def test_what_is_left_as_it_is() -> None:
    """Staircases, several batch entries, and chunks that differ in size."""
    for plans_, problem in (of_mesh("striped"), of_mesh("zigzag", batch=2), of_mesh("zigzag", seqlen=67)):
        assert not fusible(problem)
        assert not any(isinstance(op, Fused) for plan in plans_.values() for op in plan.ops)


def test_fused_chunks_lie_side_by_side() -> None:
    """But where peers write into buffers by their addresses."""
    plans_, problem = of_mesh("contiguous", FULL)
    for plan in plans_.values():
        fused = {(index, len(op.keys) > 1) for index, op in plan if isinstance(op, Fused)}
        for transport in (NCCL, GLOO):
            lowering = lower(plan, problem, transport)
            assert fused and lowering.in_place == fused
            assert {len(row) for row in lowering.rows} == {3}
        shared = lower(plan, problem, SHARED)
        assert not shared.in_place and not shared.rows


def test_an_option_that_is_no_boolean_is_refused() -> None:
    with pytest.raises(RequestError, match=r"method.fuse=yes.*true or false"):
        build("ring", {"fuse": "yes"})


@given(st.data())
def test_spoiled_fused_plans_are_refused(data: st.DataObject) -> None:
    """A block is missing, there twice, or of other chunks."""
    layout, mask = data.draw(st.sampled_from([("contiguous", FULL), ("zigzag", CAUSAL)]))
    plans_, problem = of_mesh(layout, mask, 4 * data.draw(st.sampled_from([3, 4, 6])))
    fused = plans_[data.draw(st.sampled_from(PHASES))]
    at = data.draw(st.sampled_from([index for index, op in fused if isinstance(op, Fused)]))
    op = fused.ops[at]
    assert isinstance(op, Fused)
    (*others, last), first = op.blocks, op.blocks[0]
    spoiled = {
        "dropped": others,
        "twice": [*op.blocks, last],
        "swapped": [*others, replace(last, kv=first.kv.at(first.kv.index + 1)) if len(op.keys) == 1 else first],
        "moved": [*others, replace(last, **_to_another(last))],
    }
    blocks = spoiled[data.draw(st.sampled_from(sorted(spoiled)))]
    broken = replace(fused, ops=(*fused.ops[:at], Fused(tuple(blocks)), *fused.ops[at + 1 :]))  # pyright: ignore
    with pytest.raises(PlanError):
        check(broken, problem)


def _to_another(block) -> dict[str, Chunk]:
    name = "o" if isinstance(block, Attend) else "dq"
    chunk = getattr(block, name)
    return {name: chunk.at(chunk.index + 1) if chunk.home.size > 1 else chunk._replace(home=Group(1, 2), index=1)}
