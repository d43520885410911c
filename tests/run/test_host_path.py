"""Work of a rank's thread for each block and transfer, counted with kernels, streams, events and NCCL stubbed."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.host_path import METHODS, PlanStep, TheirStep
from benchmarks.host_stubs import stubbed
from sp_bench.lower import NCCL, Waits, lower
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Block, Fold, Plan, Transfer
from sp_bench.run import nccl
from sp_bench.run.device_streams import needed_waits
from sp_bench.run.executor import Action
from sp_bench.run.nccl import NcclTransport
from tests.support.problems import all_methods, splittable_problem

SIZES = (8, 64, 256)
MOST_CALLS = {"ring": 64, "zigzag": 89, "mesh": 34, "all_gather": 30, "tokenring": 88}
"""Calls of a block with its folds and transfers, torch.distributed's and triton's own with them: TokenRing has two
transfers and two folds for each block, and zigzag, under a causal mask, has blocks of half of the queries or keys."""


def calls(step: Callable[[Action], None]) -> int:
    """How many functions a step calls, of Python or not, once it has been executed before.

    The fewest of several executions: one during which Python collects garbage calls finalizers too.
    """
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    found = []
    for _ in range(2):
        step(Action.EVERYTHING)
    for _ in range(3):
        count = 0
        sys.setprofile(see)
        try:
            step(Action.EVERYTHING)
        finally:
            sys.setprofile(None)
        found.append(count)
    return min(found)


def counted(name: str, n: int) -> tuple[int, int]:
    """(calls of a step, its blocks)."""
    with stubbed(n // 2 + 1, n):
        step = PlanStep(name, n)
        return calls(step), step.count(Block)


@pytest.mark.parametrize("name", MOST_CALLS)
def test_a_block_costs_as_many_calls_among_few_ranks_as_among_many(name: str) -> None:
    """With its folds and transfers. Of Mesh a block has fewer transfers, the more ranks there are."""
    (few, few_blocks), (more, more_blocks), (most, most_blocks) = (counted(name, n) for n in SIZES)
    some, others = (more - few) / (more_blocks - few_blocks), (most - more) / (most_blocks - more_blocks)
    assert others <= some * 1.001
    assert some <= MOST_CALLS[name]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.skipif(not importlib.util.find_spec("ring_flash_attn"), reason="ring-flash-attn is not installed")
@pytest.mark.parametrize("name", ["ring", "zigzag"])
def test_a_block_costs_fewer_calls_than_one_of_ring_flash_attention(name: str) -> None:
    """A third or so, of whatever method, with the same stubs."""
    found = []
    for n in SIZES[:2]:
        with stubbed(n // 2 + 1, n):
            found.append(calls(TheirStep(name, n)))
    assert max(MOST_CALLS.values()) <= 0.35 * (found[1] - found[0]) / (2 * (SIZES[1] - SIZES[0]))


@pytest.mark.parametrize("name", [name for name in MOST_CALLS if name != "zigzag"])
def test_a_block_launches_one_kernel_for_its_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts included, and one for each fold of what has come. Where queries and keys are cut, as by zigzag, dQ has a
    shape of its own, and a launch.
    """
    with stubbed(9, 16):
        step, launched = PlanStep(name, 16), list[object]()
        step()
        fold_triton = importlib.import_module("sp_bench.kernels.fold_triton")
        launch = fold_triton._launch_again
        monkeypatch.setattr(fold_triton, "_launch_again", lambda *given: launched.append(given) or launch(*given))
        for phase in PHASES:
            launched.clear()
            getattr(step, phase)(Action.COMPUTE)
            assert 0 < len(launched) <= step.count(Block, phase) + step.count(Fold, phase)


def test_an_all_to_all_costs_as_many_calls_among_few_ranks_as_among_many() -> None:
    (few, _), (many, _) = (counted("ulysses", n) for n in (8, 64))
    assert few == many


@pytest.mark.parametrize("name", METHODS)
def test_members_of_groups_are_worked_out_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in each execution, and before that once for each group, not for each transfer."""
    worked_out: list[object] = []
    members = NcclTransport._members

    def watched(self: NcclTransport, group: object) -> Any:
        worked_out.append(group)
        return members(self, group)

    with stubbed(9, 16):
        step = PlanStep(name, 16)
        monkeypatch.setattr(NcclTransport, "_members", watched)
        step(Action.EVERYTHING)
        assert len(worked_out) < max(16, step.count(Transfer)), "one for each peer of each lane and group"
        worked_out.clear()
        monkeypatch.setattr(nccl, "members_of", lambda *group: pytest.fail("worked out again"))
        step(Action.EVERYTHING)
    assert not worked_out


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("timed", [False, True])
def test_events_are_those_that_streams_wait_for(name: str, timed: bool) -> None:
    """And a few that time blocks and folds, if that is asked for."""
    with stubbed(5, 8):
        step = PlanStep(name, 8, timed=timed)
        step(Action.EVERYTHING)
        before = Counter(step.device.asked)
        step(Action.EVERYTHING)
        asked = step.device.asked - before
    records = waits = 0
    for plan in step.plans.values():
        needed = needed_waits(plan, lower(plan, step.problem, NCCL).waits)
        ends = {max(i for i, op in plan if op.stream == lane) for lane in plan.lanes}
        records += len({last for of_op in needed for last in of_op} | ends) + 2  # where it begins and ends
        waits += sum(map(len, needed)) + 2 * len(plan.lanes) + 1
    assert (asked["record"], asked["wait"]) == (records, waits)
    timeline = 3 * step.count(Block) + 2 * step.count(Fold) + 2 * len(PHASES)
    assert 0 < asked["mark"] <= timeline if timed else asked["mark"] == 0


def ended(plan: Plan, waits: list[tuple[int, ...]]) -> list[frozenset[int]]:
    """By operation: the others that have ended before it, by its waits, its stream and what follows from them."""
    found: list[frozenset[int]] = []
    before: dict[str, int] = {}
    for index, op in plan:
        own = [*waits[index], *([before[op.stream]] if op.stream in before else [])]
        found.append(frozenset(own).union(*(found[last] for last in own)))
        before[op.stream] = index
    return found


def test_waits_that_are_left_out_follow_from_others() -> None:
    """Waits of every method's plans; and some are left out."""
    left_out = 0
    for method in all_methods(splittable_problem(4)):
        problem = method.assigned(splittable_problem(4))
        for phase in PHASES:
            plan = method.plan(problem, phase, COMPUTE_BOUND)
            waits: tuple[Waits, ...] = lower(plan, problem, NCCL).waits
            every, needed = [tuple(last for _, last in of_op) for of_op in waits], needed_waits(plan, waits)
            assert ended(plan, needed) == ended(plan, every), (method, phase)
            left_out += sum(map(len, every)) - sum(map(len, needed))
    assert left_out > 0
