"""Work of a rank's streams before what they wait for is there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_bench.lower import GLOO, PrepostedReceive, TransportKind, Waits, lower
from sp_bench.methods import build
from sp_bench.plan import Method, Op, Plan, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.mask import Mask
from sp_bench.plan.method import PHASES
from sp_bench.run import home, streams
from sp_bench.run.engine import Engine
from sp_bench.run.gloo import GlooTransport
from sp_bench.run.transport import AloneTransport, Call, Key, Message, NextTransfer, Transport, Turn
from tests.run import jobs
from tests.support.marks import exhaustive
from tests.support.problems import all_methods, splittable_problem
from tests.support.processes import LONG_S
from tests.support.ranks import WORLD, Ranks


def one_rank(method: Method, problem: Problem, transport: Transport) -> tuple[Engine, list[Tensor]]:
    """Rank 1, and its q, k, v and dout."""
    problem = method.assigned(problem)
    plans = {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    engine = Engine(plans, problem, "auto", torch.device("cpu"), rank=1, transport=transport)
    dtype, heads = getattr(torch, problem.dtype), (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shapes = [(problem.batch, problem.queries.most, each, problem.head_dim) for each in heads]
    return engine, [torch.randn(shape, dtype=dtype) for shape in shapes]


class Expecting(AloneTransport):
    """Alone, and tells when a receive is posted ahead."""

    kind = TransportKind(name="expecting", preposts=True)

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[Turn, Sequence[Message]] = {}
        self.ahead = threading.Event()
        self.matched: list[bool] = []

    def prepost(self, turn: Turn, receives: Sequence[Message]) -> None:
        self.expected[turn] = receives
        self.ahead.set()

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        if turn in self.expected:
            ahead = self.expected.pop(turn)
            self.matched.append(len(ahead) == len(receives) and all(map(same_memory, ahead, receives)))
        super().exchange(turn, receives, sends, counted_as)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_partial_is_received_before_the_one_to_be_sent_is_computed(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TokenRing: the block whose result is sent first doesn't end before the receive beside that is posted."""
    transport = Expecting()
    engine, (q, k, v, dout) = one_rank(build("tokenring", {}), splittable_problem(4), transport)
    kernel, posted = type(engine.kernel), []
    called = "forward" if phase == "forward" else "gradients"
    block = getattr(kernel, called)

    def patient(self: object, *args: Tensor | Mask) -> tuple[Tensor, ...]:
        posted.append(transport.ahead.wait(LONG_S))
        return block(self, *args)

    if phase == "forward":
        monkeypatch.setattr(kernel, called, patient)
    _, saved = engine.forward(q, k, v)
    if phase == "backward":
        transport.ahead.clear()
        transport.matched.clear()
        monkeypatch.setattr(kernel, called, patient)
        engine.backward(dout, saved)
    engine.close()
    assert posted == [True] * 4
    assert transport.matched and all(transport.matched), "into the buffers of the transfer itself, from its source"
    assert transport.expected == {}, "each was used"


def test_gloo_receives_what_was_expected(ranks: Ranks) -> None:
    """Once, in the buffer that was posted; and the next message of the lane is the next one."""
    for rank, found in enumerate(ranks.run(jobs.receive_ahead, 1000)):
        source = (rank - 1) % WORLD
        assert found == ([[100.0 + source], [200.0 + source], [300.0 + source]], 3)


@pytest.mark.parametrize("all_ranks", [True, False])
@pytest.mark.parametrize("ready", [(True, True), (False, True), (False, False)])
def test_gloo_goes_onward_as_soon_as_it_may(ready: tuple[bool, bool], all_ranks: bool, ranks: Ranks) -> None:
    """Tensor by tensor, whether its peers do or not; what it began with isn't sent again, nor what was sent lost."""
    tokens = 100_000
    for rank, found in enumerate(ranks.run(jobs.go_onward, tokens, ready, all_ranks)):
        one, two = (rank - 1) % WORLD, (rank - 2) % WORLD
        ahead = [begun and (all_ranks or one % 2 == 0) for begun in ready]
        second = [[x + two] if began else [x + 20 + one] for x, began in zip((100.0, 200.0), ahead, strict=True)]
        assert found == ([*second, [140.0 + one], [240.0 + one]], 3 * 2 * 4 * tokens)


