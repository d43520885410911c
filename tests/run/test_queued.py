"""Executions on a device that works behind the caller: right in every order that events allow, and in no other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sp_bench.lower import Lowering, TransportKind, lower
from sp_bench.methods import build
from sp_bench.plan import Join, Plan, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.demand import demand
from sp_bench.plan.documents import Documents, Window
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.run import device_streams, executor
from sp_bench.run.buffers import Arena
from sp_bench.run.device_streams import needed_waits
from sp_bench.run.engine import Engine
from sp_bench.run.one_sided import DATA, FREE, Signal
from sp_bench.run.sharding import shard
from sp_bench.run.symmetric_memory import SymmetricMemory
from tests.run.executions import CPU, Execution, LikeAGpus, fitting, four, inputs, small
from tests.run.queued import Event, Hazard, Machine, Rank, Stream, Wires
from tests.run.symmetric import SymmetricMemories
from tests.support.marks import exhaustive
from tests.support.problems import all_methods, cost_profiles, of_each_name


@pytest.mark.parametrize(("n", "every"), [(1, True), exhaustive(3, False), *(exhaustive(n, True) for n in (2, 3, 4))])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_method_is_exact(n: int, every: bool, causal: bool) -> None:
    """In every variant, or in one; from one to the next another layout, dtype and order of the devices' work."""
    kinds = itertools.cycle([("float64", ""), ("bfloat16", ""), ("float32", "bfloat16")])
    methods = all_methods(small(n, causal=causal))
    for order, method in enumerate(methods if every else of_each_name(methods, turn=n + causal)):
        layout, (dtype, wire) = sorted(LAYOUTS)[order % 3], next(kinds)
        execution = fitting(method, small(n, causal=causal, layout=layout, dtype=dtype, wire=wire))
        assert replace(execution, order=order).wrong() == "", execution


def test_partial_outputs_of_a_shorter_chunk_meet_their_own_lse() -> None:
    """A team of three merges two of them, in slots as long as the longest chunk."""
    problem = replace(small(9, causal=True), seqlen=21, heads=2, kv_heads=1)
    assert fitting(build("startrail", {"team": 3}), problem).wrong() == ""


@st.composite
def executions(draw: st.DrawFn) -> Execution:
    n, dtype = draw(st.sampled_from([2, 3, 4, 5, 6])), draw(st.sampled_from([("float64", ""), ("bfloat16", "float32")]))
    layout, causal = draw(st.sampled_from(sorted(LAYOUTS))), draw(st.booleans())
    problem = small(n, causal=causal, layout=layout, dtype=dtype[0], wire=dtype[1])
    execution = fitting(draw(st.sampled_from(all_methods(problem))), problem)
    costs = draw(st.just(COMPUTE_BOUND) | cost_profiles())
    node = draw(st.sampled_from([0, *(size for size in range(2, n + 1) if n % size == 0)]))
    return replace(execution, costs=costs, order=draw(st.integers(0, 2**32)), node=node)


@given(executions())
@pytest.mark.long
def test_any_order_that_events_allow(execution: Execution) -> None:
    assert execution.wrong() == ""


# What holds it together, taken away piece by piece


def known(plan: Plan, waits: tuple) -> list[dict[str, int]]:
    """By operation: the last one of each stream that has ended before it, by its waits and what follows from them."""
    found: list[dict[str, int]] = []
    before: dict[str, int] = {}
    for index, op in plan:
        ended = [*waits[index], *([(op.stream, before[op.stream])] if op.stream in before else [])]
        mine: dict[str, int] = {}
        for stream, last in ended:
            for other, at in {**found[last], stream: last}.items():
                mine[other] = max(at, mine.get(other, -1))
        found.append(mine)
        before[op.stream] = index
    return found


def without_one_wait(plan: Plan, problem: Problem) -> Iterator[tuple[str, Lowering]]:
    """The plan's lowering less a wait: each one that doesn't follow from others, but those that a Join is there for."""
    lowering = lower(plan, problem)
    for index, op in plan:
        for stream, last in lowering.waits[index]:
            waits = list(lowering.waits)
            waits[index] = tuple(wait for wait in waits[index] if wait != (stream, last))
            follows = known(plan, tuple(waits))[index].get(stream, -1) >= last
            if not follows and not isinstance(op, Join) and not isinstance(plan.ops[last], Join):
                yield f"{plan.phase} {index}, {op}, without {plan.ops[last]}", replace(lowering, waits=tuple(waits))


