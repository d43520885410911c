"""Partials that need no accumulator, and receives that are pre-posted, by hand and against walks through plans."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from sp_bench.lower import GLOO, lower
from sp_bench.lower.early import previous_on_lane
from sp_bench.methods import build
from sp_bench.plan import AllToAll, Attend, AttendBackward, Chunk, Fold, Gathered, Pass, Plan, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.ops import Fused, ReduceScatter, Transfer
from sp_bench.plan.regions import RegionKind
from sp_bench.plan.transfers import peers
from sp_bench.plan.union import kernel_calls
from tests.support.problems import Planned, plans, small_problem, splittable_problem


def names(method: str, phase: str, problem: Problem, **options: object) -> set[str]:
    """The partials of a method's plan that nothing is added to."""
    built = build(method, options)
    plan = built.plan(problem, phase, COMPUTE_BOUND)
    return {str(chunk) for chunk in lower(plan, built.assigned(problem)).unsummed}


@pytest.mark.parametrize("causal", [True, False])
def test_of_ulysses_all_are(causal: bool) -> None:
    problem = splittable_problem(4, "contiguous", causal=causal)
    assert names("ulysses", "forward", problem) == {"o_h#0"}
    assert names("ulysses", "backward", problem) == {"dq_h#0", "dkv_h#0", "dq#0", "dkv#0"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_all_ranks_share_one_chunk_no_layout_narrows(layout: str) -> None:
    """So that usp among all of them is ulysses on each."""
    problem = splittable_problem(4, layout)
    assert names("usp", "forward", problem, ulysses=4, layout=layout) == {"o_h#0"}
    assert names("usp", "backward", problem, ulysses=4, layout=layout) == {"dq_h#0", "dkv_h#0", "dq#0", "dkv#0"}


def test_what_travels_as_accumulators_are_is_made_so() -> None:
    """So is one block's partial. O leaves complete, in the compute dtype, and what arrives so is cast as it arrives."""
    problem = replace(splittable_problem(4, "contiguous"), wire_dtype="float32")
    assert names("ulysses", "forward", problem) == {"o_h#0"}
    assert names("ulysses", "backward", problem) == {"dq#0", "dkv#0"}
    assert names("ring", "backward", problem) == set()


def test_key_heads_of_several_ranks_add_up_at_their_owner() -> None:
    problem = replace(splittable_problem(4, "contiguous"), kv_heads=2)
    assert names("ulysses", "backward", problem) == {"dq_h#0", "dkv_h#0", "dq#0"}


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_of_tokenring_those_that_go_home_are_where_a_block_covers_its_chunk(layout: str) -> None:
    """With a causal mask, striped and zigzag blocks leave out rows."""
    full, causal = (small_problem(3, layout, causal=causal) for causal in (False, True))
    assert names("tokenring", "forward", full, layout=layout) == {"o#1", "o#2"}
    assert names("tokenring", "backward", full, layout=layout) == {"dq#1", "dq#2"}, "and dKV stays"
    covered = {"o#1", "o#2"} if layout == "contiguous" else set()
    assert names("tokenring", "forward", causal, layout=layout) == covered


def test_ring_adds_to_all_but_the_gradient_that_it_sends_first() -> None:
    """As Ring has it, dKV#1 goes on after one block. A rank alone has one block only."""
    for phase, among_four, alone in (("forward", set(), {"o#0"}), ("backward", {"dkv#1"}, {"dq#0", "dkv#0"})):
        assert names("ring", phase, small_problem(4, "contiguous")) == among_four
        assert names("ring", phase, small_problem(1, "contiguous")) == alone


def contributions(plan: Plan) -> dict[Chunk, list[list[object]]]:
    """By partial, each time that it is there: the operations that put it there or added to it."""
    found: dict[Chunk, list[list[object]]] = {}
    there: set[Chunk] = set()
    for op in plan.ops:
        if isinstance(op, Transfer | Fold):
            there -= {chunk for chunk in op.reads if chunk not in plan.kept and chunk not in op.writes}
        for chunk in op.writes:
            if chunk.tensor.is_partial:
                if chunk not in there or isinstance(op, Transfer):
                    found.setdefault(chunk, []).append([])
                    there.add(chunk)
                found[chunk][-1].append(op)
    return found


@given(plans())
def test_unsummed_is_what_one_operation_makes_all_of(planned: Planned) -> None:
    """There are as many key heads as ranks, so that nothing adds up in an AllToAll."""
    plan, problem = planned
    ranks = range(problem.n)
    blocks = problem.blocks
    regions = {region for i in ranks for j in ranks for region in blocks.regions_of(blocks.of(i, j))}
    whole = range(problem.queries.largest)
    covers = all(r.kind is not RegionKind.STRICT and (r.q, r.kv) == (whole, whole) for r in regions)
    found = contributions(plan)
    unsummed = lower(plan, problem).unsummed
    assert unsummed <= {chunk for chunk in found if not chunk.is_arriving}
    for chunk, times in found.items():
        if chunk.is_arriving:
            continue
        once = all(len(ops) == 1 for ops in times)
        kinds = {type(op) for ops in times for op in ops}
        blocks_cover = kinds <= {Attend, AttendBackward, Gathered} and covers
        one_call = kinds == {Fused} and covers and all(region.kind is RegionKind.FULL for region in regions)
        packed = not chunk.tensor.is_output and _packed_once(plan, problem, chunk)
        if chunk.tensor.of_keys and chunk.index and _beside_summed(plan, chunk, found):
            assert chunk not in unsummed, "rows of several ranks lie in one buffer, in the dtype of the sums"
            continue
        assert (chunk in unsummed) == (once and (blocks_cover or one_call or kinds == {AllToAll} or packed)), chunk


def _beside_summed(plan: Plan, chunk: Chunk, found: dict[Chunk, list[list[object]]]) -> bool:
    """Whether a call over gathered keys writes it, and something else that several operations add to."""
    calls = [op for op in plan.ops if isinstance(op, Gathered) and chunk in op.writes]
    return any(len(ops) > 1 for op in calls for other in op.writes for ops in found.get(other, ()))


def _packed_once(plan: Plan, problem: Problem, chunk: Chunk) -> bool:
    """Whether a reduction reads it, and no rank has it of two kernel calls, by the calls themselves."""
    if not any(chunk in op.reads for op in plan.ops if isinstance(op, ReduceScatter)):
        return False
    op, *others = (op for op in plan.ops if chunk in op.writes)
    if others:
        return False
    return isinstance(op, AttendBackward | Fused) and all(
        len(_results(op, problem, rank, chunk)) <= 1 for rank in range(problem.n)
    )


def _results(op: AttendBackward | Fused, problem: Problem, rank: int, chunk: Chunk) -> list[range]:
    """The rows of a chunk's gradients that each kernel call of an operation makes on a rank."""
    keys, block = chunk.tensor.of_keys, next(block for block in op.blocks if chunk in block.writes)
    read = block.kv if keys else block.q
    if isinstance(op, AttendBackward):
        regions = problem.blocks.regions_of(problem.blocks.of(op.q.owner(rank), op.kv.owner(rank)))
        return [region.kv if keys else region.q for region in regions]
    number = (op.keys if keys else op.queries).index(read)
    sides = (call.kv if keys else call.q for call in kernel_calls(op, problem, rank))
    return [piece.rows for side in sides for piece in side if piece.chunk == number]


def test_what_one_reduction_packs_stays_in_the_result_of_a_fused_block() -> None:
    """Gathered keys' gradients do; those that are folded into the rank's own don't, nor do those of single blocks."""
    problem = splittable_problem(4, "zigzag", causal=True)
    for fuse in (True, False):
        method = build("all_gather", {"fuse": fuse, "stride": problem.kv_heads, "layout": "zigzag"})
        plan, assigned = method.plan(problem, "backward", COMPUTE_BOUND), method.assigned(problem)
        together = {str(chunk) for chunk in lower(plan, assigned).together}
        assert together == ({"dkv#1", "dkv#2", "dkv#3"} if fuse else set())
        assert {str(c) for c in lower(plan, assigned).unsummed} == {"dkv#1", "dkv#2", "dkv#3"}
        wide = replace(assigned, wire_dtype="float32")
        assert not lower(plan, wide).together and not lower(plan, wide).unsummed


def test_layouts_that_narrow() -> None:
    """But for one rank, which has but one chunk."""
    assert not any(small_problem(1, name).blocks.narrows for name in LAYOUTS)
    cases = itertools.product(LAYOUTS, (False, True))
    narrows = {(name, causal): small_problem(2, name, causal=causal).blocks.narrows for name, causal in cases}
    assert {case for case, narrowed in narrows.items() if narrowed} == {("striped", True), ("zigzag", True)}


def ahead(method: str, phase: str, problem: Problem, **options: object) -> dict[str, str]:
    """By what a transfer brings, whether its receive is posted ahead of its turn."""
    built = build(method, options)
    plan = built.plan(problem, phase, COMPUTE_BOUND)
    found = lower(plan, built.assigned(problem), GLOO).preposted
    words = {index: "beside" if posted.beside else "after" for index, posted in found.items()}
    transfers = ((index, op) for index, op in plan if isinstance(op, Transfer))
    return {str(chunk): words.get(index, "in its turn") for index, op in transfers for chunk in op.writes}


def test_receives_are_posted_beside_the_transfer_before_from_the_same_ranks_into_other_buffers() -> None:
    problem = splittable_problem(4, "contiguous")
    ulysses = ahead("ulysses", "forward", problem, collectives="messages")
    assert ulysses == {"q_h#0": "after", "kv_h#0": "beside", "out#0": "beside"}
    assert set(ahead("ulysses", "forward", problem).values()) == {"in its turn"}, "the library's"
    assert ahead("ring", "forward", problem) == {"kv#1": "after", "kv#2": "beside", "kv#3": "after"}
    teams = {"q#1": "after", "kv#0": "after", "kv#1": "beside", "o#0 arriving": "beside"}  # both KV of the swap
    startrail = ahead("startrail", "forward", splittable_problem(8, "contiguous"), team=2, collectives="messages")
    assert teams.items() <= startrail.items()


@given(plans())
def test_nothing_is_received_ahead_into_what_the_transfer_before_uses(planned: Planned) -> None:
    """Nor from others than it receives from, nor what has no buffer yet."""
    plan, problem = planned.plan, planned.problem
    lowering, before = lower(plan, problem, GLOO), previous_on_lane(plan)
    found, buffers = lowering.preposted, lowering.receive_buffers
    everyone = np.arange(problem.n)
    for index, op in plan:
        if not isinstance(op, Transfer):
            continue
        assigns = isinstance(op, AllToAll) and op.by_messages
        assert (index in found) == (assigns or (index in buffers and isinstance(op, Pass)))
        if index not in found:
            continue
        beside, after, waits = found[index]
        assert after in (before.get(index), before.get(before.get(index, -1)))
        assert all(last <= dict(waits).get(stream, -1) for stream, last in lowering.buffer_free[index])
        if beside:
            assert before[index] in found, "lanes post in their order"
            other = plan.ops[before[index]]
            assert isinstance(other, Transfer)
            mine, its = (
                {tuple(group.member(everyone, -shift).tolist()) for group, shift in peers(x)} for x in (op, other)
            )
            assert mine == its
            assert buffers.get(index) is None or buffers.get(index) != buffers.get(before[index])