class Overwriting(Expecting):
    """Arrivals from now on come at once, and are nothing; what they should have been comes in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.undone: dict[int, list[int]] = {}
        """By lane, the numbers of the transfers that are to come."""
        self.last: Turn | None = None
        """That of the exchange before."""
        self.beside = 0
        """How many were expected beside the transfer before."""

    def begin(self, plan: Plan) -> None:
        lanes = [[i for i, op in plan if op.stream == lane] for lane in plan.lanes]
        self.undone, self.last = dict(enumerate(lanes)), None

    def prepost(self, turn: Turn, receives: Sequence[Message]) -> None:
        place = self.undone[turn.lane].index(turn.number)
        assert place <= 1, "a lane's next transfer, or the one after it"
        self.beside += place
        if not receives:  # from itself
            self.undone[turn.lane].remove(turn.number)
            return
        for _, tensors in receives:
            for tensor in tensors:
                tensor.fill_(torch.nan)
        super().prepost(turn, receives)

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        super().exchange(turn, receives, sends, counted_as)
        if receives and turn != self.last:  # a tree's rounds are exchanges of one turn
            assert self.undone[turn.lane].pop(0) == turn.number
            self.last = turn

    def collective(self, turn: Turn, call: Call) -> None:
        super().collective(turn, call)
        assert self.undone[turn.lane].pop(0) == turn.number


def step(engine: Engine, inputs: list[Tensor], transport: Overwriting | None = None) -> list[Tensor]:
    """out, dq, dk and dv."""
    q, k, v, dout = inputs
    if transport:
        transport.begin(engine.plans["forward"])
    out, saved = engine.forward(q, k, v)
    if transport:
        transport.begin(engine.plans["backward"])
    gradients = engine.backward(dout, saved)
    engine.close()
    return [out, *gradients]


@pytest.mark.parametrize(
    ("n", "layout", "changes"),
    [
        (2, "striped", {}),
        exhaustive(4, "zigzag", {"batch": 2}),
        (4, "contiguous", {"kv_heads": 1, "wire_dtype": "float32"}),
        exhaustive(8, "striped", {}),
        exhaustive(9, "zigzag", {}),
    ],
)
def test_nothing_is_expected_in_memory_that_is_in_use(n: int, layout: str, changes: dict[str, Any]) -> None:
    """Whatever comes before its turn, results are those without anything expected."""
    beside, problem = {}, replace(splittable_problem(n, layout), **changes)
    for method in all_methods(problem):
        method = replace(method, layout=layout if layout in method.layouts else method.layouts[0])
        plain, inputs = one_rank(method, problem, AloneTransport())
        transport = Overwriting()
        engine, _ = one_rank(method, problem, transport)
        pairs = zip(step(plain, inputs), step(engine, inputs, transport), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), method
        assert transport.expected == {}, "each was used"
        assert all(transport.matched), "into the buffers of the transfer itself, from its source"
        beside.setdefault(method.name, []).append(transport.beside)
    assert all(max(beside[name]) > 0 for name in ("ulysses", "usp", "startrail", "mesh") if n in (4, 8, 9)), beside


class Known(streams.Progress):
    """Nothing has ended but what some rule names."""

    def __init__(self, ended: dict[str, int]) -> None:
        self.ended = ended

    def has_reached(self, waits: Waits) -> bool:
        return all(last <= self.ended.get(stream, -1) for stream, last in waits)


def preposting(ahead: Mapping[int, PrepostedReceive], posts: list[int]) -> streams.Prepost:
    """Posts what lanes may, into a list."""

    def prepost(index: int, op: Op, beside: bool) -> bool:
        if index not in ahead or (beside and not ahead[index].beside):
            return False
        posts.append(index)
        return True

    return prepost


@pytest.mark.parametrize(("n", "layout"), [(4, "striped"), (8, "contiguous"), (9, "zigzag")])
@pytest.mark.parametrize("phase", PHASES)
def test_lanes_post_when_the_plan_says(n: int, layout: str, phase: str) -> None:
    """As soon as what Lowering.preposted names has ended, even if nothing else has."""
    problem, beside = splittable_problem(n, layout), Counter[str]()
    for method in all_methods(problem):
        method = replace(method, layout=layout if layout in method.layouts else method.layouts[0])
        assigned = method.assigned(problem)
        plan = method.plan(assigned, phase, COMPUTE_BOUND)
        lowering = lower(plan, assigned, GLOO)
        ahead = lowering.preposted
        for lane in plan.lanes:
            ops = [(index, op) for index, op in plan if op.stream == lane]
            order = [index for index, _ in ops]
            for index in ahead.keys() & {*order}:
                _, after, waits = ahead[index]
                here = order.index(after) + 1 if after is not None else 0
                known, posts = Known(dict(waits)), list[int]()
                streams._Preposting(ops, lowering.buffer_free, preposting(ahead, posts), known).look(order[here])
                assert index in posts, (method, str(plan.ops[index]))
                beside[method.name] += order[here] != index
    assert all(beside[name] > 0 for name in ("ulysses", "usp", "startrail", "mesh") if name in beside), beside


class Noting(GlooTransport):
    """Posts nothing, and notes in which order messages would be posted and waited for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.notes: list[str] = []

    def _receive(self, lane: int, source: int, number: int, x: Tensor) -> Any:
        return self._posted(f"in {x.item()}")

    def _send(self, lane: int, target: int, number: int, x: Tensor) -> Any:
        return self._posted(f"out {x.item()}")

    def _posted(self, message: str) -> Any:
        self.notes.append(f"post {message}")
        return SimpleNamespace(wait=lambda: self.notes.append(f"end {message}"))