MUTATED = [
    ("ring", {}),
    ("tokenring", {}),
    ("mesh", {"tile": (2, 2)}),
    ("mesh", {"tile": (2, 2), "lanes": "each"}),
    ("mesh", {"tile": (4, 1)}),
    ("usp", {"ulysses": 2}),
    ("startrail", {"team": 2}),
    ("all_gather", {"stride": 2}),
    ("pass_q", {}),
    ("double_ring", {"inner": 2}),
    ("group_cast", {"ulysses": 1, "stages": 2}),
    ("hybrid_cp", {}),
]


QUICK = ("ring",)
"""It has few waits."""


@pytest.mark.parametrize(
    ("method", "options"), [each if each[0] in QUICK else exhaustive(*each) for each in MUTATED], ids=str
)
def test_no_wait_can_be_left_out(monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, object]) -> None:
    """Without any one of the plan's waits something is wrong, or two accesses of the same memory are in no order."""
    execution, tried = four(method, options), 0
    plans = execution.plans
    assert execution.wrong(plans) == ""
    for plan in plans.values():
        for which, broken in without_one_wait(plan, execution.method.assigned(execution.problem)):

            def lowered(
                asked: Plan, problem: Problem, kind: TransportKind, plan: Plan = plan, broken: Lowering = broken
            ) -> Lowering:
                return broken if asked is plan else lower(asked, problem, kind)

            monkeypatch.setattr(executor, "lower", lowered)
            assert any(replace(execution, order=order).wrong(plans) for order in range(3)), which
            tried += 1
    assert tried >= 4


SENT_AS_HELD = four("mesh", {"tile": (4, 1)}, wire="float32")
"""Its partials are sent from where they were accumulated."""


def test_what_is_sent_is_kept_until_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SENT_AS_HELD.wrong() == ""
    monkeypatch.setattr(device_streams.DeviceStreams, "keeper", lambda self, index: lambda tensors: None)
    assert "Hazard" in SENT_AS_HELD.wrong()


def test_what_is_kept_is_let_go_within_the_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the latest when blocks have waited for the lane, so that memory is what account says."""
    kept: list[int] = []
    keeper = device_streams.DeviceStreams.keeper

    def watched(self: device_streams.DeviceStreams, index: int) -> Callable[[object], None]:
        keep = keeper(self, index)

        def watch(tensors: object) -> None:
            keep(tensors)
            kept.append(len(self._kept))

        return watch

    monkeypatch.setattr(device_streams.DeviceStreams, "keeper", watched)
    assert SENT_AS_HELD.wrong() == ""
    at_once = max(kept)
    monkeypatch.setattr(device_streams, "_let_go", lambda plan, waits: [()] * len(plan.ops))
    assert SENT_AS_HELD.wrong() == ""
    assert at_once < max(kept)


NOTHING_TO_SEND = four("mesh", {"tile": (4, 1)}, wire="float32", layout="contiguous")
"""Under a causal mask some of its ranks send partials that no block has touched."""


@pytest.mark.parametrize("action", [executor.Action.EVERYTHING, executor.Action.COMMUNICATION])
def test_neutral_partials_are_made_before_anything_is_queued(
    monkeypatch: pytest.MonkeyPatch, action: executor.Action
) -> None:
    """Made in a lane they would wait for all blocks that were queued before."""
    make = Rank._make

    def made(self: Rank, like: Tensor) -> Tensor:
        assert self.current() not in self._lanes.values(), "a lane allocates"
        return make(self, like)

    monkeypatch.setattr(Rank, "_make", made)
    execution = NOTHING_TO_SEND
    problem, plans = execution.method.assigned(execution.problem), execution.plans
    machine = Machine(problem.n, seed=0)
    for rank, device in enumerate(machine.ranks):
        q, k, v, _ = (device.put(shard(x, problem.layout, rank, problem.n)) for x in inputs(problem))
        with device:
            engine = Engine(plans, problem, "auto", CPU, rank=rank, transport=Wires(device), queues=device)
            engine.kernel = LikeAGpus()
            for _ in range(2):
                engine.forward(q, k, v, action)
    machine.run()


class Deaf(Rank):
    """A device that leaves out some of its waits, by their numbers; without any, it numbers them."""

    left_out: range = range(0)
    waits = 0

    def wait(self, stream: Stream, event: Event) -> None:
        if self.waits not in self.left_out:
            super().wait(stream, event)
        self.waits += 1


@pytest.mark.parametrize("end", ["first", "last"])
def test_an_execution_begins_and_ends_with_the_caller_s_stream(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Lanes wait for what the caller did before, and the caller's stream, which casts sums, for all lanes."""
    shared_key_heads = replace(small(4, causal=True, dtype="bfloat16"), kv_heads=2)
    execution = fitting(build("ulysses", {}), shared_key_heads)
    lanes = {phase: len(plan.lanes) for phase, plan in execution.plans.items()}
    assigned = execution.method.assigned(execution.problem)
    inside = {p: sum(map(len, needed_waits(plan, lower(plan, assigned).waits))) for p, plan in execution.plans.items()}
    # A backward's first wait is for the forward's end.
    total = sum(2 * lanes[phase] + inside[phase] for phase in PHASES) + 1
    left_out = range(lanes["forward"]) if end == "first" else range(total - lanes["backward"], total)
    monkeypatch.setattr("tests.run.queued.Rank", Deaf)
    assert execution.wrong() == ""
    monkeypatch.setattr(Deaf, "left_out", left_out)
    assert execution.wrong() != ""


