"""Mesh's schedules (algorithms 2 and 3) as orders of blocks and transfers, and what the method refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from methods import build
from methods.mesh import Mesh, Step, backward_schedule, forward_schedule, tiles
from sp_bench.errors import RequestError
from sp_bench.plan import COMPUTE_BOUND, Attend, AttendBackward, Group, Pass
from tests.problems import cost_profiles, small_problem

sides = st.integers(1, 9)
blocks_to_hide = st.integers(1, 6)
forward_costs = st.fixed_dictionaries(dict.fromkeys(("q", "kv", "o"), blocks_to_hide))
backward_costs = st.fixed_dictionaries(dict.fromkeys(("odoq", "kv", "dq", "dkv"), blocks_to_hide))
ONES: Mapping[str, int] = dict.fromkeys(("q", "kv", "o", "odoq", "dq", "dkv"), 1)

Block = tuple[int, int]


def received_before(steps: list[Step], q: str) -> Iterator[tuple[Step, int, int]]:
    """Each step with the Q and KV chunks that are there when it begins, the rank's own included."""
    have = Counter({q: 1, "kv": 1})
    for step in steps:
        yield step, have[q], have["kv"]
        have[step.transfer] += 1


def transfers(steps: list[Step]) -> dict[str, int]:
    return dict(Counter(step.transfer for step in steps if step.transfer))


def closed_form(**counts: int) -> dict[str, int]:
    return {tensor: count for tensor, count in counts.items() if count}


def assert_blocks(steps: list[Step], a: int, b: int, q: str, c: Mapping[str, int]) -> None:
    """Every block once, none before its chunks are there, and no more beside a transfer than hide it."""
    assert sorted(block for step in steps for block in step.blocks) == [(u, v) for u in range(a) for v in range(b)]
    for step, have_q, have_kv in received_before(steps, q):
        assert all(u < have_q and v < have_kv for u, v in step.blocks), f"{step} with {have_q} Q and {have_kv} KV"
        assert len(step.blocks) <= c.get(step.transfer, 1)


def assert_sent_complete(steps: list[Step], a: int, b: int, lines: Mapping[str, int]) -> None:
    """The k-th send of a tensor is of line k, whose blocks all stand in earlier steps. `lines`: tensor -> axis."""
    done: set[Block] = set()
    sent = dict.fromkeys(lines, 0)
    for step in steps:
        if step.transfer in lines:
            sent[step.transfer] += 1
            line, axis = sent[step.transfer], lines[step.transfer]
            needed = {(line, v) for v in range(b)} if axis == 0 else {(u, line) for u in range(a)}
            assert needed <= done, f"{step.transfer}#{line} is sent without {needed - done}"
        done.update(step.blocks)


@given(sides, sides, forward_costs)
@example(1, 1, ONES)
@example(16, 16, ONES)
@example(1, 64, ONES)
@example(64, 1, ONES)
def test_forward_schedule(a: int, b: int, c: Mapping[str, int]) -> None:
    steps = forward_schedule(a, b, c)
    assert transfers(steps) == closed_form(q=a - 1, kv=b - 1, o=a - 1)
    assert_blocks(steps, a, b, "q", c)
    assert_sent_complete(steps, a, b, {"o": 0})


@given(sides, sides, forward_costs)
def test_forward_takes_its_own_row_last(a: int, b: int, c: Mapping[str, int]) -> None:
    """Nobody waits for O#0: a block of row 0 is computed only when no other row has a ready one."""
    done: set[Block] = set()
    for step, have_q, have_kv in received_before(forward_schedule(a, b, c), "q"):
        for block in step.blocks:
            ready = {(u, v) for u in range(1, have_q) for v in range(have_kv)} - done
            assert block == min(ready) if ready else block[0] == 0, f"{block} while {ready} are ready"
            done.add(block)


@given(sides, sides, backward_costs)
@example(1, 1, ONES)
@example(16, 16, ONES)
@example(1, 64, ONES)
@example(64, 1, ONES)
def test_backward_schedule(a: int, b: int, c: Mapping[str, int]) -> None:
    steps = backward_schedule(a, b, c)
    assert transfers(steps) == closed_form(odoq=a - 1, kv=b - 1, dq=a - 1, dkv=b - 1)
    assert_blocks(steps, a, b, "odoq", c)
    assert_sent_complete(steps, a, b, {"dq": 0, "dkv": 1})