@pytest.mark.parametrize("expected", ["", "before", "after"])
@pytest.mark.parametrize("ready", [(True, True, True), (False, True, True), (False, False, False)])
@pytest.mark.parametrize(("now", "then"), [(2, 2), (3, 1), (1, 3)])
def test_a_tensor_goes_onward_when_its_predecessor_has_come_and_gone(
    now: int, then: int, ready: tuple[bool, ...], expected: str
) -> None:
    """A buffer may be received into and sent from before. Whatever wasn't begun with is posted in its turn, once."""
    transport, begin = Noting(), iter(ready)
    out, into, back = ([torch.tensor(x + i) for i in range(3)] for x in (10, 20, 30))

    def next_transfer() -> tuple[Turn, Message, Message] | None:
        return (Turn(1, 1), (0, back[:then]), (2, into[:then])) if next(begin) else None

    if expected == "before":
        transport.prepost(Turn(1, 1), [(0, back[:then])])
        assert transport.notes == [f"post in {30 + i}" for i in range(then)]
        transport.notes.clear()
    transport.exchange_pipelined(Turn(1, 0), (0, into[:now]), (2, out[:now]), [("l", "t", "f")] * now, next_transfer)
    begun = [i for i in range(min(now, then)) if ready[i]]
    notes = [f"post in {20 + i}" for i in range(now)] + [f"post out {10 + i}" for i in range(now)]
    for i in range(now):
        notes += [f"end in {20 + i}", f"end out {10 + i}"]
        notes += [f"post in {30 + i}"] if i in begun and expected != "before" else []
        notes += [f"post out {20 + i}"] if i in begun else []
    assert transport.notes == notes
    transport.notes.clear()
    if expected == "after":
        transport.prepost(Turn(1, 1), [(0, back[:then])])
    transport.exchange(Turn(1, 1), [(0, back[:then])], [(2, into[:then])], [("l", "t", "f")] * then)
    rest = [i for i in range(then) if i not in begun]
    notes = [f"post in {30 + i}" for i in rest if expected != "before"] + [f"post out {20 + i}" for i in rest]
    notes += [f"end in {30 + i}" for i in range(then)] + [f"end out {20 + i}" for i in range(then)]
    assert transport.notes == notes


