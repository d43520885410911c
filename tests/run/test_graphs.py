"""Phases captured once and replayed, on a device that works behind the caller: exact, and in no other way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_bench.kernels.aten_cpu import AtenCpu
from sp_bench.kernels.contract import Kind
from sp_bench.methods import build
from sp_bench.plan import Method, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.method import PHASES
from sp_bench.run import device_streams
from sp_bench.run.communicators import Part
from sp_bench.run.engine import Engine
from sp_bench.run.executor import Action
from sp_bench.run.graphs import CALLBACKS, GraphedEngine
from sp_bench.run.holdings import LiveBytes
from sp_bench.run.nccl import NcclTransport
from sp_bench.run.sharding import shard
from tests.run.capturing import Capturing, NotCapturable
from tests.run.queued import Machine, Wires
from tests.run.symmetric import SymmetricMemories
from tests.support.problems import splittable_problem

CPU = torch.device("cpu")
REPLAYS = 3


class Kernel(AtenCpu):
    """Its lse is contiguous, as on a GPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Kind) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(q, k, v, mask)
        return out, lse.contiguous()


@pytest.fixture(autouse=True)
def devices_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.run.queued.Rank", Capturing)


def inputs(problem: Problem) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shapes = [(problem.batch, problem.seqlen, h, problem.head_dim) for h in heads]
    return [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes]


