"""Mesh's schedules (algorithms 2 and 3) as orders of blocks and transfers, and what the method refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sp_bench import account
from sp_bench.check import check
from sp_bench.errors import RequestError
from sp_bench.methods import build
from sp_bench.methods.mesh import tiles
from sp_bench.methods.mesh_runs import ColumnRuns, RowRuns
from sp_bench.methods.mesh_schedule import Step, Tile, backward_schedule, forward_schedule
from sp_bench.methods.mesh_variants import Mesh
from sp_bench.plan import DOWN, Attend, AttendBackward, Group, Pass, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.plan.tensors import DKV, DQ, KV, ODOQ, O, Q, Tensor
from tests.support.problems import cost_profiles, small_problem

sides = st.integers(1, 9)
blocks_to_hide = st.integers(1, 6)
forward_costs = st.fixed_dictionaries(dict.fromkeys((Q, KV, O), blocks_to_hide))
backward_costs = st.fixed_dictionaries(dict.fromkeys((ODOQ, KV, DQ, DKV), blocks_to_hide))
ONES: Mapping[Tensor, int] = dict.fromkeys((Q, KV, O, ODOQ, DQ, DKV), 1)

Block = tuple[int, int]


def received_before(steps: list[Step], q: Tensor) -> Iterator[tuple[Step, int, int]]:
    """Each step with the Q and KV chunks that are there when it begins, the rank's own included."""
    have: Counter[Tensor | None] = Counter({q: 1, KV: 1})
    for step in steps:
        yield step, have[q], have[KV]
        have[step.transfer] += 1


def transfers(steps: list[Step]) -> dict[str, int]:
    return dict(Counter(step.transfer.name for step in steps if step.transfer))


def closed_form(**counts: int) -> dict[str, int]:
    return {tensor: count for tensor, count in counts.items() if count}


def assert_blocks(steps: list[Step], a: int, b: int, q: Tensor, c: Mapping[Tensor, int]) -> None:
    """Every block once, none before its chunks are there, and no more beside a transfer than hide it."""
    assert sorted(block for step in steps for block in step.blocks) == [(u, v) for u in range(a) for v in range(b)]
    for step, have_q, have_kv in received_before(steps, q):
        assert all(u < have_q and v < have_kv for u, v in step.blocks), f"{step} with {have_q} Q and {have_kv} KV"
        assert len(step.blocks) <= (c.get(step.transfer, 1) if step.transfer else 1)


def assert_sent_complete(steps: list[Step], a: int, b: int, lines: Mapping[Tensor, int]) -> None:
    """The k-th send of a tensor is of line k, whose blocks all stand in earlier steps. `lines`: tensor -> axis."""
    done: set[Block] = set()
    sent = dict.fromkeys(lines, 0)
    for step in steps:
        if step.transfer and step.transfer in lines:
            sent[step.transfer] += 1
            line, axis = sent[step.transfer], lines[step.transfer]
            needed = {(line, v) for v in range(b)} if axis == 0 else {(u, line) for u in range(a)}
            assert needed <= done, f"{step.transfer}#{line} is sent without {needed - done}"
        done.update(step.blocks)


@given(sides, sides, forward_costs, st.booleans())
@example(1, 1, ONES, False)
@example(16, 16, ONES, True)
@example(1, 64, ONES, False)
@example(64, 1, ONES, True)
def test_forward_schedule(a: int, b: int, c: Mapping[Tensor, int], runs: bool) -> None:
    steps = forward_schedule(a, b, c, RowRuns if runs else Tile)
    assert transfers(steps) == closed_form(q=a - 1, kv=b - 1, o=a - 1)
    assert_blocks(steps, a, b, Q, c)
    assert_sent_complete(steps, a, b, {O: 0})


@given(sides, sides, forward_costs)
def test_forward_takes_its_own_row_last(a: int, b: int, c: Mapping[Tensor, int]) -> None:
    """Nobody waits for O#0: a block of row 0 is computed only when no other row has a ready one."""
    done: set[Block] = set()
    for step, have_q, have_kv in received_before(forward_schedule(a, b, c), Q):
        for block in step.blocks:
            ready = {(u, v) for u in range(1, have_q) for v in range(have_kv)} - done
            assert block == min(ready) if ready else block[0] == 0, f"{block} while {ready} are ready"
            done.add(block)


