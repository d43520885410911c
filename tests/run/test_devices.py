"""Executions from one thread in plan order, by real ranks: without a GPU on gloo, with one on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sp_bench import account
from sp_bench.errors import RequestError
from sp_bench.machine import Devices
from sp_bench.measure.pool import RankPool
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.groups import Group
from sp_bench.plan.method import PHASES
from sp_bench.run import communicators
from sp_bench.run.communicators import Part
from sp_bench.run.devices import Cuda
from sp_bench.run.gloo import GlooTransport
from sp_bench.run.nccl import NcclTransport, transport_for
from sp_bench.run.patience import first_timeout
from sp_bench.run.sms import most_ctas
from sp_bench.run.transport import AloneTransport, Turn
from tests.run import device_jobs
from tests.support.attention_cases import Case, errors_of, of_each_method, of_one_batch_entry, wrong_in
from tests.support.marks import NEEDS_A_GPU, exhaustive
from tests.support.problems import all_methods, splittable_problem
from tests.support.ranks import Ranks


def cases(n: int, dtype: str = "float32", wire: str = "") -> list[Case]:
    """Every method in every variant; from one to the next another layout and mask."""
    found = []
    for i, method in enumerate(all_methods(splittable_problem(n))):
        layout = ("striped", "contiguous", "zigzag")[i % 3]
        layout = layout if layout in method.layouts else method.layouts[0]
        options = tuple((k, v) for k, v in vars(method).items() if k != "layout")
        case = Case(
            n=n, method=method.name, options=options, layout=layout, causal=i % 4 != 3, heads=2 * n, kv_heads=n,
            dtype=dtype, wire_dtype=wire,
        )  # fmt: skip
        found.append(case)
    return found + of_one_batch_entry(found)


def assert_exact(wanted: Iterable[Case], answers: list[dict[Case, Any]]) -> None:
    for case in wanted:
        assert not wrong_in(case, errors_of(answer[case] for answer in answers[: case.n])), case


TRANSPORTS = (
    (4, "gloo"),
    (4, "through the host"),
    (4, "a group for each lane"),
    (6, "a group for each lane"),
    (4, "a group for each lane and node"),
    (4, "shared memory"),
    (6, "shared memory of two nodes"),
)
"""Ranks, and the transport between them by its name in device_jobs."""


@pytest.mark.parametrize(("n", "kind"), [each if each[0] == 4 else exhaustive(*each) for each in TRANSPORTS])
def test_a_variant_of_each_method_does_not_deadlock(ranks: Ranks, n: int, kind: str) -> None:
    assert_plan_order_works(ranks, of_each_method(cases(n), turn=TRANSPORTS.index((n, kind))), kind)


@pytest.mark.long
@pytest.mark.parametrize(("n", "kind"), TRANSPORTS)
def test_plan_order_from_one_thread_does_not_deadlock(ranks: Ranks, n: int, kind: str) -> None:
    assert_plan_order_works(ranks, cases(n), kind)


def assert_plan_order_works(ranks: Ranks, wanted: list[Case], kind: str) -> None:
    """Though it waits in each transfer: the first operation that has not ended can always go on.

    In batches, as NCCL takes them, each lane has a group of its own. The bytes counted are the plan's.
    """
    answers = ranks.run(device_jobs.in_plan_order, wanted, kind)[: wanted[0].n]
    assert_exact(wanted, [{case: errors for case, (errors, _) in answer.items()} for answer in answers])
    for case in wanted:
        volumes = [account.volume(case.built.plan(case.problem, p, case.costs), case.problem) for p in PHASES]
        for rank, answer in enumerate(answers):
            assert Counter(answer[case][1]) == sum((Counter(v.of(rank)) for v in volumes), Counter()), case


def test_a_batch_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the lane's group, receives and sends together, waited for; nothing that lies in another order is sent."""
    waited: list[int] = []

    class Work:
        def wait(self) -> None:
            waited.append(1)

    batches: list[list[Any]] = []

    class Communicator:
        """As torch has NCCL's: messages are posted between the start and the end of a batch."""

        supports_coalescing = True

        def __init__(self, name: str) -> None:
            self.name = name

        def _get_backend(self, device: torch.device) -> Communicator:
            return self

        def _start_coalescing(self) -> None:
            batches.append([])

        def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
            batches[-1] += [("send", self.name, peer, tuple(x.shape)) for x in tensors]

        def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
            batches[-1] += [("recv", self.name, peer, tuple(x.shape)) for x in tensors]

        def _end_coalescing(self) -> Work:
            return Work()

    monkeypatch.setattr(dist, "get_rank", lambda group: 6)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 8)
    asked: list[tuple[int, tuple[int, ...]]] = []

    def communicator(lane: int, members: tuple[int, ...], part: Part) -> Communicator:
        asked.append((lane, members))
        return Communicator(f"lane {lane}" if part is Part.WHOLE else part.name)

    transport = NcclTransport(None, communicator=communicator)
    x = torch.zeros(2, 3)
    keys = [("kv", "kv", "k"), ("kv", "kv", "v")]
    transport.exchange(Turn(1, 0), [(5, (x, x))], [(7, (x, x))], keys)
    assert batches == [[("recv", "lane 1", 5, (2, 3))] * 2 + [("send", "lane 1", 7, (2, 3))] * 2]
    assert waited == [1]
    assert dict(transport.sent_bytes) == dict.fromkeys(keys, 24)
    batches.clear()
    transport.exchange(Turn(1, 1, Group(2, 2)), [(4, (x,))], [(4, (x,))], keys[:1])
    assert [peer for _, _, peer, _ in batches[0]] == [0, 0], "by their number among those that the group has"
    assert asked == [(1, tuple(range(8))), (1, (4, 6))]
    transport = NcclTransport(None, communicator=communicator, nodes=(0, 0, 0, 0, 1, 1, 1, 1))
    batches.clear()
    transport.exchange(Turn(1, 2), [(7, (x,))], [(1, (x,)), (5, (x,))], keys[:1])
    assert batches == [
        [("send", "FAR", 1, (2, 3))], [("recv", "NEAR", 3, (2, 3)), ("send", "NEAR", 1, (2, 3))],
    ], "inside a node by a communicator of its own"  # fmt: skip
    assert transport.communicators == (
        "lane 1: 4 ranks of a node", "lane 1: 8 ranks, between nodes",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"\(3, 2\) would be sent in the order of its strides \(1, 3\)"):
        transport.exchange(Turn(0, 1), [], [(7, (x.T,))], keys[:1])