def replayed(method: Method, node: int, order: int) -> list[tuple[list[Tensor], list[Tensor], Counter, Counter]]:
    """By rank: results of an eager execution and of replays, and the bytes that each sent."""
    problem = method.assigned(replace(splittable_problem(4), dtype="float32"))
    plans = {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    machine = Machine(problem.n, order)
    memory, found = SymmetricMemories(machine, node) if node else None, []
    for rank, device in enumerate(machine.ranks):
        q, k, v, dout = (device.put(shard(x, problem.layout, rank, problem.n)) for x in inputs(problem))
        with device:
            transport = memory.transport(device, plans.values()) if memory else Wires(device)
            engine = Engine(plans, problem, "auto", CPU, rank=rank, transport=transport, queues=device)
            engine.kernel = Kernel()
            out, saved = engine.forward(q, k, v)
            eager = [x.clone() for x in (out, *engine.backward(dout, saved))]
            sent = Counter(transport.sent_bytes)
            graphs = GraphedEngine(engine, device)
            graphs.backward(dout, graphs.forward(q, k, v)[1])
            before, again = Counter(transport.sent_bytes), []
            for _ in range(REPLAYS):
                out, saved = graphs.forward(q, k, v)
                again += [x.clone() for x in (out, *graphs.backward(dout, saved))]
            assert graphs.spent("forward") is None
            found.append((device, eager, again, sent, Counter(transport.sent_bytes) - before))
    machine.run()
    return [([d.get(x) for x in one], [d.get(x) for x in more], *sent) for d, one, more, *sent in found]


@pytest.mark.parametrize(
    ("method", "options", "node"),
    [("ring", {}, 0), ("ring", {}, 4), ("mesh", {"tile": (2, 2)}, 2), ("ulysses", {}, 0)],
    ids=str,
)
def test_replays_are_executions(method: str, options: dict[str, object], node: int) -> None:
    """Equal in every bit, whatever happens first, and as many bytes are counted."""
    for eager, again, sent, sent_again in replayed(build(method, options), node, order=node):
        for i, x in enumerate(again):
            assert torch.equal(x, eager[i % len(eager)]), i
        assert sent_again == Counter({key: REPLAYS * size for key, size in sent.items()})


def test_callbacks_of_the_host_are_said_by_link_class() -> None:
    _, graphs, _ = alone()
    assert CALLBACKS not in graphs.notes
    transport = NcclTransport(None, communicator=lambda *key: key, nodes=(0, 0, 1, 1))
    graphs._engine.transport = transport
    transport._made[0, (0, 1), Part.WHOLE] = "inside a node"
    assert CALLBACKS not in graphs.notes
    transport._made[0, (0, 2), Part.WHOLE] = "between nodes"
    assert CALLBACKS in graphs.notes and CALLBACKS not in graphs._engine.notes


def alone() -> tuple[Capturing, GraphedEngine, list[Tensor]]:
    problem = replace(splittable_problem(1), dtype="float32")
    plans = {phase: build("ring", {}).plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
    (device,) = Machine(1, seed=0).ranks
    assert isinstance(device, Capturing)
    q, k, v, _ = (device.put(x) for x in inputs(problem))
    engine = Engine(plans, problem, "auto", CPU, transport=Wires(device), queues=device)
    engine.kernel = Kernel()
    return device, GraphedEngine(engine, device), [q, k, v]


def test_other_tensors_are_refused() -> None:
    device, graphs, (q, k, v) = alone()
    with device:
        graphs.forward(q, k, v)
        with pytest.raises(ValueError, match="captured with other tensors"):
            graphs.forward(q.clone(), k, v)


def test_the_host_must_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    device, graphs, (q, k, v) = alone()
    eager = AtenCpu.forward

    def looks(self: AtenCpu, *args: Any) -> tuple[Tensor, Tensor]:
        device.synchronize() if device.capturing else None
        return eager(self, *args)

    monkeypatch.setattr(AtenCpu, "forward", looks)
    with device, pytest.raises(NotCapturable, match="the caller waits"):
        graphs.forward(q, k, v)


def test_a_capture_waits_for_nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """An execution waits for the last one, unless its device has forgotten that."""
    device, graphs, (q, k, v) = alone()
    kept = device.record(device.current())
    monkeypatch.setattr(Capturing, "finished", property(lambda self: kept, lambda self, x: None), raising=False)
    with device, pytest.raises(NotCapturable, match="from outside"):
        graphs.forward(q, k, v)


def test_lanes_end_with_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def execution(self: device_streams.DeviceStreams) -> Iterator[None]:
        """Without the waits at its end."""
        blocks = self._device.current()
        monkeypatch.setattr(self, "_ends", [])
        yield
        self._device.switch(blocks)

    monkeypatch.setattr(device_streams.DeviceStreams, "execution", execution)
    with pytest.raises(NotCapturable, match="not joined"):
        replayed(build("ulysses", {}), 0, 0)


def test_parts_are_replays_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is replayed is compared with parts that are: nothing is launched one by one but to measure memory."""
    device, graphs, (q, k, v) = alone()
    replays: list[Any] = []
    replay = Capturing.replay
    monkeypatch.setattr(Capturing, "replay", lambda self, graph: replays.append(graph) or replay(self, graph))
    with device:
        graphs.forward(q, k, v, Action.EVERYTHING, LiveBytes())
        assert graphs.spent("forward") is not None and not replays
        for action in (*Action, *Action):
            graphs.forward(q, k, v, action)
            assert graphs.spent("forward") is None
    device.machine.run()
    assert len(replays) == 6 and len({id(graph) for graph in replays}) == 3
    assert replays[:3] == replays[3:]


@pytest.mark.parametrize("here", [True, False])
def test_what_cannot_be_captured_is_executed(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With cuda_graph=auto: on this rank, and on all if it is another that can't. It counts no bytes twice."""
    device, graphs, (q, k, v) = alone()
    asked: list[bool] = []
    graphs._all_can = lambda able: asked.append(able) or (able and here)
    eager = AtenCpu.forward

    def looks(self: AtenCpu, *args: Any) -> tuple[Tensor, Tensor]:
        if device.capturing and here:
            raise RuntimeError("operation not permitted when stream is capturing")
        return eager(self, *args)

    with device:
        monkeypatch.setattr(AtenCpu, "forward", looks)
        found = [graphs.forward(q, k, v)[0] for _ in range(2)]
        assert graphs.spent("forward") is not None
        assert asked == [not here]
        graphs.transport.check()
        wanted, _ = graphs._engine.forward(q, k, v)
    device.machine.run()
    assert all(torch.equal(device.get(out), device.get(wanted)) for out in found)
    why = "a capture failed: operation not permitted" if here else "a capture failed on another rank"
    assert graphs.notes[-1].startswith(f"cuda_graph=auto: nothing is replayed, as {why}")


def test_a_capture_that_fails_is_an_error_where_graphs_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, graphs, (q, k, v) = alone()
    monkeypatch.setattr(Capturing, "capture", lambda self, queue: (_ for _ in ()).throw(RuntimeError("not here")))
    with device, pytest.raises(RuntimeError, match="not here"):
        graphs.forward(q, k, v)