@given(sides, sides, forward_costs)
def test_receives_take_the_higher_profit(a: int, b: int, c: Mapping[str, int]) -> None:
    """Algorithm 2: the transfer that makes more blocks ready for each block of its cost; KV if they are equal."""
    for step, have_q, have_kv in received_before(forward_schedule(a, b, c), "q"):
        q_profit = have_kv / c["q"] if have_q < a else 0
        kv_profit = have_q / c["kv"] if have_kv < b else 0
        if step.transfer == "q":
            assert q_profit > kv_profit
        elif step.transfer == "kv":
            assert kv_profit >= q_profit
        else:
            assert q_profit == kv_profit == 0, "all receives come first"


def test_forward_3x3_by_hand() -> None:
    """The paper's example with every c = 1, algorithm 2 followed on paper."""
    assert forward_schedule(3, 3, ONES) == [
        Step("kv", ((0, 0),)),
        Step("q", ((0, 1),)),
        Step("kv", ((1, 0),)),
        Step("q", ((1, 1),)),
        Step("", ((1, 2),)),
        Step("o", ((2, 0),)),
        Step("", ((2, 1),)),
        Step("", ((2, 2),)),
        Step("o", ((0, 2),)),
    ]


def test_backward_2x2_by_hand() -> None:
    """Algorithm 3 followed on paper: both dQ#1 and dKV#1 leave before the own block is computed."""
    assert backward_schedule(2, 2, ONES) == [
        Step("kv", ((0, 0),)),
        Step("odoq", ((0, 1),)),
        Step("", ((1, 1),)),
        Step("dkv", ((1, 0),)),
        Step("dq", ()),
    ]


@given(st.sampled_from([1, 2, 4, 6, 9, 12, 16]), st.data())
def test_plans_follow_their_schedules(n: int, data: st.DataObject) -> None:
    """The plan's blocks and transfers are the schedule's, in its order and steps."""
    a, b = data.draw(st.sampled_from(tiles(n)))
    costs = data.draw(st.just(COMPUTE_BOUND) | cost_profiles())
    problem, mesh = small_problem(n), Mesh(tile=(a, b))
    for phase, schedule, names in (
        ("forward", forward_schedule, ("q", "kv", "o")),
        ("backward", backward_schedule, ("odoq", "kv", "dq", "dkv")),
    ):
        plan = mesh.plan(problem, phase, costs)
        assert tuple(chunk.tensor for chunk in (*plan.inputs, *plan.outputs)) == names
        groups = {tensor: Group(a, b) if "kv" in tensor else Group(1, a) for tensor in names}
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
        assert [transferred.get(i, "") for i in range(len(steps))] == [step.transfer for step in steps]
        assert [tuple(computed.get(i, ())) for i in range(len(steps))] == [step.blocks for step in steps]


@pytest.mark.parametrize(("lanes", "expected"), [("one", {"rings"}), ("each", {"odoq", "kv", "dq", "dkv"})])
def test_lanes(lanes: str, expected: set[str]) -> None:
    plan = Mesh(tile=(3, 3), lanes=lanes).backward(small_problem(9), COMPUTE_BOUND)
    assert set(plan.lanes) == expected
    assert all(op.lane == op.reads[0].tensor for op in plan.ops if isinstance(op, Pass)) == (lanes == "each")


def test_tiles() -> None:
    assert tiles(1) == [(1, 1)]
    assert tiles(12) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert len(tiles(256)) == 9


def test_auto_stands_for_every_tile() -> None:
    problem = small_problem(12)
    assert [mesh.tile_shape(12) for mesh in Mesh().candidates(problem)] == tiles(12)
    assert Mesh(tile=(3, 4)).candidates(problem) == (Mesh(tile=(3, 4)),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": (2, 3, 1)}, r"method.tile=\(2,3,1\): must be auto or two integers .* would work"),
        ({"tile": (0, 4)}, r"method.tile=\(0,4\): must be auto or two integers"),
        ({"tile": (2.0, 2)}, r"method.tile=\(2.0,2\): must be auto or two integers"),
        ({"tile": "square"}, "method.tile=square: must be auto or two integers"),
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
