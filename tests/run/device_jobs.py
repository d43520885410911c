"""Jobs of ranks in the tests of devices. Imported inside the ranks: no pytest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sp_bench.lower import SHARED
from sp_bench.measure.devices import device_here, transport_here
from sp_bench.measure.pool import report
from sp_bench.plan.groups import Group
from sp_bench.plan.method import PHASES
from sp_bench.run.communicators import Part
from sp_bench.run.engine import Engine
from sp_bench.run.gloo import GlooTransport, HostTransport
from sp_bench.run.groups import own_group, timeout_of
from sp_bench.run.nccl import NcclTransport
from sp_bench.run.sharding import shard
from sp_bench.run.shared_memory import shared_transport
from sp_bench.run.transport import Call, Members, Transport, Turn
from tests.support.attention_cases import Case, Difference, difference
from tests.support.ranks import group_of


@dataclass
class Inline:
    """A device that works at once (run.devices.Device): what is queued is done, in the order of queueing."""

    capturing: bool = False
    finished: None = None
    asked: list[Any] = field(default_factory=list)

    def current(self) -> int:
        return -1

    def lane(self, number: int) -> int:
        return number

    def switch(self, stream: int) -> None:
        pass

    def record(self, stream: int, event: None = None) -> None:
        return None

    def wait(self, stream: int, event: None) -> None:
        self.asked.append(stream)

    def recorder(self, stream: int) -> tuple[None, Callable[[], Any]]:
        return None, partial(self.record, stream)

    def waiter(self, stream: int, event: None) -> Callable[[], Any]:
        return partial(self.wait, stream, event)

    def switcher(self, stream: int) -> Callable[[], Any]:
        return partial(self.switch, stream)

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def delay(self) -> None:
        pass

    def machine_s(self, mark: float) -> None:
        return None

    def synchronize(self) -> None:
        pass


def of_gloo(group: Any, lane: int, members: Members, part: Part) -> Any:
    """A group of gloo for each communicator of NCCL, which takes the same batches and collectives."""
    return own_group(group, members, f"as NCCL's lane {lane}, {part.value}", backend="gloo")


def made(group: Any, kind: str) -> Transport:
    """A transport by its name in tests."""
    if kind == "gloo":
        return GlooTransport(group)
    if kind == "through the host":
        return HostTransport(group)
    if kind.startswith("shared memory"):  # of all ranks, or of two "nodes" by parity or halves
        halves = dist.get_rank(group) >= dist.get_world_size(group) // 2
        return shared_transport(group, node=f"half {halves}" if "two nodes" in kind else "")
    ranks = range(dist.get_world_size(group))
    nodes = [2 * rank // len(ranks) for rank in ranks] if kind.endswith("node") else ()
    return NcclTransport(group, communicator=partial(of_gloo, group), nodes=nodes)


def timeouts_of_uses(seconds: float) -> list[float]:
    """Seconds that the operations of a lane's group have had, one after the other, with such a timeout."""
    world = dist.group.WORLD
    assert world is not None
    transport = NcclTransport(world, communicator=partial(of_gloo, world), timeout=timedelta(seconds=seconds))
    n, rank, x, found = dist.get_world_size(), dist.get_rank(), torch.zeros(2), []
    everyone = Group(1, n)

    def used(number: int, shift: int | None) -> None:
        turn, into = Turn(0, number), torch.empty(2 if shift is not None else 2 * n)
        if shift is None:
            transport.collective(turn, Call("all_gather", everyone, [into], [x]))
        else:
            transport.exchange(turn, [((rank - shift) % n, [into])], [((rank + shift) % n, [x])], [("", "", "")])
        (group,) = set(transport._made.values())
        found.append(timeout_of(group).total_seconds())

    for number, shift in enumerate((1, 1, 2, 1, None, None, 2)):
        used(number, shift)
    return found


def in_plan_order(cases: Sequence[Case], kind: str) -> dict[Case, tuple[tuple[Difference, ...], dict]]:
    """Each case from one thread, which waits in each transfer: errors, and the bytes sent."""
    found = {}
    for case in cases:
        plans = {phase: case.built.plan(case.problem, phase, case.costs) for phase in PHASES}
        group = group_of(case.n, case)
        if group is not None:
            transport = made(group, kind)
            transport.prepare(plans.values())
            queues = Inline() if transport.kind is not SHARED else None
            errors = run(case, plans, transport, dist.get_rank(group), torch.device("cpu"), queues)
            found[case] = (errors, dict(transport.sent_bytes))
    return found


def on_gpus(cases: Sequence[Case]) -> dict[Case, tuple[Difference, ...]]:
    """Each case by all ranks of the pool, on their devices: errors of the second of two executions."""
    found = {}
    for case in cases:
        plans = {phase: case.built.plan(case.problem, phase, case.costs) for phase in PHASES}
        report(str(case))
        transport = transport_here(plans)
        run(case, plans, transport, dist.get_rank(), device_here(), None)
        found[case] = run(case, plans, transport, dist.get_rank(), device_here(), None)
    return found


def run(
    case: Case, plans: dict, transport: Transport, rank: int, device: torch.device, queues: Any
) -> tuple[Difference, ...]:
    """How far one rank's out, dq, dk and dv are from the fp64 reference."""
    layout, seqlen = case.problem.layout, case.n * case.tokens
    engine = Engine(plans, case.problem, case.kernel, device, rank=rank, transport=transport, queues=queues)
    q, k, v, dout = (shard(x, layout, rank, case.n).to(device) for x in case.inputs(seqlen))
    out, saved = engine.forward(q, k, v)
    results = (out, *engine.backward(dout, saved))
    wanted = case.reference(seqlen)
    return tuple(difference(x.cpu(), shard(y, layout, rank, case.n)) for x, y in zip(results, wanted, strict=True))