def test_communicators_are_made_in_one_order_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each lane and group of ranks among which a plan moves data in it; none for a rank alone."""
    made: list[tuple[int, tuple[int, ...]]] = []
    monkeypatch.setattr(dist, "get_rank", lambda group: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 8)
    problem = splittable_problem(8)
    transport = NcclTransport(None, communicator=lambda *key: made.append(key[:2]) or len(made))
    rings = build("mesh", {"tile": (4, 2)})
    plans = [rings.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES]
    transport.prepare(plans)
    transport.prepare(plans)
    assert sorted(made) == [(0, (1, 5)), (0, (4, 5, 6, 7))], "a ring inside a node has the channels of its links"
    made.clear()
    method = build("startrail", {"team": 2})
    plan = method.plan(problem, "forward", COMPUTE_BOUND)
    NcclTransport(None, communicator=lambda *key: made.append(key[:2])).prepare([plan])
    assert made == [(0, (4, 5)), (1, (4, 5)), (1, tuple(range(8))), (1, (1, 5))], "all for pairs that exchange"


def test_messages_keep_their_channels_inside_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This plan's messages reach beyond nodes. Collectives, and ranks that share no node, need only one channel."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 8)
    problem, (near, far) = splittable_problem(8), (Part.NEAR, Part.FAR)

    def made(method: str, nodes: tuple[int, ...], **options: object) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        transport = NcclTransport(None, communicator=lambda *key: found.append(key) or 0, nodes=nodes)
        chosen = build(method, options).candidates(problem)[0]
        transport.prepare([chosen.plan(problem, "forward", COMPUTE_BOUND)])
        return found

    two_nodes, everyone = (0, 0, 0, 0, 1, 1, 1, 1), tuple(range(8))
    assert made("ring", two_nodes) == [(0, (4, 5, 6, 7), near), (0, everyone, far)]
    assert made("ring", everyone) == made("ring", (0,) * 8) == [(0, everyone, Part.WHOLE)]
    assert made("ring", (0, 0, 0, 1, 1, 2, 3, 3)) == [(0, everyone, far)], "alone on its node"
    assert made("all_gather", two_nodes) == [(0, everyone, Part.WHOLE)]
    for ctas in (2, 4, 8, 16, 32):
        assert near.ctas(ctas) + far.ctas(ctas) <= ctas == Part.WHOLE.ctas(ctas)


def test_a_communicator_of_nccl_is_connected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)
            self.config = SimpleNamespace(max_ctas=-1)

    version = [2, 27, 3]
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: tuple(version))
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("NCCL", (), {"Options": Options}), raising=False)
    monkeypatch.setattr(communicators, "own_group", lambda *ranks, **how: asked.append({"of": ranks, **how}))
    device = torch.device("cuda", 1)
    communicators.lane_communicator("world", device, timedelta(seconds=9), 26, 2, (0, 1))  # pyright: ignore
    assert (asked[0]["of"], asked[0]["backend"]) == (("world", (0, 1), "lane 2 of 26 CTAs"), "nccl")
    assert asked[0]["device"] == device and asked[0]["options"].is_high_priority_stream
    assert asked[0]["options"]._timeout == asked[0]["timeout"] == first_timeout(timedelta(seconds=9))
    assert asked[0]["options"].config.max_ctas == 26
    communicators.lane_communicator("world", device, None, 26, 1, (0, 1), Part.FAR)  # pyright: ignore
    far = asked.pop()
    assert far["of"][2] == "lane 1 of 6 CTAs for messages between nodes, where ranks share nodes"
    assert far["options"].config.max_ctas == 6
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    communicators.lane_communicator("world", device, None, 8, 0, (0, 1))  # pyright: ignore
    assert asked[1]["options"].config.max_ctas == -1, "NCCL reads the environment's"
    version[:] = [2, 25, 1]
    communicators.lane_communicator("world", device, None, 8, 0, (0, 1))  # pyright: ignore
    for lane, part in ((1, Part.WHOLE), (0, Part.NEAR)):  # a second one, beside that of lane 0 or between nodes
        with pytest.raises(RequestError, match=r"NCCL 2.25.1: .* from 2.26 on; a torch built with NCCL 2.26, or"):
            communicators.lane_communicator("world", device, None, 8, lane, (0, 1), part)  # pyright: ignore


def test_several_communicators_take_nccl_s_launch_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is NCCL's default nowhere: a process that says nothing gets it, and one that turns it off is refused."""
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    monkeypatch.setattr(communicators, "own_group", lambda *ranks, **how: "group")
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=-1))
    fake = type("NCCL", (), {"Options": staticmethod(lambda is_high_priority_stream: options)})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake, raising=False)
    environment: dict[str, str] = {}
    monkeypatch.setattr(communicators.os, "environ", environment)

    def make(lane: int) -> None:
        communicators.lane_communicator("world", torch.device("cuda", 0), None, 8, lane, (0, 1))  # pyright: ignore

    make(0)
    assert environment == {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, "a later lane may come beside it"
    make(1)
    environment["NCCL_LAUNCH_ORDER_IMPLICIT"] = "0"
    make(0)
    with pytest.raises(RequestError, match=r"NCCL_LAUNCH_ORDER_IMPLICIT=0: .*; NCCL_LAUNCH_ORDER_IMPLICIT=1 would"):
        make(1)


def test_without_nccl_the_host_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    group, plans = object(), {}
    assert type(transport_for(None, torch.device("cuda", 0), plans)) is GlooTransport
    assert type(transport_for(group, torch.device("cpu"), plans)) is GlooTransport  # pyright: ignore
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
    assert type(transport_for(group, torch.device("cuda", 0), plans)).__name__ == "HostTransport"  # pyright: ignore


def test_alone_a_rank_gets_what_it_sends() -> None:
    """As much as it is to get, and no more than that of what it sends."""
    transport = AloneTransport()
    into, sent = torch.full((2, 3), torch.nan), torch.arange(4.0)
    transport.exchange(Turn(0, 0), [(1, (into,))], [(1, (sent,))], [("o", "o", "out")])
    assert into.flatten().tolist() == [0, 1, 2, 3, 0, 0]
    assert dict(transport.sent_bytes) == {("o", "o", "out"): 16}


def test_lanes_are_few_enough_for_all_communicators_at_once() -> None:
    """All that can be under way at once must fit on a GPU together (run.nccl)."""
    plans = [
        method.plan(method.assigned(problem), phase, case_costs)
        for n in (4, 6, 9, 16)
        for problem in [splittable_problem(n)]
        for method in all_methods(problem)
        for phase in PHASES
        for case_costs in [Case(n=n, method=method.name).costs]
    ]
    for lanes in {len(plan.lanes) for plan in plans}:  # those of an A100, the GPU with the fewest SMs
        assert lanes * most_ctas(108, lanes) < 108


@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_A_GPU)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "a narrow wire"])
@pytest.mark.parametrize("n", [2, 4])
def test_ranks_that_share_a_gpu(n: int, kind: str) -> None:
    """Streams, events and memory of a real device, through the host's memory. `reference` computes fp32 there."""
    dtype, wire = ("float32", "bfloat16") if kind == "a narrow wire" else (kind, "")
    wanted = cases(n, dtype, wire)
    with RankPool(n, timeout_s=300, devices=Devices(kind="cuda", shared=True)) as pool:
        assert_exact(wanted, pool.run(device_jobs.on_gpus, wanted))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=NEEDS_A_GPU)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_with_a_gpu_each(dtype: str) -> None:
    n = min(torch.cuda.device_count(), 8)
    wanted = cases(n, dtype)
    with RankPool(n, timeout_s=120, devices=Devices(kind="cuda")) as pool:
        assert_exact(wanted, pool.run(device_jobs.on_gpus, wanted))


def test_bound_calls_of_a_gpu_are_those_beneath_torch_s_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is recorded on its stream, and waited for on another, each time that the call is made."""
    called: list[tuple[object, ...]] = []

    class Beneath:
        def record(self, stream: object) -> None:
            called.append(("record", id(self), stream))

        def wait(self, stream: object) -> None:
            called.append(("wait", id(self), stream))

    class Event(Beneath):
        def record(self, stream: object = None) -> None:
            pytest.fail("torch's method")

        wait = record

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch._C, "_cuda_setStream", lambda **which: called.append(("switch", *which.values())), raising=False
    )
    device, lane = Cuda(torch.device("cuda", 1)), SimpleNamespace(stream_id=7, device_index=1, device_type=2)
    stream: Any = lane
    event, record = device.recorder(stream)
    wait, switch = device.waiter(stream, event), device.switcher(stream)
    for _ in range(2):
        record()
        switch()
        wait()
    assert called == [("record", id(event), lane), ("switch", 7, 1, 2), ("wait", id(event), lane)] * 2