@given(sides, sides, backward_costs, st.booleans())
@example(1, 1, ONES, False)
@example(16, 16, ONES, True)
@example(1, 64, ONES, False)
@example(64, 1, ONES, True)
def test_backward_schedule(a: int, b: int, c: Mapping[Tensor, int], runs: bool) -> None:
    steps = backward_schedule(a, b, c, ColumnRuns if runs else Tile)
    assert transfers(steps) == closed_form(odoq=a - 1, kv=b - 1, dq=a - 1, dkv=b - 1)
    assert_blocks(steps, a, b, ODOQ, c)
    assert_sent_complete(steps, a, b, {DQ: 0, DKV: 1})


@given(sides, sides, forward_costs)
def test_receives_take_the_higher_profit(a: int, b: int, c: Mapping[Tensor, int]) -> None:
    """Algorithm 2: the transfer that makes more blocks ready for each block of its cost; KV if they are equal."""
    for step, have_q, have_kv in received_before(forward_schedule(a, b, c), Q):
        q_profit = have_kv / c[Q] if have_q < a else 0
        kv_profit = have_q / c[KV] if have_kv < b else 0
        if step.transfer == Q:
            assert q_profit > kv_profit
        elif step.transfer == KV:
            assert kv_profit >= q_profit
        else:
            assert q_profit == kv_profit == 0, "all receives come first"


def test_forward_3x3_by_hand() -> None:
    """The paper's example with every c = 1, algorithm 2 followed on paper."""
    assert forward_schedule(3, 3, ONES) == [
        Step(KV, ((0, 0),)),
        Step(Q, ((0, 1),)),
        Step(KV, ((1, 0),)),
        Step(Q, ((1, 1),)),
        Step(None, ((1, 2),)),
        Step(O, ((2, 0),)),
        Step(None, ((2, 1),)),
        Step(None, ((2, 2),)),
        Step(O, ((0, 2),)),
    ]


def test_backward_2x2_by_hand() -> None:
    """Algorithm 3 followed on paper: both dQ#1 and dKV#1 leave before the own block is computed."""
    assert backward_schedule(2, 2, ONES) == [
        Step(KV, ((0, 0),)),
        Step(ODOQ, ((0, 1),)),
        Step(None, ((1, 1),)),
        Step(DKV, ((1, 0),)),
        Step(DQ, ()),
    ]


def groups_of(a: int, b: int, placement: str) -> tuple[Group, Group]:
    """The Q group and the KV group."""
    return (Group(1, a), Group(a, b, DOWN)) if placement == "q" else (Group(b, a), Group(1, b, DOWN))


@given(st.sampled_from([1, 2, 4, 6, 9, 12, 16]), st.sampled_from(["q", "kv"]), st.data())
def test_plans_follow_their_schedules(n: int, placement: Literal["q", "kv"], data: st.DataObject) -> None:
    """The plan's blocks and transfers are the schedule's, in its order and steps."""
    a, b = data.draw(st.sampled_from(tiles(n)))
    costs = data.draw(st.just(COMPUTE_BOUND) | cost_profiles())
    problem, mesh = small_problem(n), Mesh(tile=(a, b), placement=placement)
    q_group, kv_group = groups_of(a, b, placement)
    for phase, schedule, names in (
        ("forward", forward_schedule, (Q, KV, O)),
        ("backward", backward_schedule, (ODOQ, KV, DQ, DKV)),
    ):
        plan = mesh.plan(problem, phase, costs)
        assert tuple(chunk.tensor for chunk in (*plan.inputs, *plan.outputs)) == names
        groups = {tensor: kv_group if tensor.of_keys else q_group for tensor in names}
        assert {chunk.tensor: chunk.home for chunk in (*plan.inputs, *plan.outputs)} == groups
        c = {tensor: costs.hiding_blocks(problem, tensor, groups[tensor], phase) for tensor in names}
        steps = schedule(a, b, c)
        transferred, computed = {}, {}
        for step, op in zip(plan.steps, plan.ops, strict=True):
            if isinstance(op, Pass):
                assert step not in transferred
                transferred[step] = op.reads[0].tensor
            elif isinstance(op, Attend):
                computed.setdefault(step, []).append((op.q.index, op.kv.index))
            elif isinstance(op, AttendBackward):
                computed.setdefault(step, []).append((op.odoq.index, op.kv.index))
        assert [transferred.get(i) for i in range(len(steps))] == [step.transfer for step in steps]
        assert [tuple(computed.get(i, ())) for i in range(len(steps))] == [step.blocks for step in steps]