def two_calls_on_two_streams() -> None:
    """Two calls of one engine, with inputs of their own: they share nothing but its buffers."""
    execution = four("ring", {})
    problem, plans = execution.method.assigned(execution.problem), execution.plans
    machine = Machine(problem.n, seed=0)
    for rank, device in enumerate(machine.ranks):
        engine = Engine(plans, problem, "auto", CPU, rank=rank, transport=Wires(device), queues=device)
        with device:
            engine.buffers.of(lower(plans["forward"], problem))
        made = device.record(device.current())
        for _ in range(2):
            stream = machine.stream(device)
            device.wait(stream, made)
            with device.on(stream):
                q, k, v, _ = (device.put(shard(x, problem.layout, rank, problem.n)) for x in inputs(problem))
                with device:
                    engine.forward(q, k, v)
    machine.run()


def test_calls_take_turns_whatever_streams_they_come_on(monkeypatch: pytest.MonkeyPatch) -> None:
    two_calls_on_two_streams()
    monkeypatch.setattr(Rank, "finished", property(lambda self: None, lambda self, event: None), raising=False)
    with pytest.raises(Hazard):
        two_calls_on_two_streams()


def engines_of_one_memory_on_two_streams() -> None:
    """The memory is used on a second stream last, where it grows; then its old place is something else on the first."""
    execution = four("ring", {})
    machine = Machine(execution.problem.n, seed=0)
    for rank, device in enumerate(machine.ranks):
        arena, streams = Arena(CPU, device), (machine.stream(device), machine.stream(device))
        engines = []
        for factor in (1, 16):
            longer = replace(execution.problem, seqlen=factor * execution.problem.seqlen)
            problem = execution.method.assigned(longer)
            plans = {phase: execution.method.plan(longer, phase, execution.costs) for phase in PHASES}
            engines.append(Engine(plans, problem, "auto", CPU, rank=rank, transport=Wires(device), arena=arena))
        for engine, stream in ((engines[0], streams[0]), (engines[0], streams[1]), (engines[1], streams[1])):
            problem, before = engine.problem, arena.nbytes
            with device.on(stream):
                given = [device.put(shard(x, problem.layout, rank, problem.n)) for x in inputs(problem)]
                with device:
                    engine.forward(*given[:3])
        assert 0 < before < arena.nbytes
        with device.on(streams[0]), device:
            torch.empty(before, dtype=torch.uint8).fill_(1)
    machine.run()


def test_engines_of_one_memory_take_turns_whatever_streams_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engines_of_one_memory_on_two_streams()
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "_order_reuse", lambda self: None)
        with pytest.raises(Hazard):
            engines_of_one_memory_on_two_streams()
    monkeypatch.setattr(Rank, "finished", property(lambda self: None, lambda self, event: None), raising=False)
    with pytest.raises(Hazard):
        engines_of_one_memory_on_two_streams()


def test_the_caller_never_waits() -> None:
    """The device would refuse to be asked for a number."""
    machine = Machine(1, seed=0)
    x = machine.ranks[0].put(torch.ones(3))
    with machine.ranks[0], pytest.raises(AssertionError, match="the caller waits"):
        float(x.sum())


def fail_then_go_on() -> None:
    """An execution fails on all ranks, which then make tensors of many sizes, while its lanes are at work."""
    execution = SENT_AS_HELD
    problem, plans = execution.method.assigned(execution.problem), execution.plans
    machine, engines = Machine(problem.n, seed=0), []
    for rank, device in enumerate(machine.ranks):
        q, k, v, _ = (device.put(shard(x, problem.layout, rank, problem.n)) for x in inputs(problem))
        engine = Engine(plans, problem, "auto", CPU, rank=rank, transport=Wires(device), queues=device)
        engine.kernel = LikeAGpus()
        good, calls = engine.kernel.forward, itertools.count()

        def third_fails(*args: object, good=good, calls=calls) -> object:
            if next(calls) == 3:
                raise ValueError("the fourth block is broken")
            return good(*args)

        engine.kernel.forward = third_fails  # pyright: ignore[reportAttributeAccessIssue]
        with device:
            with pytest.raises(ValueError, match="fourth block"):
                engine.forward(q, k, v)
            engines.append((engine, [torch.zeros(size) for size in range(1, 200)]))
    machine.run()