class Onwards(AloneTransport):
    """Alone, and notes what could be begun with beside each transfer."""

    kind = TransportKind(name="onwards", pipelines=True)

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[tuple[Turn, Message, Message]] = []
        self.lonely: set[int] = set()
        """By number, transfers that couldn't begin with another."""
        self.begun: dict[int, tuple[Turn, Message, Message]] = {}
        """Work that the others began with, where it was time."""

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        self.lonely.add(len(self.transfers))
        self._transfer(turn, receives[0], sends[0], counted_as)

    def exchange_pipelined(
        self, turn: Turn, receive: Message, send: Message, counted_as: Sequence[Key], next_transfer: NextTransfer
    ) -> None:
        if (messages := next_transfer()) is not None:
            self.begun[len(self.transfers)] = messages
        self._transfer(turn, receive, send, counted_as)

    def _transfer(self, turn: Turn, receive: Message, send: Message, counted_as: Sequence[Key]) -> None:
        self.transfers.append((turn, receive, send))
        super().exchange(turn, [receive], [send], counted_as)


def same_memory(one: Message, other: Message) -> bool:
    return one[0] == other[0] and [x.data_ptr() for x in one[1]] == [x.data_ptr() for x in other[1]]


@pytest.mark.parametrize(
    ("method", "n", "options", "lonely"),
    [
        ("ring", 5, {}, {3}),
        ("mesh", 5, {"tile": (1, 5)}, {3}),
        # kv, q, kv, kv on one lane, to other ranks by turns; then o is computed first.
        ("mesh", 8, {"tile": (2, 4)}, {0, 1, 3, 4}),
        # Slices follow one another.
        ("all_gather", 5, {"stride": 1, "collectives": "messages"}, {19}),
        # Partials travel last, which blocks add to.
        ("pass_q", 5, {}, {3, 4, 5, 6, 7}),
    ],
)
def test_what_goes_onward(method: str, n: int, options: dict, lonely: set[int]) -> None:
    """Each transfer but the lonely ones is given the next one, with the very tensors that this uses then."""
    transport = Onwards()
    engine, (q, k, v, _) = one_rank(build(method, options), splittable_problem(n), transport)
    engine.forward(q, k, v)
    engine.close()
    assert transport.lonely == lonely
    assert min(transport.begun) == min({*range(len(transport.transfers))} - lonely), "there is room for two chunks"
    for number, (turn, *ahead) in transport.begun.items():
        same_turn, *messages = transport.transfers[number + 1]
        assert turn == same_turn
        assert all(map(same_memory, ahead, messages))


def test_nothing_goes_onward_to_another_rank() -> None:
    """Hops of q and of kv, in turn: the second one would have half of the link while the first one needs it."""
    transport = Onwards()
    engine, (q, k, v, _) = one_rank(build("mesh", {"tile": (3, 3)}), splittable_problem(9), transport)
    engine.forward(q, k, v)
    engine.close()
    targets = [target for _, _, (target, _) in transport.transfers[:4]]
    assert all(one != other for one, other in pairwise(targets))
    assert transport.lonely == {*range(6)}
    assert not transport.begun


class Threads(AloneTransport):
    """Alone, and notes by which threads transfers were done."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def exchange(
        self, turn: Turn, receives: Sequence[Message], sends: Sequence[Message], counted_as: Sequence[Key]
    ) -> None:
        self.seen.add(threading.get_ident())
        super().exchange(turn, receives, sends, counted_as)

    def collective(self, turn: Turn, call: Call) -> None:
        self.seen.add(threading.get_ident())
        super().collective(turn, call)


@pytest.mark.parametrize(
    ("method", "transfers_first", "by_the_caller"),
    [("ulysses", False, True), ("ulysses", True, False), ("ring", False, False)],
)
def test_a_plan_that_is_a_sequence_needs_one_thread(
    method: str, transfers_first: bool, by_the_caller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, but where the caller may not transfer."""
    here = home.Home()
    here.transfers_first = transfers_first
    monkeypatch.setattr(home, "_home", here)
    transport = Threads()
    engine, (q, k, v, dout) = one_rank(build(method, {}), splittable_problem(4), transport)
    _, saved = engine.forward(q, k, v)
    engine.backward(dout, saved)
    engine.close()
    assert (transport.seen == {threading.get_ident()}) == by_the_caller
    assert by_the_caller or threading.get_ident() not in transport.seen