@pytest.mark.parametrize(("lanes", "expected"), [("one", {"rings"}), ("each", {"odoq", "kv", "dq", "dkv"})])
def test_lanes(lanes: Literal["one", "each"], expected: set[str]) -> None:
    plan = Mesh(tile=(3, 3), lanes=lanes).backward(small_problem(9), COMPUTE_BOUND)
    assert set(plan.lanes) == expected
    assert all(op.lane == op.reads[0].tensor.name for op in plan.ops if isinstance(op, Pass)) == (lanes == "each")


def test_tiles() -> None:
    assert tiles(1) == [(1, 1)]
    assert tiles(12) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert len(tiles(256)) == 9


def test_auto_stands_for_every_tile() -> None:
    problem = small_problem(12)
    assert [mesh.tile_shape(12) for mesh in Mesh().candidates(problem)] == tiles(12)
    assert Mesh(tile=(3, 4)).candidates(problem) == (Mesh(tile=(3, 4)),)


def test_auto_placement_stands_for_both_where_they_differ() -> None:
    problem = small_problem(6)
    both = [Mesh(tile=(2, 3)), Mesh(tile=(2, 3), placement="kv")]
    assert list(Mesh(tile=(2, 3), placement="auto").candidates(problem)) == both
    found = [(mesh.tile, mesh.placement) for mesh in Mesh(placement="auto").candidates(problem)]
    two_sided = [((2, 3), "q"), ((2, 3), "kv"), ((3, 2), "q"), ((3, 2), "kv")]
    assert found == [((1, 6), "q"), *two_sided, ((6, 1), "q")]
    placed_kv = Mesh(placement="kv").candidates(problem)
    assert [(mesh.tile, mesh.placement) for mesh in placed_kv] == [(tile, "kv") for tile in tiles(6)]


@pytest.mark.parametrize("n", [1, 5, 8])
def test_placements_of_one_sided_tiles_are_one_plan(n: int) -> None:
    problem, ranks = small_problem(n), np.arange(n)
    for tile in {(1, n), (n, 1)}:
        for phase in PHASES:
            q, kv = (Mesh(tile=tile, placement=p).plan(problem, phase, COMPUTE_BOUND) for p in ("q", "kv"))
            assert [str(op) for op in q.ops] == [str(op) for op in kv.ops]
            for mine, other in zip(q.ops, kv.ops, strict=True):
                for chunk, twin in zip((*mine.reads, *mine.writes), (*other.reads, *other.writes), strict=True):
                    assert (chunk.owner(ranks) == twin.owner(ranks)).all()
                if isinstance(mine, Pass):
                    assert isinstance(other, Pass)
                    assert (mine.target(ranks) == other.target(ranks)).all()


@pytest.mark.parametrize("n", [1, 2, 6, 12, 16, 36, 64])
def test_kv_placement_is_proven_and_sends_what_q_placement_does(n: int) -> None:
    problem, ranks = small_problem(n), np.arange(n)
    for a, b in tiles(n):
        mesh, paper = Mesh(tile=(a, b), placement="kv"), Mesh(tile=(a, b))
        covered = np.zeros((n, n), int)
        for op in mesh.forward(problem, COMPUTE_BOUND).ops:
            if isinstance(op, Attend):
                assert (op.q.home, op.kv.home) == groups_of(a, b, "kv")
                covered[op.q.owner(ranks), op.kv.owner(ranks)] += 1
        assert (covered == 1).all()
        for phase in PHASES:
            plan = mesh.plan(problem, phase, COMPUTE_BOUND)
            check(plan, problem)
            by_paper = account.volume(paper.plan(problem, phase, COMPUTE_BOUND), problem)
            np.testing.assert_equal(account.volume(plan, problem).by_rank, by_paper.by_rank)