def test_what_a_failed_execution_used_is_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the end of its lanes."""
    fail_then_go_on()
    monkeypatch.setattr(device_streams.DeviceStreams, "abandon", lambda self, held: self._kept.clear())
    with pytest.raises(Hazard):
        fail_then_go_on()


@pytest.mark.parametrize(("method", "options"), [*MUTATED[1:3], ("ulysses", {})], ids=str)
def test_parts_leave_nothing_behind(method: str, options: dict[str, object]) -> None:
    """Blocks alone and transfers alone, between two executions of everything, which agree in every bit."""
    execution = four(method, options)
    problem, plans = execution.method.assigned(execution.problem), execution.plans
    machine, found = Machine(problem.n, seed=3), []
    for rank, device in enumerate(machine.ranks):
        q, k, v, dout = (device.put(shard(x, problem.layout, rank, problem.n)) for x in inputs(problem))
        with device:
            engine = Engine(plans, problem, "auto", CPU, rank=rank, transport=Wires(device), queues=device)
            engine.kernel = LikeAGpus()
            both, saved = [], {}
            for action in (executor.Action.EVERYTHING, *executor.Action, executor.Action.EVERYTHING):
                out, fresh = engine.forward(q, k, v, action)
                saved = fresh if action is executor.Action.EVERYTHING else saved
                gradients = engine.backward(dout, saved, action)
                if action is executor.Action.EVERYTHING:
                    both.append((out, *gradients))
        found.append((device, both))
    machine.run()
    for device, (first, *others) in found:
        for other in others:
            assert all(torch.equal(device.get(x), device.get(y)) for x, y in zip(first, other, strict=True))


SYMMETRIC = [(*case, 4) for case in MUTATED] + [("ring", {}, 2), ("mesh", {"tile": (2, 2)}, 2)]


@pytest.mark.parametrize(("method", "options", "node"), SYMMETRIC, ids=str)
def test_copies_into_peers_memory(method: str, options: dict[str, object], node: int) -> None:
    """In all orders that signals allow, no buffer is overwritten before it is read, or read before it is written."""
    execution = replace(four(method, options), node=node)
    for order in range(3):
        assert replace(execution, order=order).wrong() == ""


IN_RUNS = [
    ("ring", {}, "zigzag"),
    ("pass_q", {}, "contiguous"),
    ("tokenring", {}, "zigzag"),
    ("mesh", {"tile": (2, 2)}, "zigzag"),
    ("mesh", {"tile": (4, 1)}, "contiguous"),
    ("burst_attention", {"inner": 2}, "contiguous"),
    ("startrail", {"team": 2}, "contiguous"),
]
PACKS = {"zigzag": Documents((22, 13)), "contiguous": Window((35,), causal=False, left=6, right=5)}
"""A mask for each layout whose blocks read rows in runs, some from the middle of a chunk on."""


@pytest.mark.parametrize("node", [0, 2, 4])
@pytest.mark.parametrize(("method", "options", "layout"), IN_RUNS, ids=str)
def test_runs_of_rows(method: str, options: dict[str, object], layout: str, node: int) -> None:
    """Copies into peers' memory begin at the first row of a run, and statistics are whole."""
    problem = replace(small(4, causal=True, dtype="float32", wire="bfloat16"), seqlen=35, batch=1, mask=PACKS[layout])
    execution = fitting(build(method, options), replace(problem, layout=LAYOUTS[layout]))
    assert execution.problem.layout.name == layout
    passes = demand(execution.plans["backward"], execution.problem).values()
    assert any(wanted.rows and wanted.rows.start.any() for wanted in passes)
    for order in range(2):
        assert replace(execution, order=order, node=node).wrong() == ""


@pytest.mark.parametrize("left_out", [FREE, DATA])
def test_each_signal_is_needed(monkeypatch: pytest.MonkeyPatch, left_out: int) -> None:
    class Deafened(SymmetricMemory):
        def put(self, signal: Signal) -> None:
            if signal.says != left_out:
                super().put(signal)

        def wait(self, signal: Signal) -> None:
            if signal.says != left_out:
                super().wait(signal)

    monkeypatch.setattr(SymmetricMemories, "memory", Deafened)
    execution = replace(four("ring", {}), node=4)
    assert any("Hazard" in replace(execution, order=order).wrong() for order in range(5))