def across_nodes(tile: tuple[int, int], placement: Literal["q", "kv"], phase: str, problem: Problem) -> np.ndarray:
    """Bytes that each rank sends to other nodes of 8."""
    plan = Mesh(tile=tile, placement=placement).plan(problem, phase, COMPUTE_BOUND)
    return account.sent_across_nodes(plan, problem, lambda ranks: ranks // 8)


def with_kv_heads(n: int, kv_heads: int) -> Problem:
    return Problem(n=n, seqlen=2 * n, heads=4, kv_heads=kv_heads, head_dim=8, layout=LAYOUTS["striped"])


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_only_the_groups_that_are_not_consecutive_cross_nodes(kv_heads: int) -> None:
    """8x8 on nodes of 8: a consecutive group is a node, and every hop of the others leaves it."""
    problem, tile = with_kv_heads(64, kv_heads), (8, 8)
    size = {tensor: problem.chunk_bytes(tensor, wire=True) for tensor in (Q, KV, O, ODOQ, DQ, DKV)}
    cases: list[tuple[Literal["q", "kv"], str, float]] = [
        ("q", "forward", size[KV]),
        ("kv", "forward", size[Q] + size[O]),
        ("q", "backward", size[KV] + size[DKV]),
        ("kv", "backward", size[ODOQ] + size[DQ]),
    ]
    for placement, phase, crossing in cases:
        assert (across_nodes(tile, placement, phase, problem) == 7 * crossing).all()


def test_which_placement_crosses_less_depends_on_kv_heads() -> None:
    """4x8 on 4 nodes of 8. A KV group of stride 4 leaves the node with half of its hops; a Q group of stride 8, all.

    By rows of a chunk: q weighs 64, o 64 and an lse of 16, kv 128 with 4 kv heads and 32 with one.
    """
    rows, ranks = 2, 32
    for kv_heads, kv_row, fewer in ((4, 128, "kv"), (1, 32, "q")):
        problem = with_kv_heads(ranks, kv_heads)
        across = {p: across_nodes((4, 8), p, "forward", problem) for p in ("q", "kv")}
        assert across["q"].sum() == ranks / 2 * 7 * rows * kv_row
        assert across["q"].max() == 7 * rows * kv_row
        assert (across["kv"] == 3 * rows * (64 + 64 + 16)).all()
        assert min(across, key=lambda p: across[p].sum()) == min(across, key=lambda p: across[p].max()) == fewer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": (2, 3, 1)}, r"method.tile=\(2,3,1\): must be auto or two integers .* would work"),
        ({"tile": (0, 4)}, r"method.tile=\(0,4\): must be auto or two integers"),
        ({"tile": (2.0, 2)}, r"method.tile=\(2.0,2\): must be auto or two integers"),
        ({"tile": "square"}, "method.tile=square: must be auto or two integers"),
        (
            {"placement": "o"},
            "method.placement=o: must be q, kv, node, auto or two integers .*; method.placement=q would work",
        ),
        ({"placement": 2}, "method.placement=2: must be q, kv, node, auto or two integers"),
        ({"lanes": "two"}, "method.lanes=two: must be one or each; method.lanes=one would work"),
        ({"layout": "diagonal"}, "method.layout=diagonal: there is no such layout"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build("mesh", options)


def test_tiles_that_do_not_factor_are_refused() -> None:
    with pytest.raises(RequestError, match=r"method.tile=\[2,3\]: a \* b must be gpus=8; one of \[1,8\], \[2,4\]"):
        Mesh(tile=(2, 3)).refuse(small_problem(8))
    Mesh(tile=(2, 4)).refuse(small_problem(8))
